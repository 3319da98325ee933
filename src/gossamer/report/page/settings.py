"""The settings of runs as a flat list: common settings once, and others for each method."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gossamer.quantities import counted, show_bandwidth, show_bytes, show_percent, show_seconds
from gossamer.report.page.data import Setting
from gossamer.runs.json_files import members, number, objects, text
from gossamer.runs.result import Row

# How the run was started, and settings with a section of their own on the page.
_ELSEWHERE = frozenset({"command", "command_line", "method", "method_options", "learning_rate",
                        "seed", "runs", "made_with", "forms"})  # fmt: skip
_SIMULATED = frozenset({"engine", "device", "precision", "compiled", "model_bytes"})
_DEEPEST = 5
_MAKERS = ("gossamer", "torch", "python")
_NAMES = {
    "batch": "batch per worker", "clip": "largest gradient norm", "compiled": "torch.compile",
    "buffers": "BatchNorm statistics", "swa": "output averaged from",
    "evaluations": "evaluations on the way",
    "model_bytes": "size of the model on the network", "split": "split of the data",
    "threads": "threads of torch", "machines_per_rack": "machines per rack",
}  # fmt: skip
_NONE = {
    "clip": "none", "swa": "not averaged", "compiled": "where it pays back",
    "model_bytes": "its own", "data": "built in",
    "transport": "what suits",
}  # fmt: skip
_SHOWN: dict[str, Callable[[float], str]] = {
    **dict.fromkeys((
        "seconds", "unoverlapped_seconds", "pause_seconds", "latency", "rack_latency",
        "retransmission", "failure_detection", "deadline", "every", "lasts", "repeat",
        "jitter_lasts",
    ), show_seconds),
    **dict.fromkeys((
        "jitter", "forward_share", "pause_probability", "processor_share", "load", "swa",
    ), show_percent),
    **dict.fromkeys((
        "bandwidth", "memory_bandwidth", "server_bandwidth", "up", "down", "uplink",
    ), show_bandwidth),
    "model_bytes": show_bytes,
}  # fmt: skip
_ZERO = {
    "memory_bandwidth": "free", "server_bandwidth": "like everybody's", "up": "as bandwidth",
    "down": "as bandwidth", "uplink": "never full", "processor_share": "none",
    "machines_per_rack": "all in one rack",
}  # fmt: skip


def listed_settings(runs: Sequence[tuple[str, Row]]) -> list[Setting]:
    """The settings from (label, config) of each run; a label has a run for each rate and seed."""
    flat = [(label, _flat(config)) for label, config in runs]
    listed = [
        *_spread("methods", [label for label, _ in runs]),
        *_spread("learning rates", [_number(config, "learning_rate") for _, config in runs]),
        *_spread("seeds", [_number(config, "seed") for _, config in runs]),
    ]
    for name in dict.fromkeys(name for _, values in flat for name in values):
        by_value: dict[str, list[str]] = {}
        for label, values in flat:
            by_value.setdefault(values.get(name, "not kept"), []).append(label)
        if len(by_value) == 1:
            listed.append(Setting(name=name, value=next(iter(by_value))))
        else:
            for value, labels in by_value.items():
                who = ", ".join(dict.fromkeys(labels))
                listed.append(Setting(name=f"{name} of {who}", value=value))
    for label, config in dict(runs).items():
        for key, value in members(config.get("method_options")).items():
            listed.append(Setting(name=f"{label}: {_words(key)}", value=_shown(key, value)))
    return [*listed, *_spread("made with", [_versions(config) for _, config in runs])]


def _versions(config: Row) -> str:
    told = members(config.get("made_with"))
    return ", ".join(f"{what} {text(told[what])}" for what in _MAKERS if text(told.get(what)))


def differing(configs: Sequence[Row]) -> list[str]:
    """A short text for each config that names what differs between them; it may be empty."""
    flat = [{"learning rate": _number(config, "learning_rate"), **_flat(config)}
            for config in configs]  # fmt: skip
    names = list(dict.fromkeys(name for values in flat for name in values))
    apart = [name for name in names if len({values.get(name) for values in flat}) > 1]
    # The name of a cluster stands for all of its settings.
    if "cluster" in apart:
        apart = [name for name in apart if not name.startswith("cluster ")]
    return [
        ", ".join(f"{name} {values[name]}" for name in apart[:3] if values.get(name))
        for values in flat
    ]


def _spread(name: str, values: Sequence[str]) -> list[Setting]:
    known = list(dict.fromkeys(value for value in values if value))
    if not known:
        return []
    return [Setting(name=name if len(known) > 1 else name[:-1], value=", ".join(known))]


def _number(config: Row, key: str) -> str:
    value = number(config.get(key))
    return "" if value is None else f"{value:g}"


def _flat(config: Row) -> dict[str, str]:
    kept = {key: value for key, value in config.items() if key not in _ELSEWHERE}
    if config.get("command") == "train":
        # Settings of the simulator mean nothing for real processes.
        kept = {key: value for key, value in kept.items() if key not in _SIMULATED}
        cluster = members(kept.get("cluster"))
        kept["cluster"] = {key: cluster.get(key) for key in ("name", "workers")}
    found: dict[str, str] = {}
    for key, value in kept.items():
        found |= _flattened(_NAMES.get(key, _words(key)), key, value)
    return found


def _flattened(name: str, key: str, value: object, depth: int = 0) -> dict[str, str]:
    """One setting, or all settings of an object or of a list of objects, by their full names."""
    parts = {
        # A member called `name` stands for the whole object.
        (name if part == "name" else f"{name} {_words(part)}"): (part, own)
        for part, own in members(value).items()
    } or {
        f"{name} {text(one.get('name')) or at}": (key, one) for at, one in enumerate(objects(value))
    }
    if not parts or depth >= _DEEPEST:
        return {name: _shown(key, value)}
    found: dict[str, str] = {}
    for whole, (part, own) in parts.items():
        found |= _flattened(whole, part, own, depth + 1)
    return found


def _words(key: str) -> str:
    return key.replace("_", " ")


def _shown(key: str, value: object) -> str:
    if value is None:
        return _NONE.get(key, "none")
    if isinstance(value, bool):
        return "yes" if value else "no"
    known = number(value)
    if known is not None:
        if known == 0 and key in _ZERO:
            return _ZERO[key]
        return _SHOWN.get(key, "{:g}".format)(known)
    if isinstance(value, list):
        items = list[object](value)
        if items and isinstance(items[0], list):
            # A matrix or a trace; the section of the cluster says what it means.
            return counted(len(items), "row")
        return ", ".join(str(one) for one in items) or "none"
    return str(value) or "none"
