"""Real workers on MPI, for clusters with `mpirun` or `srun`. Importing this starts the engine."""

from gossamer.real.transports.mpi.transport import MpiTransport

__all__ = ["MpiTransport"]
