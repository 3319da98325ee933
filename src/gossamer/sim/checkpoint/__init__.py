"""A simulated run in pieces: interrupted at any event, and resumed with equal bits.

A suspended coroutine cannot be written to disk. So a checkpoint holds the number of events and the
bits of all tensors, and a run is resumed by making its events again, without gradients and without
arithmetic; then every tensor that the run holds gets its value back. Read `pieces` first, then
`state` (which tensors those are) and `file`; `gossamer.sim.memory.shapes` has the events without
arithmetic.
"""
