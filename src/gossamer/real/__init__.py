"""Real workers: the same methods on processes of one machine, on torchrun clusters and on MPI.

There are two doors: `join` couples a loop of the user's own, `train` runs a loop of ours. Both
build a `session`: one worker, the servers in its process, and their connection to the others. Each
drives a method's coroutine (`driver`) against a `worker`, which turns the operations of a method
into messages (`router`) and transfers (`transports`). `launch` starts processes, `faults` disturbs
them. `silent_peers` is about peers that live and do not answer, `lost_peer` about the sentence that
ends a user's loop after a death; `transports/torch` says how a death is noticed.
Read `session` first.
"""
