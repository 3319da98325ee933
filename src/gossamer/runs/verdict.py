"""The verdict on a contest as one sentence: which method is first, and how certain that is."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from gossamer.quantities import counted
from gossamer.runs.arrival import is_lower_better
from gossamer.runs.ranking import RankedMethod, Ranking
from gossamer.runs.statistics import show_number, show_score

_NAMED = 6
"""The most methods that a sentence names; of more, it refers to the table."""


def verdict(
    ranking: Ranking, target: float, key: str, ends: Mapping[str, float], cut_short: str = ""
) -> str:
    """Which method reaches the target first, as far as the runs can tell.

    `ends` are the mean scores at the end, by method. `cut_short` says why no winner may be named,
    if the contest did not finish.
    """
    goal = show_score(target, key)
    there = [one for one in ranking.places if one.span is not None]
    missing = [one for one in ranking.places if one.span is None]
    if not there:
        if cut_short:
            return f"{cut_short}; none of them has reached {goal} yet."
        return _nobody(ranking, goal, key, ends)
    doubt = cut_short or _doubt(ranking)
    if len(ranking.places) == 1 and not cut_short:
        parts = [f"{there[0].label} reaches {goal} after {_time(there[0], ranking)}"]
    elif doubt:
        parts = [f"{doubt}, so no winner is named: {_times(there, goal)}"]
    elif ranking.winner is not None:
        parts = [_won(there, missing, ranking, goal)]
    else:
        parts = [_tie(ranking, goal)]
        rest = [one for one in there if not one.is_close]
        if rest:
            parts.append(_behind(rest))
    return "; ".join([*parts, *_shortfalls(missing)]) + "."


def _doubt(ranking: Ranking) -> str:
    if ranking.can_tell:
        return ""
    return "Each method ran with one seed" if ranking.seeds else "The methods share no seed"


def _won(
    there: Sequence[RankedMethod], missing: Sequence[RankedMethod], ranking: Ranking, goal: str
) -> str:
    first, *rest = there
    time = _time(first, ranking)
    if not rest:
        fully = " with every seed" if any(one.arrival.reached for one in missing) else ""
        return f"Only {first.label} reaches {goal}{fully}, after {time}"
    return f"{first.label} reaches {goal} first, after {time}; {_behind(rest)}"


def _tie(ranking: Ranking, goal: str) -> str:
    """Name all methods that may be first, or refer to the table."""
    close = ranking.close
    means = [one.span.mean for one in close if one.span is not None]
    labels = [one.label for one in close]
    named = enumerated(labels) if len(labels) <= _NAMED else f"the first {len(labels)} of the table"
    low, high = show_number(min(means)), show_number(max(means))
    took = f"{low} s" if low == high else f"{low} to {high} s"
    return f"Too close to call between {named} ({took} to {goal})"


def _behind(rest: Sequence[RankedMethod]) -> str:
    """How much longer the other methods take, with the nearest and the last by name."""
    second, last = rest[0], rest[-1]

    def longer(one: RankedMethod) -> str:
        # There is no ratio if the target is reached before the first step.
        return f"{one.times:.1f} times as long" if one.times else "longer"

    if len(rest) == 1:
        return f"{second.label} takes {longer(second)}"
    if not second.times or not last.times:
        return "the others take longer"
    near, far = f"{second.times:.1f} ({second.label})", f"{last.times:.1f} ({last.label})"
    between = "and" if len(rest) == 2 else "to"
    return f"{len(rest)} others take {near} {between} {far} times as long"


def _times(there: Sequence[RankedMethod], goal: str) -> str:
    """The times of the methods, without a winner."""
    spans = [(one.label, one.span) for one in there if one.span is not None]
    said = [f"{label} {show_number(span.mean)} s" for label, span in spans]
    if len(said) > _NAMED:
        said = [*said[:2], f"the last, {said[-1]}"]
    return f"to {goal} {enumerated([said[0].replace(' ', ' took ', 1), *said[1:]])}"


def _time(one: RankedMethod, ranking: Ranking) -> str:
    span = one.span
    assert span is not None
    if len(one.arrival.seconds) == 1:
        return f"{show_number(span.mean)} s in its only run"
    if not ranking.can_tell:
        return f"{show_number(span.mean)} s"
    return f"{show_number(span.mean)} s ({show_number(span.low)}-{show_number(span.high)} s)"


def _nobody(ranking: Ranking, goal: str, key: str, ends: Mapping[str, float]) -> str:
    some = [f"{_count(one)} of {one.label}" for one in ranking.places if one.arrival.reached]
    if some:
        return f"No method reaches {goal} with every seed; {enumerated(some)} do."
    known = {name: mean for name, mean in ends.items() if not math.isnan(mean)}
    if not known:
        return f"No method reaches {goal}; every one of them diverged."
    nearest = (min if is_lower_better(key) else max)(known, key=lambda name: known[name])
    return (
        f"No method reaches {goal}; {nearest} ends nearest, at {show_score(known[nearest], key)}."
    )


def _shortfalls(missing: Sequence[RankedMethod]) -> list[str]:
    parts: list[str] = []
    some = [f"{one.label} ({_count(one)})" for one in missing if one.arrival.reached]
    never = [one.label for one in missing if not one.arrival.reached]
    if some:
        parts.append(f"{enumerated(some)} {_agree(some, 'reach')} it with some seeds only")
    if len(never) > _NAMED:
        parts.append(f"{len(never)} others do not reach it")
    elif never:
        parts.append(f"{enumerated(never)} {_agree(never, 'do')} not reach it")
    return parts


def _agree(subjects: Sequence[str], verb: str) -> str:
    return f"{verb}es" if len(subjects) == 1 else verb


def _count(one: RankedMethod) -> str:
    return f"{one.arrival.reached} of {counted(len(one.arrival.seconds), 'seed')}"


def enumerated(words: Sequence[str]) -> str:
    """a, b and c."""
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1]
