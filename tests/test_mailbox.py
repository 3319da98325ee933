"""Messages and receives of one worker or server, whatever threads they come from."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer.errors import PeerLost, ProtocolError
from gossamer.mailbox import Mailbox, Receive, Reply
from gossamer.worker import Message

SENDERS = st.integers(0, 2)


def receive(mailbox: Mailbox, tag: Any = "number", source: int | None = None) -> Receive:
    pending = Receive("receive", source)
    mailbox.receive(tag, pending)
    return pending


def is_empty(mailbox: Mailbox) -> bool:
    return not mailbox._arrived and not mailbox._posted


class CancelledMeanwhile(Receive):
    """Its owner gives up at the worst of moments: a message has been chosen for it."""

    __slots__ = ()

    def resolve(self, value: Message) -> None:
        self.cancel()
        super().resolve(value)


def test_a_message_is_not_lost_between_a_receive_and_its_cancelling() -> None:
    """Once a message has gone to a receive it is too late to cancel it."""
    mailbox, pending = Mailbox(), CancelledMeanwhile("receive")
    mailbox.receive("number", pending)
    mailbox.deliver("number", Message(1, 7))
    assert pending.result().payload == 7
    assert not pending.cancelled
    assert is_empty(mailbox)


def test_a_cancelled_receive_leaves_its_message_to_the_next() -> None:
    """And nothing of itself behind."""
    mailbox = Mailbox()
    pending = receive(mailbox)
    pending.cancel()
    assert pending.cancelled
    assert is_empty(mailbox)
    mailbox.deliver("number", Message(1, 7))
    with pytest.raises(ProtocolError, match="cancelled"):
        pending.result()
    assert receive(mailbox).result().payload == 7


def lose(mailbox: Mailbox, *dead: int) -> None:
    mailbox.fail_lost(lambda receive: "it died" if receive.peer in dead else None)


@settings(max_examples=100)
@given(
    st.lists(
        st.tuples(st.sampled_from(["deliver", "receive", "any", "cancel", "lose"]), SENDERS),
        max_size=40,
    )
)
def test_no_message_is_lost_or_doubled(doings: list[tuple[str, int]]) -> None:
    """However deliveries, receives, cancellings and deaths follow each other: each message is in
    one receive that asked for it or is still there; messages of one sender are received in the
    order of their sending; nothing is kept of receives that have ended."""
    mailbox, sent = Mailbox(), 0
    posted: list[Receive] = []
    for doing, sender in doings:
        if doing == "deliver":
            mailbox.deliver("number", Message(sender, sent))
            sent += 1
        elif doing in ("receive", "any"):
            posted.append(receive(mailbox, source=sender if doing == "receive" else None))
        elif doing == "cancel" and posted:
            posted[sender % len(posted)].cancel()
        elif doing == "lose":
            lose(mailbox, sender)
    waiting = {one.peer for one in posted if not one.done}
    got = [(one.peer, one.result()) for one in posted if one.done and has_result(one)]
    assert all(peer in (None, message.source) for peer, message in got)
    left = mailbox.collect("number")
    everything = [message for _, message in got] + left
    assert sorted(message.payload for message in everything) == list(range(sent))
    for sender in range(3):
        received = [message.payload for _, message in got if message.source == sender]
        remaining = [message.payload for message in left if message.source == sender]
        assert remaining == sorted(remaining)
        assert not received or not remaining or max(received) < min(remaining)
        assert not remaining or not {None, sender} & waiting
    lose(mailbox, *range(3))
    for one in posted:
        one.cancel()
    assert is_empty(mailbox)


def has_result(pending: Receive) -> bool:
    try:
        pending.result()
    except (PeerLost, ProtocolError):
        return False
    return True


@pytest.mark.parametrize("kind", [Receive, Reply])
def test_a_failed_receive_leaves_its_message_to_the_next(kind: type[Receive]) -> None:
    """A peer that counts as lost may be reached again, and what it sends then must not be lost."""
    mailbox, pending = Mailbox(), kind("receive", 1)
    mailbox.receive("number", pending)
    pending.fail(PeerLost(1))
    mailbox.deliver("number", Message(1, 7))
    assert receive(mailbox, source=1).result().payload == 7
    assert not has_result(pending)


def test_an_end_that_dies_fails_those_who_wait_for_it_alone() -> None:
    """Who waits for anybody, or for another, goes on waiting."""
    mailbox = Mailbox()
    anybody, first, second = receive(mailbox), receive(mailbox, "a", 1), receive(mailbox, "b", 2)
    lose(mailbox, 1, 3)
    with pytest.raises(PeerLost, match="1"):
        first.result()
    assert not anybody.done
    assert not second.done


def test_a_mailbox_is_quiet_when_its_reader_has_dealt_with_everything() -> None:
    """A second message comes while the reader is at the first: the reader's thread takes both, and
    only then is it quiet."""
    mailbox, seen = Mailbox(is_of_server=True), []
    assert mailbox.quiet().done

    def deal_with(pending: Receive) -> None:
        number = pending.result().payload
        if number == 1:
            mailbox.deliver("number", Message(0, 2))
            seen.append(mailbox.quiet())
            read()
            assert not seen[0].done  # it is at the first one still
        seen.append(number)

    def read() -> None:
        pending = Receive("receive")
        pending.when_done(lambda: deal_with(pending))
        mailbox.receive("number", pending)

    read()
    mailbox.deliver("number", Message(0, 1))
    assert seen[1:] == [2, 1]
    assert seen[0].done
