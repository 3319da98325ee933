"""How tensors and frames get from one process to another.

Read `transport` first: it is the contract. `shm` serves one machine, `torch` clusters, `mpi` jobs
of mpirun or srun, `local` a single worker. `store` keeps the small values that all
workers share.
"""
