"""Files that are replaced as a whole: a reader sees either the old content or the new one."""

from __future__ import annotations

import os
import secrets
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacement(path: Path) -> Generator[Path]:
    """Yield a path beside `path` to write to; on success that file takes the name `path`."""
    # The name is random: processes of several hosts may write the same file, and on two hosts
    # processes may have the same number.
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        yield part
        part.replace(path)
    except OSError as error:
        # The error shall name the file that was asked for. An error without a number is not the
        # system's, and Python would not show its text if it had a file name.
        if error.errno is not None:
            error.filename = str(path)
        raise
    finally:
        part.unlink(missing_ok=True)


def replace_text(path: Path, text: str) -> None:
    """Write a text file in UTF-8; its line ends stay as they are."""
    with replacement(path) as part:
        part.write_text(text, encoding="utf-8", newline="")


def replace_bytes(path: Path, data: bytes) -> None:
    """Write a file to the disk before it gets its name, so that a power cut leaves no empty
    file."""
    with replacement(path) as part, part.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
