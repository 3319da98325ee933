"""The transport for clusters: Gloo between pairs of processes.

Read `transport` first. Messages go through `links`, in the format of `wire`. Reads, adds and
averages of another process's window are in `one_sided`, all-reduces in `reduce` and `reduce_state`.
`rendezvous` connects the processes, and `reduction_choice` decides who reduces how.

A death is known in three steps:

    noticed    by each peer, whose connection to the dead process breaks (`links`); or by a
               launcher, which writes a notice into the store (`death_notices`, one folder above)
    agreed     whoever notices appends the death to one log in the store (`departures`), so that
               all survivors count the same members from the same all-reduce on
    learned    from the own broken connection, from the launcher's notice, or from a message of a
               peer that has read more of the log (`reduce`); then `transport` tells the router
"""

from gossamer.real.transports.torch.transport import TorchTransport

__all__ = ["TorchTransport"]
