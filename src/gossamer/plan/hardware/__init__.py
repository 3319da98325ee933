"""Machines that were not measured: what a step takes there, and what fits into their memory.

Read `sheet` first: a cluster whose steps come from a data sheet or a trace. `operators` counts what
a step does on fake tensors, `device` has the data sheets, `roofline` gives each operator its time,
`estimate` draws the line over the batch, `chrome_trace` reads a real step, and `room` says whether
a method fits.
"""
