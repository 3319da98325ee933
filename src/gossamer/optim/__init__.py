"""Optimisers that update many workers at once, learning-rate schedules, and delayed gradients.

Read `optimiser` and `elementwise` first; `optimisers` is their table. `layerwise` has those that
must know where each tensor lies, and `large_batch` the torch optimisers LARS and LAMB. `yellowfin`
tunes momentum and rate by itself. `momentum` has the theory of momentum under asynchrony. `delayed`
delays the gradients of any training loop.
"""
