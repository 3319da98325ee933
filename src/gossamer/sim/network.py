"""Network cards of the simulator: concurrent transfers share them max-min fairly, full duplex.
A transfer may also pass through links that several cards share, and have a cap of its own.

`Network` keeps the flows in lanes (see `fair_share`), and the clock wakes it when the next flow of
a lane has passed. All changes of one instant are settled together, once for each connected
component of tight ports; a flow that shares no port needs no settling. An event on a crowded card
costs O(log n), a flow that is alone O(1), and only components of several tight ports cost their
size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf, isfinite
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
    lane_of,
)

__all__ = ["Clock", "Flow", "Network", "Port", "TimerHandle"]

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

    def start(
        self, source: int, target: int, size_bytes: int, done: Callable[[], None],
        through: tuple[Port, ...] = (), cap: float = inf,
    ) -> Flow:  # fmt: skip
        """Send bytes from one card to another; `done` is called when the last one has passed.

        They also pass `through` links that were added, at `cap` bytes per nanosecond at most.
        """
        ports = (self._egress[source], self._ingress[target], *through)
        flow = Flow(source, target, size_bytes, ports, done, cap)
        if size_bytes <= 0:
            if size_bytes < 0:
                raise ConfigurationError(
                    f"a transfer from card {source} to card {target} cannot have {size_bytes} "
                    "bytes; give 0 or more"
                )
            self._clock.at(0, self._call_done, flow)
            return flow
        for port in ports:
            port.flows[flow] = None
            if cap != inf:
                port.capped += 1
                port.asked += cap
        for port in ports:
            if not port.is_tight and len(port.flows) > port.seats and port.is_crowded():
                self._regroup(port, is_tight=True)
        self._enter(flow, size_bytes)
        return flow

    def add_link(self, capacity: float) -> Port:
        """A link that is no card, such as the way out of a rack."""
        return Port(_checked(capacity))

    def card(self, number: int) -> tuple[Port, Port]:
        """The egress and the ingress of a card."""
        return self._egress[number], self._ingress[number]

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
        self.set_link(self._egress[card], egress)
        self.set_link(self._ingress[card], ingress)

    def set_link(self, port: Port, capacity: float) -> None:
        """Change the capacity of one port."""
        if port.capacity != _checked(capacity):
            port.capacity = capacity
            self._regroup(port, is_tight=port.is_crowded())

    def _enter(self, flow: Flow, remaining: float) -> None:
        """Put a flow that is on its ports into the lane where it belongs."""
        now = self._clock.now
        lane = lane_of(flow, now)
        if not lane.ports:
            # Nothing would keep the flow below the share that a loose port with others allows.
            crowded = [port for port in flow.ports if port.is_crowded()]
            for port in crowded:
                self._regroup(port, is_tight=True)
            if crowded:
                lane = lane_of(flow, now)
        lane.advance(now)
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
        for port in flow.ports:
            port.dismiss(flow)
        return self._exit(flow)

    def _vacate(self, gone: Flow) -> None:
        """A flow has gone. A port that is no longer crowded is always loose."""
        for port in gone.ports:
            if (port.is_tight or port.seats > 1) and not port.is_crowded():
                self._regroup(port, is_tight=False)

    def _regroup(self, port: Port, *, is_tight: bool) -> None:
        """Make a port tight or loose and move its flows to the lanes where they belong now."""
        port.is_tight = is_tight
        port.seats = len(port.flows) if port.is_crowded() else 1
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
            loose = [p for flow in flows for p in flow.ports if not p.is_tight and p.seats > 1]
            for port in dict.fromkeys(loose):
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
