"""Network cards of the simulator: concurrent transfers share them max-min fairly, full duplex.

`Network` keeps the flows in lanes (see `fair_share`), and the clock wakes it when the next flow of
a lane has passed. All changes of one instant are settled together, once for each connected
component of tight ports; a flow that shares no port needs no settling. An event on a crowded card
costs O(log n), a flow that is alone O(1), and only components of several tight ports cost their
size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isfinite
from typing import Protocol

from gossamer.errors import ConfigurationError
from gossamer.sim.fair_share import (
    Flow,
    Lane,
    Port,
    TimerHandle,
    connected_ports,
    fair_rates,
    is_broken,
    is_slack,
    lane_between,
)

__all__ = ["Clock", "Flow", "Network", "TimerHandle"]

# With this many ports it pays to look for slack ones: moving their flows costs more than a
# water-filling over a few ports, and far less than one over hundreds.
LARGE_COMPONENT = 16


class Clock(Protocol):
    """Virtual time in integer nanoseconds; events of one instant may come in any order."""

    now: int

    def at(self, delay_ns: int, callback: Callable[..., None], *arguments: object) -> TimerHandle:
        """Call back after a delay."""
        ...


class Network:
    """Cards, each with an egress and an ingress capacity in bytes per nanosecond."""

    def __init__(self, clock: Clock, egress: Sequence[float], ingress: Sequence[float]) -> None:
        if len(egress) != len(ingress):
            raise ConfigurationError(
                f"a card has two capacities, got {len(egress)} for egress and {len(ingress)} for "
                "ingress; give one of each for every card"
            )
        self._clock = clock
        self._egress = [Port(_checked(capacity)) for capacity in egress]
        self._ingress = [Port(_checked(capacity)) for capacity in ingress]
        self._unsettled: dict[Port, None] = {}
        self._is_settling = False
        self.bytes_sent = [0] * len(egress)
        self.bytes_received = [0] * len(ingress)

    def start(self, source: int, target: int, size_bytes: int, done: Callable[[], None]) -> Flow:
        """Send bytes from one card to another; `done` is called when the last one has passed."""
        egress = self._egress[source]
        ingress = self._ingress[target]
        flow = Flow(source, target, size_bytes, egress, ingress, done)
        if size_bytes <= 0:
            if size_bytes < 0:
                raise ConfigurationError(
                    f"a transfer from card {source} to card {target} cannot have {size_bytes} "
                    "bytes; give 0 or more"
                )
            self._clock.at(0, self._call_done, flow)
            return flow
        egress.flows[flow] = None
        ingress.flows[flow] = None
        if not egress.is_tight and len(egress.flows) > egress.seats:
            self._regroup(egress, is_tight=True)
        if not ingress.is_tight and len(ingress.flows) > ingress.seats:
            self._regroup(ingress, is_tight=True)
        self._enter(flow, size_bytes)
        return flow

    def abort(self, flow: Flow) -> None:
        """End a flow whose sender or receiver died: `done` is never called.

        A flow that has ended already stays as it is.
        """
        flow.done = None
        if flow.lane is not None:
            remaining = self._withdraw(flow)
            self._count(flow, int(flow.size_bytes - remaining))
            self._vacate(flow)

    def set_capacity(self, card: int, *, egress: float, ingress: float) -> None:
        """Change the capacities of a card; transfers under way go on at their new rates."""
        for port, capacity in ((self._egress[card], egress), (self._ingress[card], ingress)):
            if port.capacity != _checked(capacity):
                port.capacity = capacity
                self._regroup(port, is_tight=len(port.flows) > 1)

    def _enter(self, flow: Flow, remaining: float) -> None:
        """Put a flow that is on its ports into the lane where it belongs."""
        egress, ingress = flow.egress, flow.ingress
        if not (egress.is_tight or ingress.is_tight):
            # Nothing would keep the flow below the share that a loose port with others allows.
            for port in (egress, ingress):
                if len(port.flows) > 1:
                    self._regroup(port, is_tight=True)
        lane = lane_between(egress, ingress, self._clock.now)
        lane.advance(self._clock.now)
        lane.join(flow, remaining)
        if lane.ports:
            self._unsettle(lane)
        else:
            self._arm(lane)

    def _exit(self, flow: Flow) -> float:
        """Take a flow out of its lane and return the bytes it still had to go."""
        lane = flow.lane
        assert lane is not None
        lane.advance(self._clock.now)
        remaining = lane.leave(flow)
        self._unsettle(lane)
        if lane.count == 0:
            lane.close()
        return remaining

    def _withdraw(self, flow: Flow) -> float:
        """Take a flow out of its lane and off its ports; returns the bytes it still had to go."""
        del flow.egress.flows[flow], flow.ingress.flows[flow]
        return self._exit(flow)

    def _vacate(self, gone: Flow) -> None:
        """A flow has gone. A port with at most one flow left is always loose."""
        for port in (gone.egress, gone.ingress):
            if len(port.flows) < 2 and (port.is_tight or port.seats > 1):
                self._regroup(port, is_tight=False)

    def _regroup(self, port: Port, *, is_tight: bool) -> None:
        """Make a port tight or loose and move its flows to the lanes where they belong now."""
        port.is_tight = is_tight
        port.seats = max(1, len(port.flows))
        for flow in list(port.flows):
            if flow.lane is not None:
                self._enter(flow, self._exit(flow))

    def _unsettle(self, lane: Lane) -> None:
        """The flows of a lane have changed, so its ports are divided anew in this instant."""
        for port in lane.ports:
            self._unsettled[port] = None
        if self._unsettled and not self._is_settling:
            self._is_settling = True
            self._clock.at(0, self._settle)

    def _settle(self) -> None:
        """Give all lanes that the changes of this instant may concern their fair rates."""
        while self._unsettled:
            unsettled, self._unsettled = self._unsettled, {}
            seen: set[Port] = set()
            for port in unsettled:
                if port.lanes and port not in seen:
                    self._settle_component(connected_ports(port, seen))
        self._is_settling = False

    def _settle_component(self, ports: list[Port]) -> None:
        rates = fair_rates(ports)
        for lane, rate in rates.items():
            lane.advance(self._clock.now)
            lane.rate = rate
        # Each regrouping unsettles what remains of the component, which is then settled again.
        if broken := [lane for lane in rates if is_broken(lane)]:
            flows = [flow for lane in broken for flow in lane.members()]
            for port in dict.fromkeys(flow.loose_port() for flow in flows):
                self._regroup(port, is_tight=True)
        elif len(ports) > LARGE_COMPONENT and (slack := [port for port in ports if is_slack(port)]):
            for port in slack:
                self._regroup(port, is_tight=False)
        else:
            for lane in rates:
                self._arm(lane)

    def _arm(self, lane: Lane) -> None:
        """Let the clock wake the lane at its next completion, or earlier.

        A timer that is too early stays: it will find nothing finished and be set again. So a card
        that becomes more and more crowded does not leave many cancelled timers.
        """
        due_ns = lane.next_due_ns()
        if lane.timer is not None:
            if lane.due_ns <= due_ns:
                return
            lane.timer.cancel()
        lane.due_ns = due_ns
        lane.timer = self._clock.at(due_ns - self._clock.now, self._wake, lane)

    def _wake(self, lane: Lane) -> None:
        lane.timer = None
        lane.advance(self._clock.now)
        finished = lane.take_finished()
        if not finished:
            self._arm(lane)
            return
        # All finished flows leave before the first is told or its ports are regrouped.
        for flow in finished:
            self._withdraw(flow)
            self._count(flow, flow.size_bytes)
        for flow in finished:
            self._vacate(flow)
        for flow in finished:
            self._call_done(flow)

    def _count(self, flow: Flow, size_bytes: int) -> None:
        self.bytes_sent[flow.source] += size_bytes
        self.bytes_received[flow.target] += size_bytes

    def _call_done(self, flow: Flow) -> None:
        done, flow.done = flow.done, None
        if done is not None:
            done()


def _checked(capacity: float) -> float:
    if not (isfinite(capacity) and capacity > 0):
        raise ConfigurationError(
            f"a card cannot have a capacity of {capacity} bytes per nanosecond; give a positive "
            "finite number"
        )
    return capacity
