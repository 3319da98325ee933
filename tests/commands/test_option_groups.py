"""Options that commands share: a group is one parameter of a command and several options of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from gossamer.commands.options import Without, option, with_groups


@dataclass(frozen=True)
class Fruit:
    apples: int = option(1, "How many.")
    pears: int = option(2, "How many.")


def outcome(command: Any, *arguments: str) -> tuple[int, list[Any], str]:
    """The exit code, what the command was given, and what was printed."""
    app, seen = typer.Typer(), list[Any]()
    app.command()(with_groups(command(seen)))
    said = CliRunner().invoke(app, list(arguments))
    return said.exit_code, seen, said.output


def basket(seen: list[Any]) -> Any:
    def command(
        name: str = "basket",
        fruit: Annotated[Fruit, Without(("pears",))] = Fruit(apples=5),  # noqa: B008
    ) -> None:
        seen.append((name, fruit))

    return command


@pytest.mark.parametrize(
    ("arguments", "apples"),
    [((), 5), (("--apples", "7"), 7), (("--apples", "7", "--name", "x"), 7)],
)
def test_a_group_reaches_its_command_as_one_value(arguments: tuple[str, ...], apples: int) -> None:
    """The defaults are those of the value that the command names, not those of the class."""
    status, ((_, fruit),), _ = outcome(basket, *arguments)
    assert status == 0
    assert fruit == Fruit(apples=apples, pears=2)


def test_an_option_that_a_command_leaves_out_is_refused() -> None:
    """Its help does not show it either, and the command sees the group's own default."""
    status, seen, _ = outcome(basket, "--pears", "3")
    assert status == 2
    assert not seen
    _, _, said = outcome(basket, "--help")
    assert "--apples" in said
    assert "--pears" not in said
