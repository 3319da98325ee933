"""Reading a data file, and the one sentence for a file that cannot be used."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

from gossamer.errors import ConfigurationError


def read_bytes(path: Path, origin: str) -> bytes:
    """The file's content, unpacked when its name ends in .gz; `origin` says where to get it."""
    try:
        content = path.read_bytes()
        return gzip.decompress(content) if path.suffix == ".gz" else content
    except FileNotFoundError:
        found = "does not exist"
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        found = f"is not a whole gzip file ({path.stat().st_size} bytes: {error})"
    except OSError as error:
        found = f"cannot be read ({error.strerror})"
    raise ConfigurationError(f"data file {path} {found}; get {origin}")


def damaged(path: Path, found: str, origin: str) -> ConfigurationError:
    """The error for a file that was read but holds something else than it should."""
    return ConfigurationError(f"data file {path} is damaged: {found}; get {origin}")
