"""A cluster of your own, with things that go wrong at known times.

Six workers on gigabit Ethernet: worker 2 is three times slower, worker 5 dies after 0.5 s, and from
1 s on the first two workers cannot reach the others for 0.2 s.
"""

from gossamer import Cluster, simulate
from gossamer.config.cluster import Compute, Wires
from gossamer.config.faults import parse_fault

faults = (("slow", "2=3"), ("kill", "5@0.5s"), ("partition", "0,1|2-5@1s+0.2s"))
cluster = Cluster(
    name="office",
    workers=6,
    compute=Compute(seconds=0.010, distribution="lognormal", jitter=0.2),
    network=Wires(bandwidth=125e6, latency=200e-6),
    failure_detection=0.1,
    faults=tuple(parse_fault(kind, text) for kind, text in faults),
)

for method in ("all_reduce", "push_gossip", "ad_psgd"):
    result = simulate("digits-mlp", method, cluster, seed=3, epochs=10)
    print(
        f"{method:12} {result.living} of {cluster.workers} workers left,"
        f" {result.steps} steps in {result.virtual_seconds:.2f} s,"
        f" accuracy {100 * result.accuracy:.1f} %"
    )

# Prints:
# all_reduce   5 of 6 workers left, 902 steps in 5.88 s, accuracy 96.9 %
# push_gossip  5 of 6 workers left, 899 steps in 1.98 s, accuracy 96.7 %
# ad_psgd      5 of 6 workers left, 899 steps in 2.07 s, accuracy 96.7 %
