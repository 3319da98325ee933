"""How a model is divided over the machines of a cluster: copies, stages, and shares of layers.

Closed forms alone: `layer.py` says what a layer computes, holds and sends, `networks.py` has the
tables of published networks, `ways.py` divides one layer, `plan.py` prices a whole division in
time and memory, `search.py` looks for the best one, `hybrids.py` prices those of papers."""
