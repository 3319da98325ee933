"""The values that loops share (`worker.mean` and the like), at virtual moments.

With a synchronous method the loops' calls are matched by their count. Who makes one waits, and its
gradient is held up, until all others that are in their loops have made theirs; nobody can be a call
ahead. With an asynchronous method a call is answered at once, by what the others have said since
this worker's last one. What travels here takes no virtual time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gossamer.errors import ConfigurationError
from gossamer.script.channel import Said

if TYPE_CHECKING:
    from gossamer.sim.script.script_gradients import ScriptGradient
    from gossamer.sim.script.script_world import ScriptWorld


class SharedCalls:
    """All calls of one run."""

    def __init__(self, world: ScriptWorld) -> None:
        self._world = world
        self._waiting: dict[int, tuple[ScriptGradient, Said]] = {}
        """The calls that wait for those of others, by rank."""
        self._unread: list[dict[tuple[str, str, int], list[bytes]]] = [
            {} for _ in range(world.size)
        ]
        """For each worker, by word, name and speaker: what it has not heard yet."""

    def ask(self, gradient: ScriptGradient, said: Said) -> bool:
        """Whether the asker has its answer."""
        rank = gradient.worker
        if not self._world.budget.is_synchronous:
            self._pass_on(rank, said)
            return True
        self._waiting[rank] = (gradient, said)
        self._go_on(asker=rank)
        return rank not in self._waiting

    def gone(self, rank: int) -> None:
        """A worker has left its loop, or died: nobody waits for it."""
        self._waiting.pop(rank, None)
        self._go_on()

    def check(self) -> None:
        """Nothing can happen any more. If that is because of a call that others do not make, say
        so."""
        if not self._waiting:
            return
        rank = min(self._waiting)
        said = self._waiting[rank][1]
        others = [str(other) for other in self._in_loops() if other not in self._waiting]
        whom = f"worker{'s' * (len(others) > 1)} {', '.join(others)}"
        raise ConfigurationError(
            f"worker {rank} waits in worker.{said['word']}() at {said['place']} for {whom}, whose "
            "loop goes on without such a call; with a synchronous method let all workers make the "
            "same calls in the same order"
        )

    # ------------------------------------------------------------------ synchronous methods

    def _in_loops(self) -> list[int]:
        loops = self._world.source.loops
        return [rank for rank in sorted(self._world.alive) if not loops[rank].has_ended]

    def _go_on(self, asker: int | None = None) -> None:
        """If all who are in their loops have made the call, answer them."""
        if not self._waiting or any(rank not in self._waiting for rank in self._in_loops()):
            return
        calls = {rank: self._waiting[rank] for rank in sorted(self._waiting)}
        self._waiting = {}
        values = [said.raw for _, said in calls.values()]
        for rank in calls:
            self._answer(rank, values)
        for rank, (gradient, _) in calls.items():
            if rank != asker:  # whose talk goes on by itself
                gradient.go_on()

    def _answer(self, rank: int, values: list[bytes]) -> None:
        told = {"lengths": [len(one) for one in values], "live": sorted(self._world.alive)}
        self._world.crew.members[rank].tell("shared", told, raw=b"".join(values))

    # ------------------------------------------------------------------ asynchronous methods

    def _pass_on(self, rank: int, said: Said) -> None:
        word = said["word"]
        for other in self._in_loops() if said["is_heard"] else ():
            if other != rank:
                values = self._unread[other].setdefault((word, said["name"], rank), [])
                if word != "any":
                    values.clear()
                values.append(said.raw)
        unread, self._unread[rank] = self._unread[rank], {}
        self._answer(rank, [one for values in unread.values() for one in values])
