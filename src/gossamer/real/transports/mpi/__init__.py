"""The transport for jobs of `mpirun` or `srun`. To import it starts MPI. Read `transport` first."""

from gossamer.real.transports.mpi.transport import MpiTransport

__all__ = ["MpiTransport"]
