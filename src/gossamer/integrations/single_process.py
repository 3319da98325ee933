"""What all frameworks have in common: each of them must take its process for the only one."""

from __future__ import annotations

from gossamer.errors import ConfigurationError


def check_single_process(framework: str, processes: int) -> None:
    """A framework that couples the processes itself would do so a second time."""
    if processes > 1:
        raise ConfigurationError(
            f"{framework} has coupled these {processes} processes itself, and they would be coupled"
            " twice; start the script with `gossamer run`, whose workers it takes for single ones"
        )
