"""Train PyTorch models on many loosely coupled workers, and know beforehand which way wins."""

from gossamer.config.cluster import Cluster, load_cluster
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
from gossamer.optim.yellowfin import YellowFin
from gossamer.real.join.joined_worker import JoinedWorker, join
from gossamer.real.train.train import train
from gossamer.runs.result import Result
from gossamer.runs.versions import VERSION as __version__
from gossamer.sim.simulation import simulate
from gossamer.tasks import TASKS, Data, Metric, Task, make_task
from gossamer.topology import make_topology

__all__ = [
    "METHODS",
    "TASKS",
    "Callback",
    "Cluster",
    "ConfigurationError",
    "Data",
    "DelayedOptimizer",
    "Error",
    "JoinedWorker",
    "Late",
    "MethodSpec",
    "Metric",
    "PeerLost",
    "ProtocolError",
    "Result",
    "RunFailed",
    "Stalled",
    "Task",
    "YellowFin",
    "__version__",
    "join",
    "load_cluster",
    "make_task",
    "make_topology",
    "method",
    "parse_method",
    "simulate",
    "train",
]
