"""`gossamer check-method`: whether a method keeps every promise of its row."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from gossamer.commands.console import Reporter, plain_table, print_json, say_line, show_table
from gossamer.commands.options import JsonOption
from gossamer.contract.laws import LAWS, PromiseFinding, check
from gossamer.methods import parse_method
from gossamer.quantities import counted

_ANSWERS = {True: "kept", False: "BROKEN", None: "-"}
_BROKEN = 1


def check_method(
    method: Annotated[
        str,
        typer.Argument(metavar="METHOD", help="As for --method: my.py:name or a built-in name."),
    ],
    as_json: JsonOption = False,
) -> int:
    """Check every promise of a method's row.

    \b
    gossamer check-method my.py:pair_gossip
    gossamer check-method my.py:pair_gossip:period=4 --json

    In virtual time, by the laws that the project checks of its own methods, and in storms of random
    faults. The exit code is 1 if a promise is broken.
    """
    spec = parse_method(method)
    findings: list[PromiseFinding] = []
    with Reporter(len(LAWS), str(spec), is_quiet=True) as reporter:
        for promise in LAWS:
            reporter.at(f"{spec}: {promise}", 0.0)
            findings.append(check(spec, promise))
            reporter.finished("")
    table = plain_table(f"Promises of {spec}")
    table.add_column("promise", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("what was found", overflow="fold")
    for one in findings:
        table.add_row(one.promise, _ANSWERS[one.is_kept], one.found)
    show_table(table)
    broken = [one.promise for one in findings if one.is_kept is False]
    kept = sum(one.is_kept is True for one in findings)
    say_line(
        f"{spec} keeps {counted(kept, 'promise')}"
        + (f" and breaks {len(broken)}: {', '.join(broken)}." if broken else ".")
    )
    if as_json:
        print_json(
            {"method": str(spec), "kept": not broken, "promises": [asdict(one) for one in findings]}
        )
    return _BROKEN if broken else 0
