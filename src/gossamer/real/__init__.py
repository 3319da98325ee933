"""Real workers: the same methods on processes of one machine, on torchrun clusters and on MPI.

There are two doors: `join` couples a loop of the user's own, `train` hands the loop over. Both
drive a method's coroutine (`driver`) against `worker`, which turns the operations of a method into
messages (`router`) and transfers (`transports`). `launch` starts processes, `faults` disturbs them.
Read `worker` first.
"""
