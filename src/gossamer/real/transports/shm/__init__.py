"""The transport of one machine: frames, windows and all-reduces in shared memory.

Read `transport` first, then `memory`, which has the layout of the shared memory. Frames are in
`frames`, `rings` and `large_frames`, windows in `windows`, and all-reduces in `contributions` and
`all_reduce`. `system` has locks and bells, `gpu` is for workers that share a GPU, and other
transports use the all-reduces by `one_host`.
"""

from gossamer.real.transports.shm.memory import Segments, create_segments
from gossamer.real.transports.shm.transport import ShmTransport

__all__ = ["Segments", "ShmTransport", "create_segments"]
