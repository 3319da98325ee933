"""What a worker that comes during the run gets from one that is there, whose loop goes on.

    newcomer                                   a living worker, drawn at random
    ────────                                   ────────────────────────────────
    opens its transport      ── connected ──▶  says that it takes part
    asks for a beginning     ─────────────▶    its receiving thread copies the model and the state
    puts it into its window  ◀─────────────
    says that it takes part  ─────────────▶    counts on the newcomer from here on

Until the newcomer says so, nobody exchanges anything with it.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gossamer.errors import ConfigurationError, Late, PeerLost
from gossamer.payload import payload
from gossamer.real.join.binding import ModuleBinding, lay_out_state
from gossamer.real.join.replica import LoopReplica
from gossamer.real.join.servers import packed_state, put_state
from gossamer.real.launch.console import say
from gossamer.real.launch.elastic import why_not_elastic
from gossamer.real.output_model import pack_bytes, untrained
from gossamer.real.session import Session
from gossamer.real.transports.beginning import Beginning
from gossamer.real.transports.transport import StopToken
from gossamer.real.worker import RealWorker

_SERVICE = "beginning"
_OVER = "all have ended"
_PATIENCE_S = 60.0
_AWAY_S = 5.0


@payload
@dataclass(frozen=True, slots=True)
class GivenBeginning:
    """What a newcomer begins with."""

    model: Tensor
    untrained: Tensor
    """Buffers and frozen parameters, as bytes."""
    optimiser: Tensor
    """What the giver's optimiser remembers, as bytes."""
    step: int
    """The giver's next step, from where the newcomer counts its own."""

    def load(
        self, worker: RealWorker, optimizer: torch.optim.Optimizer, binding: ModuleBinding
    ) -> None:
        worker.step = self.step
        put_state(optimizer, dict(binding.named()), self.optimiser)
        lay_out_state(optimizer)


def check_elastic(session: Session) -> None:
    """Refuse what needs the workers of the beginning to stay the same."""
    if (why := why_not_elastic(session.spec, session.options)) is not None:
        raise ConfigurationError(why)
    if session.processes > 1:
        raise ConfigurationError(
            f"replicas of {session.processes} processes cannot have workers that come during the "
            "run: a newcomer would need all of them at once; leave out --elastic"
        )
    addresses, present = session.addresses, Beginning.from_environment().present
    hosts = {addresses.process_of(end) for end in range(addresses.size, addresses.ends)}
    if present is not None and not hosts <= present:
        raise ConfigurationError(
            f"{session.spec} has servers in the processes of workers {sorted(hosts)}, which must "
            f"all be there at the beginning, got workers {sorted(present)}; begin with a larger -n"
        )
    if session.is_newcomer and len(session.addresses.hosted_by(session.rank)) > 1:
        raise ConfigurationError(
            f"worker {session.rank} cannot come back: its process held a server of "
            f"{session.spec}, and a server that is lost does not come back"
        )


def give_beginnings(
    session: Session, model: nn.Module, replica: LoopReplica, worker: RealWorker
) -> None:
    """From here on others may ask this worker."""

    def give() -> GivenBeginning:
        return GivenBeginning(
            replica.snapshot() / replica.weight, pack_bytes(untrained(model)),
            packed_state(replica), worker.step,
        )  # fmt: skip

    session.router.offer(_SERVICE, give)


def fetch_beginning(session: Session) -> GivenBeginning:
    """Ask the workers that take part, one after the other, until one answers."""
    router, began = session.router, time.monotonic()
    draw = random.Random(f"{session.rank}/{session.transport.life}")
    while (waited := time.monotonic() - began) < _PATIENCE_S:
        candidates = sorted(router.members.training - {session.rank})
        if candidates and _reaches_servers(session, waited):
            try:
                return router.ask(draw.choice(candidates), _SERVICE, "beginning")
            except PeerLost:
                continue
        if session.store.get(_OVER) is not None:
            say(f"worker {session.rank} came when the others had made their last steps; it ends")
            raise SystemExit(0)
        session.driver.check()
        time.sleep(StopToken.patience)
    raise Late(
        f"worker {session.rank} has come to the run, and no other worker was there within "
        f"{_PATIENCE_S:.0f} s to give it the model; see why they do not answer"
    )


def _reaches_servers(session: Session, waited: float) -> bool:
    """Whether a newcomer may begin: a server that is not connected yet would count as lost. Where
    standbys are, one that stays away has died."""
    addresses, live = session.addresses, session.router.live
    ends = range(addresses.size, addresses.ends)
    if all(addresses.process_of(end) in live for end in ends):
        return True
    acting = (addresses.acting(server, live) for server in addresses.servers)
    is_served = all(addresses.process_of(end) in live for end in acting)
    return addresses.has_standbys and waited > _AWAY_S and is_served


def tell_the_end(session: Session) -> None:
    """All have ended: who comes now comes too late."""
    session.store.agree(_OVER, "yes")
