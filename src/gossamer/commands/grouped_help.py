"""`--help` in groups: thirty options in one list are not read by anybody."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand

GROUPS: dict[str, tuple[str, ...]] = {
    "Cluster and faults": (
        "--cluster", "--workers", "--slow", "--slow-link", "--kill", "--pause", "--drop",
        "--delay", "--partition", "--bandwidth", "--latency", "--compute", "--model-bytes",
        "--transport", "--nnodes", "--node-rank", "--rendezvous", "--patience", "--secret-file",
    ),
    "Training": (
        "--seed", "--seeds", "--epochs", "--samples", "--batch", "--lr", "--optimiser",
        "--schedule", "--clip", "--split", "--engine", "--device", "--threads", "--compile",
        "--buffers", "--data",
    ),
    "Output": (
        "--evaluations", "--record", "--checkpoint-every", "--resume", "--picture", "--output",
        "--out", "--force", "--runs", "--live", "--json", "--help",
    ),
}  # fmt: skip
"""By the name of an option, which means the same wherever it occurs; the others come first."""
_LEAST_OPTIONS = 12
"""Fewer are read as one list."""


class GroupedCommand(TyperCommand):
    """A command whose help shows its options in groups where they are many."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        arguments: list[tuple[str, str]] = []
        options: dict[str, list[tuple[str, str]]] = {"Options": [], **{name: [] for name in GROUPS}}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is None:
                continue
            if parameter.param_type_name == "argument":
                arguments.append(record)
            else:
                options[_group_of(parameter.opts)].append(record)
        if sum(map(len, options.values())) < _LEAST_OPTIONS:
            options = {"Options": [one for group in options.values() for one in group]}
        for title, records in {"Arguments": arguments, **options}.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


def _group_of(names: list[str]) -> str:
    return next((title for title, flags in GROUPS.items() if set(flags) & set(names)), "Options")
