"""The command that checks for each law whether a transport keeps it."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence

import torch

from gossamer.errors import ConfigurationError, unknown_name
from gossamer.real.transports.conformance.group import check_laws
from gossamer.real.transports.conformance.tools import SCENARIOS, run_laws
from gossamer.real.transports.transport import Transport

_PREFIX = "scenario_"
_FEWEST = 3


def main(arguments: Sequence[str] | None = None) -> int:
    asked = _parser().parse_args(arguments)
    torch.set_num_threads(1)
    try:
        connect = _connector(asked.transport)
        names = [_law(name) for name in asked.laws] or list(SCENARIOS)
        if asked.processes < _FEWEST:
            raise ConfigurationError(f"-n must be at least {_FEWEST}, got {asked.processes}")
        if not __debug__:
            raise ConfigurationError("the laws are assertions, which `python -O` leaves out")
    except ConfigurationError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if asked.member:
        run_laws(connect(), names)
        return 0
    broken = 0
    for result in check_laws(connect, names, asked.processes):
        said = result.law.name.removeprefix(_PREFIX).replace("_", " ")
        print(f"{'kept' if result.is_kept else 'BROKEN':8}{said}", flush=True)
        if not result.is_kept:
            broken += 1
            print("".join(f"        {line}\n" for line in result.written.splitlines()), end="")
    print(f"{len(names) - broken} of {len(names)} laws are kept")
    return 1 if broken else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m gossamer.real.transports.conformance",
        description="Whether a transport keeps the laws that methods rely on. Exit code: 0 if all "
        "are kept, 1 if one is broken, 2 for bad input.",
    )
    parser.add_argument(
        "--transport", required=True, metavar="MODULE:CLASS",
        help="a class with `from_environment()`, or any function that returns a transport",
    )  # fmt: skip
    parser.add_argument(
        "-n", dest="processes", type=int, default=_FEWEST, metavar="N",
        help="processes for the laws in which nobody dies (default and least: 3); the others say "
        "themselves how many they want",
    )  # fmt: skip
    parser.add_argument(
        "--member", action="store_true",
        help="this process is one of a group that another launcher has started, such as mpirun: "
        "run the named laws in it",
    )  # fmt: skip
    parser.add_argument("laws", nargs="*", metavar="LAW", help="only these (default: all)")
    return parser


def _connector(given: str) -> Callable[[], Transport]:
    module, _, name = given.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigurationError(
            f"--transport must be MODULE:CLASS of something that can be imported, got {given!r}: "
            f"{error}"
        ) from error
    return getattr(found, "from_environment", found)


def _law(given: str) -> str:
    name = _PREFIX + given.removeprefix(_PREFIX).replace(" ", "_")
    if name not in SCENARIOS:
        raise unknown_name("law", given, [known.removeprefix(_PREFIX) for known in SCENARIOS])
    return name


if __name__ == "__main__":
    sys.exit(main())
