"""What all frameworks have in common: each of them must take its process for the only one."""

from __future__ import annotations

from gossamer.errors import ConfigurationError
from gossamer.real.join.joined_worker import JoinedWorker


def check_single_process(framework: str, processes: int) -> None:
    """A framework that couples the processes itself would do so a second time."""
    if processes > 1:
        raise ConfigurationError(
            f"{framework} has coupled these {processes} processes itself, and they would be coupled"
            " twice; start the script with `gossamer run`, whose workers it takes for single ones"
        )


def check_whole_batches(framework: str, worker: JoinedWorker) -> None:
    """A framework takes batches before it needs them, so that nobody could tell of how many samples
    a step is."""
    if worker.method is not None and worker.method.balance:
        raise ConfigurationError(
            f"{framework} takes batches ahead of their steps, and balance=speed has to know which "
            "batch a step is of; leave out balance=, or write the loop yourself with gossamer.join"
        )
