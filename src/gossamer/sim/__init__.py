"""The simulator: workers, network and faults in virtual time, with true gradients.

Read `simulation` first (one run from settings to result), then `world` (who is alive, what breaks),
`worker` (the words of a method) and `kernel` (virtual time).
"""
