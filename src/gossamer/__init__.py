"""Train PyTorch models on many loosely coupled workers, and know beforehand which way wins."""

from gossamer.callbacks import Callback
from gossamer.delayed import DelayedOptimizer
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
from gossamer.real.join import JoinedWorker, join
from gossamer.run import simulate
from gossamer.sim.cluster import Cluster, load_cluster
from gossamer.sim.simulation import Result
from gossamer.tasks import TASKS, Data, Task, make_task
from gossamer.topology import make_topology
from gossamer.train import TrainingResult, train
from gossamer.versions import VERSION as __version__
from gossamer.yellowfin import YellowFin

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
    "PeerLost",
    "ProtocolError",
    "Result",
    "RunFailed",
    "Stalled",
    "Task",
    "TrainingResult",
    "YellowFin",
    "__version__",
    "join",
    "load_cluster",
    "make_task",
    "make_topology",
    "parse_method",
    "simulate",
    "train",
]
