"""The second door: `gossamer train` runs a method, a task and our optimisers on real workers.

Read `train` first, then `training`, which is one worker from its job to its end. Checkpoints are
written by `checkpoint` and laid out on disk by `checkpoint_files`.
"""
