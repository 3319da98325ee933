"""The second door: `gossamer train` runs a method, a task and our optimisers on real workers.

Read `train` first: it starts the workers and follows them. `worker_main` is what each of them runs,
and `training` is one worker from its request to its end. `batches` says which samples are whose.
Checkpoints are made by `checkpoint` and laid out on disk by `checkpoint_files`. `other_launcher` is
for jobs of torchrun, mpirun and srun, `replay` records a run and executes it again.
"""
