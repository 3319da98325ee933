"""Train PyTorch models on many loosely coupled workers, and know beforehand which way wins."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gossamer.config.cluster import Cluster, load_cluster
from gossamer.consolidate.soup import Soup, soup
from gossamer.consolidate.student import Distilled, distill, distillation_loss, distilled_task
from gossamer.errors import (
    ConfigurationError,
    Error,
    Late,
    PeerLost,
    ProtocolError,
    RunFailed,
    Stalled,
)
from gossamer.methods import METHODS, MethodSpec, parse_method
from gossamer.methods.method import method
from gossamer.observe.callbacks import Callback
from gossamer.optim.delayed import DelayedOptimizer
from gossamer.optim.large_batch import Lamb, Lars
from gossamer.optim.yellowfin import YellowFin
from gossamer.real.join.joined_worker import JoinedWorker, join
from gossamer.real.launch.environment import rank, size
from gossamer.real.train.train import train
from gossamer.runs.result import Result
from gossamer.runs.versions import VERSION as __version__
from gossamer.sim.simulation import simulate
from gossamer.tasks import TASKS, Data, Metric, Task, make_task
from gossamer.topology import make_topology

if TYPE_CHECKING:
    from gossamer.commands.work.advice import Advice, advise
    from gossamer.commands.work.comparison import Comparison, compare
    from gossamer.commands.work.measurement import Measurement, probe
    from gossamer.commands.work.step_costs import StepCosts, cost

__all__ = [
    "METHODS",
    "TASKS",
    "Advice",
    "Callback",
    "Cluster",
    "Comparison",
    "ConfigurationError",
    "Data",
    "DelayedOptimizer",
    "Distilled",
    "Error",
    "JoinedWorker",
    "Lamb",
    "Lars",
    "Late",
    "Measurement",
    "MethodSpec",
    "Metric",
    "PeerLost",
    "ProtocolError",
    "Result",
    "RunFailed",
    "Soup",
    "Stalled",
    "StepCosts",
    "Task",
    "YellowFin",
    "__version__",
    "advise",
    "compare",
    "cost",
    "distill",
    "distillation_loss",
    "distilled_task",
    "join",
    "load_cluster",
    "make_task",
    "make_topology",
    "method",
    "parse_method",
    "probe",
    "rank",
    "simulate",
    "size",
    "soup",
    "train",
]

_LATER = {
    "Advice": "gossamer.commands.work.advice",
    "Comparison": "gossamer.commands.work.comparison",
    "Measurement": "gossamer.commands.work.measurement",
    "StepCosts": "gossamer.commands.work.step_costs",
    "advise": "gossamer.commands.work.advice",
    "compare": "gossamer.commands.work.comparison",
    "cost": "gossamer.commands.work.step_costs",
    "probe": "gossamer.commands.work.measurement",
}
"""Names whose modules print and draw: they are imported when somebody asks for them."""


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_LATER[name]), name)
