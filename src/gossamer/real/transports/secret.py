"""The secret of a run: a program that does not know the secret can change nothing.

The launcher makes the secret and gives it to its workers in the environment, which other users
cannot read, while they can read command lines. Both sides of a connection prove that they know the
secret, and neither sends it.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from collections.abc import Mapping
from pathlib import Path

from gossamer.errors import ConfigurationError

VARIABLE = "GOSSAMER_SECRET"
NONCE = PROOF = 32
"""Bytes of the random number that a proof answers, and of the proof."""
_SHORTEST = 16


def new_secret() -> str:
    return secrets.token_hex(32)


def proof(secret: bytes, who: str, *nonces: bytes) -> bytes:
    """Return a proof that `who` knows the secret and has seen these numbers."""
    return hmac.digest(secret, who.encode() + b"\0" + b"".join(nonces), hashlib.sha256)


def is_proof(got: bytes, secret: bytes, who: str, *nonces: bytes) -> bool:
    return hmac.compare_digest(got, proof(secret, who, *nonces))


def own_secret(variables: Mapping[str, str] | None = None) -> bytes:
    """Return the secret that the launcher gave to this process."""
    found = os.environ if variables is None else variables
    if VARIABLE not in found:
        raise ConfigurationError(
            f"this worker was started without the secret of its run, because {VARIABLE} is not "
            "set, and the other workers would refuse it; start all workers with `gossamer run`"
        )
    return _checked(found[VARIABLE], VARIABLE).encode()


def secret_of_hosts(file: Path | None, variables: Mapping[str, str] | None = None) -> str:
    """Return the secret that the launchers of several hosts share: the text of a file that only its
    owner may read, or of the variable."""
    found = os.environ if variables is None else variables
    if file is None:
        if VARIABLE in found:
            return _checked(found[VARIABLE], VARIABLE)
        raise ConfigurationError(
            "several hosts need a secret by which they know each other; make one with `openssl "
            "rand -hex 32`, and give the same to all of them: in a file (--secret-file FILE, mode "
            f"600) or in {VARIABLE}"
        )
    try:
        state = file.stat()
        is_own = state.st_mode & 0o077 == 0 and state.st_uid == os.getuid()
        text = file.read_text(encoding="ascii").strip() if is_own else ""
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"--secret-file {file} cannot be read: {error}") from None
    if not is_own:
        raise ConfigurationError(
            f"others than you may read {file}, which holds the secret that your hosts share; run "
            f"`chmod 600 {file}`"
        )
    return _checked(text, str(file))


def _checked(text: str, where: str) -> str:
    if len(text) < _SHORTEST:
        raise ConfigurationError(
            f"the secret in {where} must have at least {_SHORTEST} characters, got {len(text)}; "
            "`openssl rand -hex 32` makes one"
        )
    return text
