"""Messages and receives of one end, whatever threads they come from."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer.errors import PeerLost, ProtocolError
from gossamer.real.mailbox import Mailbox, Receive
from gossamer.worker import Message

SENDERS = st.integers(0, 2)


def receive(mailbox: Mailbox, tag: Any = "number", source: int | None = None) -> Receive:
    pending = Receive("receive", source, source=source)
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


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["deliver", "receive", "cancel", "lose"]), SENDERS)))
def test_every_message_is_received_once_or_lies_there(doings: list[tuple[str, int]]) -> None:
    """However deliveries, receives from one sender, cancellings and deaths follow each other; per
    sender in order of delivery, and nothing is kept of receives that have ended."""
    mailbox = Mailbox()
    posted: list[Receive] = []
    for number, (doing, sender) in enumerate(doings):
        if doing == "deliver":
            mailbox.deliver("number", Message(sender, number))
        elif doing == "receive":
            posted.append(receive(mailbox, source=sender))
        elif doing == "cancel" and posted:
            posted[sender % len(posted)].cancel()
        elif doing == "lose":
            mailbox.lose([sender])
    for sender in range(3):
        sent = [n for n, doing in enumerate(doings) if doing == ("deliver", sender)]
        got = [
            one.result().payload
            for one in posted
            if one.peer == sender and one.done and not one.cancelled and not is_lost(one)
        ]
        while (left := receive(mailbox, source=sender)).done:
            got.append(left.result().payload)
        left.cancel()
        assert sorted(got) == sent
    mailbox.lose(range(3))
    assert is_empty(mailbox)
    assert all(one.done for one in posted)


def is_lost(pending: Receive) -> bool:
    try:
        pending.result()
    except PeerLost:
        return True
    return False


def test_an_end_that_dies_fails_those_who_wait_for_it_alone() -> None:
    """Who waits for anybody, or for another, goes on waiting."""
    mailbox = Mailbox()
    anybody, first, second = receive(mailbox), receive(mailbox, "a", 1), receive(mailbox, "b", 2)
    mailbox.lose([1, 3])
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
