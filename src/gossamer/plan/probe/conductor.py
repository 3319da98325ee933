"""The course of a probe: worker 0 asks, all workers measure, and worker 0 collects the answers.

Each phase has its share of the time. The probe ends with an error if an answer is a minute late or
a worker is lost.
"""

from __future__ import annotations

import dataclasses
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gossamer.errors import Error, PeerLost, RunFailed
from gossamer.plan.probe import links
from gossamer.plan.probe.channel import PATIENCE_S, ProbeChannel
from gossamer.plan.probe.findings import Crowd, Inquiry, MeasuredLink, ProbeFindings, Steps
from gossamer.plan.probe.regions import across, regions_of
from gossamer.plan.probe.step_times import Stepper, measure_sizes
from gossamer.real.faults.fault_plan import own_fault_plan
from gossamer.real.faults.slow_worker import Slowness
from gossamer.real.transports.transport import Transport

Progress = Callable[[float, str], None]
"""Called with the share of the time that has passed, and with what is being measured."""
_COMPUTE, _LINKS = 0.4, 0.35
"""Shares of the time; the measurement of crowds has the rest."""
_LEAST_ROUND_S = 0.1
_MOST_ROUND_S = 1.0
_MOST_CROWD_S = 2.0
_CROWD_MESSAGE_S = 0.02
_PATTERNS = {
    "inside": "each to the next on its host",
    "between": "each to the next host",
    "to_one": "all to one",
    "one_across": "one host of each group of near ones to the next group",
    "across": "each host to one of the next group of near ones",
}


def conduct(transport: Transport, inquiry: Inquiry, on_progress: Progress) -> ProbeFindings:
    """Run the whole probe, as worker 0."""
    post = ProbeChannel(transport)
    own = ProbePart(post, _stepper(inquiry, transport))
    conductor = Conductor(own, inquiry, transport.name, on_progress)
    try:
        post.open()
    except PeerLost as lost:
        raise conductor.loss(lost) from lost
    found: ProbeFindings | None = None
    try:
        found = conductor.run()
        return found
    except PeerLost as lost:
        raise conductor.loss(lost) from lost
    finally:
        conductor.dismiss(found)
        post.close()


def take_part(transport: Transport, inquiry: Inquiry) -> ProbeFindings | None:
    """Do what worker 0 asks until the probe ends; return what it has found, if it got so far."""
    post = ProbeChannel(transport)
    part = ProbePart(post, _stepper(inquiry, transport))
    post.open()
    try:
        post.tell(0, {"host": own_host()})
        while (words := post.hear(0)).get("do") != "end":
            post.tell(0, part.obey(words))
        found = words["findings"]
        return None if found is None else ProbeFindings.from_dict(found)
    except PeerLost:
        raise  # worker 0 learns of the loss from the transport, or is itself lost
    except Exception as error:
        why = str(error) if isinstance(error, Error) else f"{type(error).__name__}: {error}"
        post.tell(0, {"failed": f"worker {post.rank} gave up: {why}"})
        raise
    finally:
        post.close()


def _stepper(inquiry: Inquiry, transport: Transport) -> Stepper:
    slowness = Slowness(own_fault_plan().slow_factor(transport.rank))
    return Stepper(inquiry, transport.rank, transport.size, slowness)


