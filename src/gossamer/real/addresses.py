"""Where workers, servers and standbys are: their addresses, and the processes that host them."""

from __future__ import annotations

from dataclasses import dataclass

from gossamer.replica import NOWHERE, Layout


@dataclass(frozen=True)
class Addresses:
    """Where everybody is: workers have the addresses 0 to size - 1, servers follow."""

    size: int
    slices: tuple[slice, ...] = ()
    """The range of the parameters that each server holds."""
    layout: Layout = NOWHERE
    """The place of each parameter in the flat vector."""
    has_standbys: bool = False
    """Whether the servers are followed by as many standbys, each in the next process."""

    @property
    def ends(self) -> int:
        """How many addresses there are."""
        return self.size + len(self.slices) * (1 + self.has_standbys)

    @property
    def servers(self) -> range:
        return range(self.size, self.size + len(self.slices))

    def slice_of(self, end: int) -> slice:
        """The range of a server, or of a standby."""
        return self.slices[(end - self.size) % len(self.slices)]

    def standby_of(self, server: int) -> int | None:
        return server + len(self.slices) if self.has_standbys else None

    def primary_of(self, end: int) -> int | None:
        """Whose standby is at this address; None if it is no standby."""
        return end - len(self.slices) if end >= self.size + len(self.slices) else None

    def acting(self, server: int, live: frozenset[int]) -> int:
        """The address that answers for a server while these processes live."""
        standby = self.standby_of(server)
        return server if standby is None or self.process_of(server) in live else standby

    def lengths(self, whole: int) -> list[int]:
        """The lengths of all windows: a worker's holds the whole model, a server's its range."""
        ranges = [self.slice_of(end) for end in range(self.size, self.ends)]
        return [whole] * self.size + [part.stop - part.start for part in ranges]

    def process_of(self, end: int) -> int:
        """Servers live in the workers' processes in turn, so nobody launches them by hand."""
        if end < self.size:
            return end
        primary = self.primary_of(end)
        return (end - self.size if primary is None else primary - self.size + 1) % self.size

    def serves(self, server: int, rank: int) -> bool:
        """Whether the server at this address has to do with this worker."""
        return True

    def hosted_by(self, process: int) -> list[int]:
        return [end for end in range(self.ends) if self.process_of(end) == process]
