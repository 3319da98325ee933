"""Forms of an operation: ways to compute it for many workers at once that give the same result.

`vmap` has one form for each operation, and it is not always the fast one: attention and embeddings
fall back to a loop, convolutions become grouped ones. Read `table` first (which form is used where,
measured beforehand), then `chosen_forms` (how a model's operations are replaced while it is
evaluated) and `convolution`.
"""
