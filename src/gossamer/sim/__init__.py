"""The simulator: workers, network and faults in virtual time, with true gradients.

Read `simulation` first (one run from settings to result), then `world` (what the workers share),
`worker` (the operations of a method), `gradients` (the life of a gradient) and `kernel` (virtual
time).
"""
