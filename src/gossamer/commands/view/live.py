"""`--live PORT`: serve the page of a run while it goes on, to browsers of this machine only.

The page is built anew from the run folder when it is asked for, so what it shows is what a crash
would leave behind. Nothing but the page and its data is served, and only while the command runs.
"""

from __future__ import annotations

import threading
import time
from contextlib import AbstractContextManager, nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from gossamer.commands.console import warn
from gossamer.errors import ConfigurationError
from gossamer.report.page.build import report_data
from gossamer.report.page.data import PageData
from gossamer.report.page.html_file import page_html
from gossamer.runs.folder import RunFolder, to_json

_HOST = "127.0.0.1"
_FRESH_S = 1.0
"""Requests within this time share one reading of the folder."""
_RECENT_S = 5.0
"""A browser that asked so recently is still watching, and gets the end of the run, too."""
_FAREWELL_S = 5.0


class LivePage:
    """A server of one page. Use it as a context."""

    def __init__(self, port: int) -> None:
        if not 0 <= port <= 65535:
            raise ConfigurationError(f"--live must be a port from 0 to 65535, got {port}")
        try:
            self._server = _Server(port, self)
        except OSError as error:
            raise ConfigurationError(
                f"--live {port}: the port cannot be used ({error.strerror}); choose another, or 0 "
                "for any that is free"
            ) from None
        self.address = f"http://{_HOST}:{self._server.server_address[1]}/"
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.05},
            name="gossamer live", daemon=True,
        )  # fmt: skip
        self._folder: Path | None = None
        self._lock = threading.Lock()
        self._made: tuple[float, PageData] | None = None
        self._is_over = False
        self._asked = self._told = float("-inf")

    def __enter__(self) -> LivePage:
        self._thread.start()
        warn(f"live: {self.address}")
        return self

    def show(self, folder: RunFolder) -> None:
        """Show this folder from now on."""
        self._folder = folder.path

    def __exit__(self, *error: object) -> None:
        """Wait until a browser that is watching has read the end of the run; stop the server."""
        with self._lock:
            self._is_over, self._made = True, None
        until = time.monotonic() + _FAREWELL_S
        while (
            time.monotonic() < until
            and time.monotonic() - self._asked < _RECENT_S
            and self._told < self._asked
        ):
            time.sleep(0.05)
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def data(self) -> PageData | None:
        """The present data of the page; None as long as there is no folder."""
        with self._lock:
            if self._folder is None:
                return None
            now = time.monotonic()
            if self._made is None or now - self._made[0] > _FRESH_S:
                self._made = (now, report_data([self._folder], is_growing=not self._is_over))
            if self._is_over:
                self._told = now
            else:
                self._asked = now
            return self._made[1]


def live_page(port: int | None, *, keeps_folder: bool) -> AbstractContextManager[LivePage | None]:
    """Make the page of `--live`, or an empty context where the option is left out."""
    if port is None:
        return nullcontext()
    if not keeps_folder:
        raise ConfigurationError("--live shows what the run folder holds; leave out --runs none")
    return LivePage(port)


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, port: int, page: LivePage) -> None:
        self.page = page
        super().__init__((_HOST, port), _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # no traceback for a browser that closed its connection


class _Handler(BaseHTTPRequestHandler):
    server: _Server  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        host = self.headers.get("Host", "").rpartition(":")[0]
        if host not in (_HOST, "localhost"):
            # The name of another site points to this machine; its scripts must not read the run.
            self._answer(403, "text/plain", "this page is for this machine only")
            return
        path = self.path.partition("?")[0]
        if path not in ("/", "/report.html", "/data.json"):
            self._answer(404, "text/plain", "there is only / here")
            return
        try:
            data = self.server.page.data()
        except Exception as error:
            self._answer(503, "text/plain", f"the run cannot be shown yet: {error}")
            return
        if data is None:
            self._answer(503, "text/plain", "the run has not begun; reload in a moment")
        elif path == "/data.json":
            self._answer(200, "application/json", to_json(data))
        else:
            self._answer(200, "text/html", page_html(data))

    def _answer(self, status: int, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        pass  # standard error belongs to the run
