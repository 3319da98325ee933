"""`gossamer replay`: execute a recorded run again, turn by turn, to the same bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from gossamer.commands import options as given
from gossamer.commands.console import Reporter, print_json, say_line
from gossamer.errors import ConfigurationError
from gossamer.precision import threads_of
from gossamer.quantities import counted
from gossamer.real.train.replay import read_order, replay
from gossamer.real.train.resume import saved_request
from gossamer.runs.result import digest_of


def replay_run(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A folder of `train --record`.")],
    as_json: given.JsonOption = False,
) -> int:
    """Execute a recorded run again and compare the bits.

    All workers live in one process and take their turns in the recorded order. Exit code 0: the
    same parameters, bit for bit; 1: others.
    """
    workers, recorded = _outcome(run)
    request = saved_request(run)
    settings = request.settings
    if not request.is_recorded:
        raise ConfigurationError(
            f"{run} was not recorded; start the run with `gossamer train --record`"
        )
    turns = read_order(run, workers)
    with (
        threads_of(settings.threads),
        Reporter(len(turns), f"replay of {settings.method}") as reporter,
    ):
        share = max(1, len(turns))
        parameters = replay(
            request, workers, turns,
            lambda done: reporter.at(f"turn {done} of {len(turns)}", done / share),
        )  # fmt: skip
    digest = digest_of(parameters)
    is_same = digest == recorded
    found = {
        "method": str(settings.method), "workers": workers, "turns": len(turns),
        "parameters_digest": digest, "recorded_digest": recorded, "same": is_same,
    }  # fmt: skip
    verdict = "the same parameters, bit for bit" if is_same else "OTHER parameters"
    say_line(
        f"{settings.method} on {counted(workers, 'worker')}: {counted(len(turns), 'turn')} "
        f"replayed, {verdict} ({digest})"
    )
    if not is_same:
        say_line(
            "was it recorded on another machine, with another version of torch, or with another "
            "number of threads?"
        )
    if as_json:
        print_json(found)
    return 0 if is_same else 1


def _outcome(run: Path) -> tuple[int, str]:
    """How many workers the run had, and the digest of the parameters that it ended with."""
    path = run / "summary.json"
    try:
        summary: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        workers, digest = summary.get("workers"), summary.get("parameters_digest")
    except FileNotFoundError:
        raise ConfigurationError(
            f"{run} holds no summary.json; give the folder of a finished `gossamer train --record`"
        ) from None
    except (ValueError, AttributeError):
        raise ConfigurationError(f"{path} is damaged; record the run again") from None
    if not isinstance(workers, int) or not isinstance(digest, str):
        raise ConfigurationError(
            f"the run in {run} ended without parameters to compare with: {summary.get('ended')}; "
            "give the folder of a finished `gossamer train --record`"
        )
    return workers, digest
