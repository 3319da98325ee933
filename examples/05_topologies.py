"""How fast a pattern of exchanges mixes: the spectral gap, and the rounds that follow from it.

In every round the disagreement between workers shrinks by the factor 1 - gap; a gap of 1 is the
exact average. A schedule such as one_peer_exponential sends one model a round, and is exact after a
whole period when the number of workers is a power of two.
"""

import math

from gossamer import make_topology

WORKERS = 16
PATTERNS = (
    "ring", "torus", "random_regular:degree=4", "exponential", "one_peer_exponential", "complete",
)  # fmt: skip

print(f"{'topology':24} {'sent':>4} {'gap':>6} {'rounds to 1 %':>14}")
for spec in PATTERNS:
    graph = make_topology(spec, WORKERS)
    sent = len(graph.out_neighbours(0))
    rate = graph.mixing_rate()
    rounds = graph.period if rate == 0 else math.ceil(math.log(0.01) / math.log(rate))
    print(f"{spec:24} {sent:4} {graph.spectral_gap():6.3f} {rounds:14}")

# Prints:
# topology                 sent    gap  rounds to 1 %
# ring                        2  0.051             89
# torus                       4  0.400             10
# random_regular:degree=4     4  0.238             17
# exponential                 4  0.400             10
# one_peer_exponential        1  1.000              4
# complete                   15  1.000              1
