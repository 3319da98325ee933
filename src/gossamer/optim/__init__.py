"""Optimisers that update many workers at once, learning-rate schedules, and delayed gradients.

Read `optimisers` first. `yellowfin` tunes momentum and rate by itself. `momentum` has the theory of
momentum under asynchrony. `delayed` delays the gradients of any training loop.
"""
