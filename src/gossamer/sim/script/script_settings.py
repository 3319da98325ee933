"""Everything that decides a run of a script in virtual time."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from gossamer.config.settings import Settings
from gossamer.errors import ConfigurationError
from gossamer.methods import METHODS
from gossamer.tasks.task import Data, Task


@dataclass(frozen=True)
class Script:
    """A user's program, and what it is given."""

    path: str
    arguments: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        path = Path(self.path)
        if not path.exists():
            is_method = self.path.partition(":")[0] in METHODS
            advice = f"write --method {self.path}" if is_method else "give its path"
            raise ConfigurationError(f"the script {self.path!r} does not exist; {advice}")
        if path.suffix != ".py" or not path.is_file():
            raise ConfigurationError(
                f"{self.path!r} is not a Python script, and only such a one can be run in virtual "
                "time; give the path of a file that ends in .py"
            )

    @property
    def command(self) -> list[str]:
        return [self.path, *self.arguments]


@dataclass(frozen=True)
class ScriptSettings(Settings):
    """Those of the simulator, of which a script leaves it the method, the cluster and the seed."""

    script: Script | None = None
    steps: int = 1000
    """About how many steps the loop makes, as the script says."""
    compute: str = "cluster"
    """Where the compute time comes from: the cluster, a measurement or the command line."""

    @property
    def steps_per_worker(self) -> int:
        return self.steps

    def notices(self) -> list[str]:
        """The script's own worker says what it has to say of its optimiser."""
        return []

    def to_json(self) -> dict[str, Any]:
        values = super().to_json()
        assert self.script is not None
        values["script"] = {"path": self.script.path, "arguments": list(self.script.arguments)}
        return values

    def as_dict(self) -> dict[str, Any]:
        kept = super().as_dict()
        # What a task says of itself and a script does not.
        for name in ("epochs", "batch", "test_samples"):
            kept.pop(name)
        return kept

    def seeded(self, seed: int) -> ScriptSettings:
        return dataclasses.replace(self, seed=seed)


def task_of(script: Script) -> Task:
    """What stands for the script where runs name their task. It has neither model nor data."""
    nothing = Data(torch.zeros(1, 1), torch.zeros(1))
    name = Path(script.path).name
    return Task(
        name=name, title=name, make_model=_no_model, loss=_no_loss, train=nothing, test=nothing,
        metric=None, batch=1, epochs=1.0, learning_rates=(),
    )  # fmt: skip


def _no_model() -> nn.Module:
    return _refuse()


def _no_loss(output: Tensor, targets: Tensor) -> Tensor:
    return _refuse()


def _refuse() -> NoReturn:
    raise ConfigurationError("the model and the loss of a script are known to the script alone")
