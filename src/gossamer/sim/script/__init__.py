"""A user's script in virtual time: the simulator's gradients come from processes that run it.

Read `script_world` first (what differs from a simulated task), then `script_gradients`: how a
process takes part in the life of a gradient. `crew` starts the processes and talks to them.
"""
