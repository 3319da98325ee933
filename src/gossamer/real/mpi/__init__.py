"""Real workers on MPI, for clusters with `mpirun` or `srun`. Importing this starts the engine."""

from gossamer.real.mpi.transport import MpiTransport

__all__ = ["MpiTransport"]
