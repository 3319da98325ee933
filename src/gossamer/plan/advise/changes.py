"""Settings that a search tries beside methods and rates: batch, momentum, weight decay, groups.

One group of all workers is synchronous, as many groups as workers is the method alone: how many
groups to choose, with which momentum, is the question of Omnivore (Hadjis et al. 2016).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import cast

from gossamer.config.settings import Settings
from gossamer.errors import ConfigurationError, unknown_name
from gossamer.methods import parse_method
from gossamer.specs import convert

_MOMENTA = (0.0, 0.5, 0.9, 0.95)
_DECAYS = (0.0, 1e-4, 1e-3)
SEARCHED = ("batch", "momentum", "weight_decay", "groups")


@dataclass(frozen=True)
class Changes:
    """What of a run's settings is other than was asked for."""

    batch: int | None = None
    momentum: float | None = None
    weight_decay: float | None = None
    groups: int | None = None

    def __str__(self) -> str:
        return ", ".join(f"{name.replace('_', ' ')} {value:g}" for name, value in self.told())

    def told(self) -> list[tuple[str, float]]:
        return [(name, value) for name, value in vars(self).items() if value is not None]

    def apply(self, base: Settings, method: str) -> Settings:
        """These settings with the method and what is changed."""
        spec, optimiser = parse_method(method), base.rule
        if self.groups is not None:
            spec = dataclasses.replace(spec, groups=self.groups)
        own = {name: getattr(self, name) for name in ("momentum", "weight_decay")}
        given = {name: value for name, value in own.items() if value is not None}
        for name in given:
            if not hasattr(optimiser, name):
                raise ConfigurationError(f"{optimiser} has no {name.replace('_', ' ')}")
        changed = str(dataclasses.replace(optimiser, **given)) if given else base.optimiser
        return dataclasses.replace(
            base, method=spec, optimiser=changed, batch=self.batch or base.batch
        )


UNCHANGED = Changes()


def asked_values(texts: Sequence[str], base: Settings) -> dict[str, tuple[float, ...]]:
    """The values to try of each setting: `batch` tries the usual ones, `batch=8/32` these."""
    found: dict[str, tuple[float, ...]] = {}
    for text in (one for given in texts for one in given.replace(",", " ").split()):
        name, equals, values = text.partition("=")
        if name not in SEARCHED:
            raise unknown_name("setting to search", name, SEARCHED)
        kind: type[float] = int if name in ("batch", "groups") else float
        listed = _usual(name, base)
        if equals:
            where = f"--search {name}"
            listed = tuple(cast(float, convert(one, kind, where)) for one in values.split("/"))
        if any(value < 0 or (kind is int and value < 1) for value in listed):
            raise ConfigurationError(f"--search {text}: {name} must not be so small")
        found[name] = listed
    return found


def _usual(name: str, base: Settings) -> tuple[float, ...]:
    if name == "batch":
        batch = base.batch or 1
        return tuple(size for size in (batch // 4, batch // 2, 2 * batch, 4 * batch) if size)
    if name == "groups":
        workers = base.cluster.workers
        return tuple(count for count in range(2, workers) if workers % count == 0)
    return _MOMENTA if name == "momentum" else _DECAYS


def changes_to_try(asked: Mapping[str, Sequence[float]], base: Settings) -> list[Changes]:
    """Nothing changed, then one setting at a time, then every two of them together. What is as it
    was asked for is no change."""
    present = {
        "batch": base.batch, "groups": None,
        "momentum": getattr(base.rule, "momentum", None), "weight_decay": base.rule.weight_decay,
    }  # fmt: skip
    lists = {
        name: [value for value in values if value != present[name]]
        for name, values in asked.items()
    }
    alone = [Changes(**{name: value}) for name, values in lists.items() for value in values]  # pyright: ignore[reportArgumentType]
    pairs = [
        Changes(**{first: one, second: other})  # pyright: ignore[reportArgumentType]
        for first, second in combinations(lists, 2)
        for one, other in product(lists[first], lists[second])
    ]
    return [UNCHANGED, *alone, *pairs]
