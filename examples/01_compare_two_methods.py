"""Two ways of training one model on eight workers, of which worker 0 is four times slower.

Synchronous training keeps pace with the slowest worker; AD-PSGD averages random pairs, and lets
the slow worker do the fewer steps that it can.
"""

from gossamer import simulate

for method in ("all_reduce", "ad_psgd"):
    result = simulate("digits-mlp", method, "one-slow-of-8", seed=1, epochs=8)
    print(
        f"{method:10}  {result.virtual_seconds:.2f} virtual s"
        f"  accuracy {100 * result.accuracy:.1f} %"
        f"  waiting {100 * result.waiting_fraction:.0f} %"
    )

# Prints:
# all_reduce  3.77 virtual s  accuracy 95.8 %  waiting 67 %
# ad_psgd     1.00 virtual s  accuracy 95.6 %  waiting 0 %
