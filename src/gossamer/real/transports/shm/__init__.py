"""One machine, shared memory: frames, windows and sums without a copy more than needed."""

from gossamer.real.transports.shm.segments import Segments, create_segments
from gossamer.real.transports.shm.transport import ShmTransport

__all__ = ["Segments", "ShmTransport", "create_segments"]
