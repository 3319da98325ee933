"""A user's script as a worker of a simulation: what its process and the coordinator have in common.

`channel` is how the two talk, `memory` is where the models lie that both see, and `fork_server` is
the program from which the processes of scripts are forked. The coordinator's side is
`gossamer.sim.script`, the script's side `gossamer.real.join.virtual.virtual_worker`.
"""
