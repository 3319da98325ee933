"""One way of observing a run, in virtual time and on real workers.

The simulator and the real workers report each event once, to an `Observer`. `Observers` passes it
on to those that listen. Read `observer` first: it has all events.

    Metrics    counts; `summary` and the rows of a run are made of it
    Timeline   writes all spans of time as a trace that Perfetto opens
    Strip      keeps the first moments of a run, worker by worker
    Callbacks  calls the callbacks of the user, one at a time, whichever thread reports the event

Times are nanoseconds of the world's clock: the virtual one, or the monotonic one of the process.
An end is a worker or a server; servers are numbered after the workers.
"""
