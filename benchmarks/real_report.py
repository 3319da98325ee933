"""The figures of real workers as Markdown."""

from __future__ import annotations

from typing import Any

_TITLES = {
    "mlp": "MLP 784-256-10, batch 32", "resnet18": "ResNet-18, 11.2M parameters, batch 16",
    "resnet18-128": "ResNet-18, batch 128",
}  # fmt: skip
_EXCHANGED = {
    "lerp": "`lerp_` of two vectors, one thread", "raw": "the engine bare, one way",
    "raw_both_ways": "the engine bare, both ways at once", "read": "read a peer's replica",
    "pull": "read it and take the mean", "average": "average with a peer, both ends",
}  # fmt: skip


def as_markdown(found: dict[str, Any]) -> str:
    lines: list[str] = []
    for model, sizes in found["coupled"].items():
        lines += _coupled(model, sizes)
    for model, case in found["straggler"].items():
        lines += _straggler(model, case)
    if "time_to_loss" in found:
        lines += _time_to_loss(found["time_to_loss"])
    if found["exchange"]:
        lines += _exchange(found["exchange"])
    if "step_overhead_us" in found:
        beyond = found["step_overhead_us"]
        lines += [
            f"A step without communication takes {abs(beyond):.1f} us "
            f"{'more' if beyond > 0 else 'less'} than `optimizer.step()`.",
            "",
        ]
    lines += [f"Not measured: {what}, because {why}.\n" for what, why in found["skipped"].items()]
    return "\n".join([*lines, f"Machine: {found['machine']}."]) + "\n"


def _ratio(row: dict[str, Any] | None) -> str:
    if row is None:
        return "-"
    return f"**{row['over_plain']:.2f}** ({row['least']:.2f}-{row['most']:.2f})"


def _coupled(model: str, sizes: dict[str, Any]) -> list[str]:
    speeds = ", ".join(
        f"{next(iter(case.values()))['plain_steps_per_second']:.3g} at p={size}"
        for size, case in sizes.items()
    )
    first = next(iter(sizes.values()))
    lines = [
        f"{_TITLES[model]}: steps per second over those of the plain loop ({speeds}); median (least"
        "-most).",
        "",
        f"| | {' | '.join(f'p={size}' for size in sizes)} | exchanges started per step | "
        "slowest worker over the mean | over DDP | over bare MPI | over by hand |",
        "|---" * (len(sizes) + 6) + "|",
    ]
    for name in first:
        cells = [_ratio(case.get(name)) for case in sizes.values()]
        keys = ("exchanges_per_step", "slowest_over_mean", "over_ddp", "over_bare", "over_hand")
        cells += [
            " / ".join(f"{case[name][key]:.2f}" for case in sizes.values() if key in case[name])
            or "-"
            for key in keys
        ]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return [*lines, ""]


def _straggler(model: str, case: dict[str, Any]) -> list[str]:
    lines = [
        f"A straggler, {_TITLES[model]}, p=2: worker 1 sleeps {1e3 * case['sleep_seconds']:.1f} ms "
        "after each step (four steps' time); speed of worker 0 over the plain loop beside the same "
        "sleeper.",
        "",
        "| | worker 0 |",
        "|---|---|",
        *(f"| {name} | {_ratio(row)} |" for name, row in case["variants"].items()),
    ]
    return [*lines, ""]


def _time_to_loss(case: dict[str, Any]) -> list[str]:
    lines = [
        f"The same straggler: seconds until worker 0's MLP has a training loss of {case['target']} "
        "(median of three runs, same learning rate).",
        "",
        "| | seconds | steps of worker 0 |",
        "|---|---|---|",
        *(
            f"| {name} | {row['seconds']:.1f}{'' if row['reached'] else ' (not reached)'} | "
            f"{row['steps']:,.0f} |"
            for name, row in case["variants"].items()
        ),
    ]
    return [*lines, ""]


def _exchange(engines: dict[str, dict[str, float]]) -> list[str]:
    names = [name for name in _EXCHANGED if any(name in times for times in engines.values())]
    lines = [
        "A replica of 45 MB, p=2, milliseconds.",
        "",
        f"| | {' | '.join(engines)} |",
        "|---" * (len(engines) + 1) + "|",
    ]
    for name in names:
        cells = [f"{times[name]:.1f}" if name in times else "-" for times in engines.values()]
        lines.append(f"| {_EXCHANGED[name]} | " + " | ".join(cells) + " |")
    return [*lines, ""]
