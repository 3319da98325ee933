"""One machine, shared memory: frames, windows and sums without a copy more than needed.

Read `transport` first, then `memory` (what is shared and where it is). Frames: `frames`, `rings`,
`large_frames`. Windows: `windows`. Sums: `contributions`, `all_reduce`. What the operating system
must give is in `system`; `gpu` is for workers that share a GPU, and `one_host` lends the sums to
other transports.
"""

from gossamer.real.transports.shm.memory import Segments, create_segments
from gossamer.real.transports.shm.transport import ShmTransport

__all__ = ["Segments", "ShmTransport", "create_segments"]
