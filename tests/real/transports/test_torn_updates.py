"""An update that a death cut short is counted where the run's other numbers are."""

from __future__ import annotations

from pathlib import Path

from gossamer.config.cluster import Cluster
from gossamer.config.settings import make_settings
from gossamer.real.faults.fault_plan import FaultPlan
from gossamer.real.faults.shaped_links import ShapedTransport
from gossamer.real.train.progress import TrainingProgress
from gossamer.real.train.request import TrainRequest
from gossamer.real.train.training import Training
from gossamer.real.train.worker_log import FileEntries, WorkerLog
from gossamer.real.transports.local import LocalTransport

TASK = "digits-logistic"


class Torn(LocalTransport):
    """Somebody was killed at its windows, twice."""

    torn_updates = 2


def test_the_summary_of_a_run_counts_torn_updates(tmp_path: Path) -> None:
    """All that its workers have found."""
    settings = make_settings(TASK, "all_reduce", Cluster(workers=1), epochs=0.05, evaluations=1)
    job = TrainRequest(settings, tmp_path)
    diary = WorkerLog(tmp_path, 0)
    Training(job, Torn(), diary).run()
    diary.close()
    follower = TrainingProgress(tmp_path, [FileEntries(tmp_path, 0)])
    follower.catch_up()
    assert follower.result(settings, 0).summary["torn_updates"] == 2


def test_shaped_links_pass_the_count_on() -> None:
    """What slows the links down hides nothing."""
    assert ShapedTransport(Torn(), FaultPlan()).torn_updates == 2
