"""Real workers: the same methods on processes, on torchrun clusters and on MPI."""
