"""Examples and documentation: they run, print what is written below them, and name what exists.

`pytest tests/test_examples.py --refresh-outputs` writes below them what they print now.
"""

from __future__ import annotations

import json
import re
import runpy
import shlex
import tomllib
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import pytest
import torch
import typer

from gossamer.commands.cli import app
from gossamer.config.cluster import cluster_from
from gossamer.contract.laws import check
from gossamer.methods import METHODS, parse_method
from tiers import every

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted(ROOT.glob("docs/*.md"))]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
PRINTS = "\n# Prints:\n"
MADE_WITH = ROOT / "tests" / "outputs_made_with.json"


@dataclass(frozen=True)
class Block:
    """A fenced block, and the block of text that follows it at once: what it prints."""

    place: str
    kind: str
    text: str
    output: str


def blocks() -> list[Block]:
    found: list[Block] = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        fences = list(FENCE.finditer(text))
        for fence, after in zip_longest(fences, fences[1:]):
            line = text.count("\n", 0, fence.start()) + 1
            output = ""
            if after and after[1] == "text" and not text[fence.end() : after.start()].strip():
                output = after[2]
            place = f"{page.relative_to(ROOT)}:{line}"
            found.append(Block(place, fence[1], fence[2], output))
    return found


BLOCKS = blocks()


def of_kind(kind: str) -> list[object]:
    chosen = [pytest.param(block, id=block.place) for block in BLOCKS if block.kind == kind]
    assert chosen, f"no block of kind {kind} was found, so nothing would be tested"
    return chosen


def made_with() -> dict[str, str]:
    """What decides the bits of a gradient beside the program itself."""
    return {"torch": torch.__version__, "cpu": torch.backends.cpu.get_cpu_capability()}


def assert_prints(printed: str, written: str) -> None:
    """To the last digit, by the torch and on the kind of processor that the outputs are from.

    Elsewhere gradients may be rounded otherwise: the same words, and numbers within 5 %.
    """
    if json.loads(MADE_WITH.read_text()) == made_with():
        assert printed == written, "stale? run pytest tests/test_examples.py --refresh-outputs"
        return

    def words(text: str) -> str:
        return " ".join(NUMBER.sub("#", text).split())

    assert words(printed) == words(written)
    ours, theirs = (list(map(float, NUMBER.findall(text))) for text in (printed, written))
    assert ours == pytest.approx(theirs, rel=0.05, abs=0.01)


def refresh(page: Path, before: str, after: str) -> None:
    """Write what was printed where it is told, and what it was made with."""
    text = page.read_text(encoding="utf-8")
    assert text.count(before) == 1
    page.write_text(text.replace(before, after), encoding="utf-8")
    MADE_WITH.write_text(json.dumps(made_with()) + "\n")


@pytest.mark.parametrize("path", every(3, EXAMPLES), ids=lambda path: path.stem)
def test_an_example_prints_what_it_says(
    path: Path, capsys: pytest.CaptureFixture[str], refreshes: bool
) -> None:
    """Each example ends with the lines that it prints, and stays under 60 lines."""
    text = path.read_text(encoding="utf-8")
    assert text.count("\n") < 60
    _, _, written = text.partition(PRINTS)
    runpy.run_path(str(path), run_name="__main__")
    printed = capsys.readouterr().out
    if refreshes:
        commented = re.sub("^", "# ", printed.rstrip("\n"), flags=re.MULTILINE) + "\n"
        refresh(path, PRINTS + written, PRINTS + commented)
    else:
        assert_prints(printed, re.sub("^# ", "", written, flags=re.MULTILINE))


def test_examples_are_numbered_without_gaps() -> None:
    """A reader can go through them in order."""
    assert [path.name[:3] for path in EXAMPLES] == [f"{n:02}_" for n in range(1, len(EXAMPLES) + 1)]


@pytest.mark.parametrize("block", of_kind("python runnable"))
def test_a_runnable_block_prints_what_is_written_below_it(
    block: Block, capsys: pytest.CaptureFixture[str], refreshes: bool
) -> None:
    """Code in the documentation is run as it stands there."""
    exec(compile(block.text, block.place, "exec"), {"__name__": "__main__"})
    printed = capsys.readouterr().out
    if refreshes and block.output:
        page, before = ROOT / block.place.rpartition(":")[0], f"{block.text}```\n\n```text\n"
        refresh(page, before + block.output, before + printed)
    else:
        assert_prints(printed, block.output)


def test_the_file_of_a_new_method_keeps_its_promises(tmp_path: Path) -> None:
    """As it is printed on its page it is a file that `gossamer check-method` takes."""
    (file,) = [b.text for b in BLOCKS if b.kind == "python" and "pair_gossip" in b.text]
    (tmp_path / "my.py").write_text(file)
    spec = parse_method(f"{tmp_path}/my.py:pair_gossip:period=2")
    assert spec.method.defaults() == {"beta": 0.5, "period": 1}
    for promise in ("keeps the mean", "models sent per step", "survives a death", "waits for"):
        assert check(spec, promise).is_kept


@pytest.mark.parametrize("block", of_kind("toml"))
def test_a_cluster_in_the_documentation_can_be_loaded(block: Block) -> None:
    """Every key is known and every value has its type."""
    described = tomllib.loads(block.text)
    assert cluster_from(described).workers == described.get("workers", cluster_from({}).workers)


def commands() -> list[str]:
    """What the pages tell a reader to type: lines of shell blocks, and code inside sentences."""
    lines = [line for block in BLOCKS if block.kind == "sh" for line in block.text.splitlines()]
    for page in PAGES:
        prose = FENCE.sub("", page.read_text(encoding="utf-8"))
        lines += re.findall(r"`([^`\n]+)`", prose)
    return [line for line in lines if line.startswith(("gossamer ", "make "))]


def test_commands_in_the_documentation_exist() -> None:
    """Each names a command with options that it has, or a target of the Makefile."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    known = typer.main.get_command(app).commands
    assert len(commands()) > 10
    for line in commands():
        program, name, *rest = shlex.split(line, comments=True)
        if program == "make":
            assert f"\n{name}:" in makefile, line
            continue
        rest = rest[: rest.index("--")] if "--" in rest else rest  # the others are a script's
        command = known[name]
        while rest and hasattr(command, "commands"):
            command = command.commands[rest.pop(0)]
        options = {option for parameter in command.params for option in parameter.opts}
        assert {word for word in rest if word.startswith("--")} <= options, line


def test_links_between_pages_lead_somewhere() -> None:
    """Every relative link and picture is there."""
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8")):
            assert target.startswith("https://") or (page.parent / target).exists(), target


def test_the_tables_of_the_pages_are_those_of_the_registries() -> None:
    """`python tools/method_table.py` would change nothing, and every method has its row."""
    tool = runpy.run_path(str(ROOT / "tools" / "method_table.py"))
    for page in tool["TABLES"]:
        written = page.read_text(encoding="utf-8")
        assert tool["updated"](page) == written, "run `.venv/bin/python tools/method_table.py`"
    text = README.read_text(encoding="utf-8")
    assert re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE) == list(METHODS)


def test_a_newcomer_is_told_where_the_command_is() -> None:
    """After `make run` it is in the environment, which nobody has activated yet."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert "source $(BIN)/activate" in makefile
    assert "source .venv/bin/activate" in README.read_text(encoding="utf-8")
