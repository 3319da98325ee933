"""A user's loop as a worker of a simulation: its process computes, and the method runs elsewhere.

Read `virtual_worker` first. `virtual_session` talks to the coordinator, `virtual_loader` shares out
the batches, and `virtual_server` has the optimisers of servers. The coordinator's side is
`gossamer.sim.script`.
"""
