"""`--live PORT`: what a browser on this machine gets while a command runs, and nobody else does."""

from __future__ import annotations

import http.client
import json
import shutil
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from command_line import gossamer
from gossamer.commands.view import live
from gossamer.commands.view.live import LivePage
from gossamer.errors import ConfigurationError
from gossamer.runs.folder import RunFolder
from tiers import every

SHORT = ["simulate", "--task", "digits-logistic", "--epochs", "1"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    runs = tmp_path_factory.mktemp("runs")
    assert gossamer(*SHORT, "--runs", str(runs)).status == 0
    (folder,) = runs.iterdir()
    return folder


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> RunFolder:
    """A finished run, to do with as one likes."""
    return RunFolder(shutil.copytree(finished, tmp_path / finished.name))


def get(page: LivePage, path: str, host: str | None = None, asks: str = "GET") -> tuple[int, str]:
    address = page.address.removeprefix("http://").rstrip("/")
    connection = http.client.HTTPConnection(address, timeout=100)
    connection.request(asks, path, headers={} if host is None else {"Host": host})
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text


@pytest.fixture
def no_farewell(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has asked lately is not waited for at the end."""
    monkeypatch.setattr(live, "_FAREWELL_S", 0.0)


@pytest.mark.usefixtures("no_farewell")
def test_the_growing_page_and_its_data_are_served(run: RunFolder) -> None:
    """The page says that it grows; its data are those of the folder as it is when asked for."""
    with LivePage(0) as page:
        page.show(run)
        status, text = get(page, "/")
        assert status == 200
        assert "<title>" in text
        status, text = get(page, "/data.json")
        data = json.loads(text)
        assert status == 200
        assert data["is_growing"] is True
        assert [method["label"] for method in data["methods"]] == ["ad_psgd"]


@pytest.mark.usefixtures("no_farewell")
def test_what_is_still_to_come_is_not_called_missing(run: RunFolder) -> None:
    (run.path / "summary.json").unlink()
    with LivePage(0) as page:
        page.show(run)
        assert json.loads(get(page, "/data.json")[1])["missing"] == []


def test_before_the_run_has_begun_it_says_so(run: RunFolder) -> None:
    with LivePage(0) as page:
        status, text = get(page, "/")
        assert (status, "has not begun" in text) == (503, True)


@pytest.mark.parametrize("path", ["/config.json", "/../config.json", "/etc/passwd", "/data.jsonl"])
def test_nothing_else_is_served(run: RunFolder, path: str) -> None:
    with LivePage(0) as page:
        page.show(run)
        assert get(page, path)[0] == 404


@pytest.mark.parametrize("host", ["evil.example:80", "", "127.0.0.1.evil.example:80"])
def test_another_sites_name_for_this_machine_is_refused(run: RunFolder, host: str) -> None:
    with LivePage(0) as page:
        page.show(run)
        assert get(page, "/data.json", host)[0] == 403


def test_only_this_machine_is_served() -> None:
    with LivePage(0) as page:
        name, port = page._server.server_address[:2]
        assert name == "127.0.0.1"
        # On any other address of this machine nobody answers.
        with socket.socket() as other:
            other.settimeout(5)
            assert other.connect_ex(("127.0.0.2", port)) != 0


def test_who_watches_is_told_of_the_end(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page that asked lately may ask once more, and is answered: it is over."""
    for wait in ("_FAREWELL_S", "_RECENT_S"):
        monkeypatch.setattr(live, wait, 100.0)
    answers: list[dict[str, Any]] = []
    asked, over = threading.Event(), threading.Event()

    def watch(page: LivePage) -> None:
        get(page, "/data.json")
        asked.set()
        over.wait(100)
        while not answers or answers[-1]["is_growing"]:
            answers.append(json.loads(get(page, "/data.json")[1]))

    with LivePage(0) as page:
        page.show(run)
        watcher = threading.Thread(target=watch, args=(page,))
        watcher.start()
        assert asked.wait(100)
        over.set()
    watcher.join(100)
    assert answers[-1]["is_growing"] is False


def test_nobody_watching_means_no_waiting(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(seconds: float) -> None:
        raise AssertionError("it waited for a reader that is not there")

    with LivePage(0) as page:
        page.show(run)
        monkeypatch.setattr(live.time, "sleep", never)


def test_a_port_in_use_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        said = gossamer(*SHORT, "--runs", str(tmp_path), "--live", port)
    assert said.status == 2
    assert "cannot be used" in said.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("arguments", "reason"), [
    (["--runs", "none", "--live", "0"], "leave out --runs none"),
    (["--live", "99999"], "from 0 to 65535"),
])  # fmt: skip
def test_what_cannot_be_shown_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], reason: str
) -> None:
    monkeypatch.chdir(tmp_path)
    said = gossamer(*SHORT, *arguments)
    assert (said.status, reason in said.err) == (2, True)


@pytest.mark.parametrize("command", every(3, ["simulate", "compare", "train"]))
def test_every_long_command_can_be_watched(tmp_path: Path, command: str) -> None:
    said = gossamer(
        command, "--task", "digits-logistic", "--epochs", "1", "--runs", str(tmp_path),
        "--live", "0", *(["--methods", "ad_psgd", "--lr", "0.1"] if command == "compare" else []),
    )  # fmt: skip
    assert said.status == 0, said.err
    assert "live: http://127.0.0.1:" in said.err


def test_a_wrong_port_is_an_error_of_the_caller() -> None:
    with pytest.raises(ConfigurationError, match="0 to 65535"):
        LivePage(-1)


@pytest.mark.usefixtures("no_farewell")
def test_the_head_of_the_page_can_be_asked_for(run: RunFolder) -> None:
    """As link checkers and watchers do: the same answer without its body."""
    with LivePage(0) as page:
        page.show(run)
        assert get(page, "/", asks="HEAD") == (200, "")