def own_host() -> str:
    """A name of this host that differs from that of every other host."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    try:
        # Several hosts may be called localhost.
        mark = boot.read_text(encoding="ascii")[:8]
    except OSError:
        mark = ""
    return f"{socket.gethostname()}/{mark}" if mark else socket.gethostname()


class ProbePart:
    """The measurements that a worker does when it is asked."""

    def __init__(self, post: ProbeChannel, stepper: Stepper) -> None:
        self.post = post
        self._stepper = stepper
        self.on_time: Callable[[float], None] = lambda passed: None
        """Called with the seconds that have passed while steps are measured."""

    def obey(self, words: Mapping[str, Any]) -> dict[str, Any]:
        seconds = words["seconds"]
        match words["do"]:
            case "compute":
                steps = measure_sizes(self._stepper, seconds, self._pass_time)
                return dataclasses.asdict(steps)
            case "link":
                return dataclasses.asdict(links.measure_link(self.post, words["peer"], seconds))
            case _:
                return {"rate": links.flood(self.post, words["peer"], seconds, words["size"])}

    def _pass_time(self, passed: float) -> None:
        self.post.check()
        self.on_time(passed)


class Conductor:
    """Worker 0 in the course of a probe."""

    def __init__(
        self, own: ProbePart, inquiry: Inquiry, transport: str, on_progress: Progress
    ) -> None:  # fmt: skip
        self._own = own
        self._post = own.post
        self._inquiry = inquiry
        self._transport = transport
        self._on_progress = on_progress
        self._began = time.monotonic()
        self.phase = "the workers met"

    def run(self) -> ProbeFindings:
        others = range(1, self._post.size)
        answers = [self._hear(rank, 0.0) for rank in others]
        hosts = [own_host(), *(answer["host"] for answer in answers)]
        at = time.time()
        self._began = time.monotonic()
        is_alone = len(hosts) == 1
        steps = self._measure_steps(self._inquiry.seconds * (1.0 if is_alone else _COMPUTE))
        found: list[MeasuredLink] = []
        crowds: list[Crowd] = []
        if not is_alone:
            found = self._measure_links(hosts, self._inquiry.seconds * _LINKS)
            left = self._inquiry.seconds - (time.monotonic() - self._began)
            crowds = self._measure_crowds(hosts, found, left)
        self._tell(1.0, "done")
        return ProbeFindings(
            self._inquiry, self._transport, hosts, steps, found, crowds,
            len(hosts) * (len(hosts) - 1) // 2, at, time.monotonic() - self._began,
        )  # fmt: skip

    def loss(self, lost: PeerLost) -> RunFailed:
        return RunFailed(
            f"{lost} while {self.phase}, so nothing was written; see what ended it, and probe again"
        )

    def dismiss(self, found: ProbeFindings | None) -> None:
        """Tell all workers that the probe has ended, however it ended, and what it has found."""
        # As JSON, in which a key is a text: worker 0 reads its own findings likewise.
        words = {"do": "end", "findings": None if found is None else found.as_dict()}
        for rank in range(1, self._post.size):
            try:
                self._post.tell(rank, words)
            except PeerLost:
                pass  # a lost worker does not wait

    # ------------------------------------------------------------------ phases

    def _measure_steps(self, seconds: float) -> list[Steps]:
        self.phase = "steps were measured"
        what = f"steps of {self._inquiry.task}, all workers at once"
        self._tell(0.0, what)
        self._own.on_time = lambda passed: self._tell(passed / self._inquiry.seconds, what)
        words = {"do": "compute", "seconds": seconds}
        answers = self._ask(dict.fromkeys(range(self._post.size), words), seconds)
        return [Steps(**answers[rank]) for rank in sorted(answers)]

    def _measure_links(self, hosts: list[str], seconds: float) -> list[MeasuredLink]:
        self.phase = "links were measured"
        until = time.monotonic() + seconds
        plan = links.rounds(hosts)
        slot = min(_MOST_ROUND_S, max(_LEAST_ROUND_S, seconds / len(plan))) / 2
        found: list[MeasuredLink] = []
        for number, pairs in enumerate(plan):
            if found and time.monotonic() + 2 * slot > until + _LEAST_ROUND_S:
                break
            self._tell(
                self._share, f"links, {number + 1} of {len(plan)} rounds: {_pairs_shown(pairs)}"
            )
            for leads in (pairs, [(other, one) for one, other in pairs]):
                words = {
                    one: {"do": "link", "peer": other, "seconds": slot} for one, other in leads
                }
                found += [MeasuredLink(**answer) for answer in self._ask(words, slot).values()]
        return found

    def _measure_crowds(
        self, hosts: list[str], found: list[MeasuredLink], seconds: float
    ) -> list[Crowd]:
        self.phase = "crowded links were measured"
        best: dict[int, float] = {}
        for link in found:
            for end in (link.source, link.target):
                best[end] = max(best.get(end, 0.0), link.bandwidth)
        # A worker of middle speed, so that a slow card is not taken for a typical one.
        target = sorted(best, key=lambda rank: (best[rank], rank))[len(best) // 2]
        patterns = {
            "inside": links.ring_inside(hosts),
            "between": links.ring_between(hosts),
            "to_one": links.all_to_one(hosts, target),
        }
        groups = regions_of(hosts, found)
        if max(map(len, groups)) > 1:
            patterns["one_across"] = across(hosts, groups, senders=1)
            patterns["across"] = across(hosts, groups)
        planned = {
            pattern: sends
            for pattern, sends in patterns.items()
            if sends and (pattern != "to_one" or len(sends) > 1)
        }
        slot = max(_LEAST_ROUND_S, min(_MOST_CROWD_S, seconds / max(1, len(planned))))
        typical = sorted(link.bandwidth for link in found)[len(found) // 2]
        crowds: list[Crowd] = []
        for pattern, sends in planned.items():
            share = len(sends) if pattern == "to_one" else 1
            size = int(_CROWD_MESSAGE_S * typical / share)
            size = min(links.LARGEST, max(links.SMALLEST, size))
            self._tell(self._share, f"{len(sends)} senders at once, {_PATTERNS[pattern]}")
            words = {
                one: {"do": "flood", "peer": other, "seconds": slot, "size": size}
                for one, other in sends.items()
            }
            answers = self._ask(words, slot)
            rates = {rank: answer["rate"] for rank, answer in answers.items()}
            aim = target if pattern == "to_one" else None
            crowds.append(Crowd(pattern, len(sends), aim, rates))
        return crowds

    # ------------------------------------------------------------------ requests and answers

    def _ask(
        self, words: Mapping[int, dict[str, Any]], seconds: float
    ) -> dict[int, dict[str, Any]]:
        """Let these workers measure at the same time; returns their answers."""
        for rank, said in words.items():
            if rank != 0:
                self._post.tell(rank, said)
        answers = {0: self._own.obey(words[0])} if 0 in words else {}
        for rank in words:
            if rank != 0:
                answers[rank] = self._hear(rank, seconds)
        return answers

    def _hear(self, rank: int, seconds: float) -> dict[str, Any]:
        answer = self._post.hear(rank, seconds + PATIENCE_S)
        if "failed" in answer:
            raise RunFailed(answer["failed"])
        return answer

    @property
    def _share(self) -> float:
        return (time.monotonic() - self._began) / self._inquiry.seconds

    def _tell(self, share: float, what: str) -> None:
        self._on_progress(min(1.0, share), what)


def _pairs_shown(pairs: list[links.Pair]) -> str:
    shown = ", ".join(f"{one} and {other}" for one, other in pairs[:3])
    return f"{shown} and {len(pairs) - 3} more" if len(pairs) > 3 else shown
