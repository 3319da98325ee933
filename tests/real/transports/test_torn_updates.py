"""An update that a death cut short is counted where the run's other numbers are."""

from __future__ import annotations

from pathlib import Path

from gossamer.config.cluster import Cluster
from gossamer.config.settings import make_settings
from gossamer.real.faults.links import Links
from gossamer.real.faults.shaped_links import ShapedTransport
from gossamer.real.train.job import Diary, FileEntries
from gossamer.real.train.progress import Follower
from gossamer.real.train.train import job_of
from gossamer.real.train.training import Training
from gossamer.real.transports.local import LocalTransport
from gossamer.tasks import make_task

TASK = "digits-logistic"


class Torn(LocalTransport):
    """Somebody was killed at its windows, twice."""

    torn_updates = 2


def test_the_summary_of_a_run_counts_torn_updates(tmp_path: Path) -> None:
    """All that its workers have found."""
    settings = make_settings(TASK, "all_reduce", Cluster(workers=1), epochs=0.05, evaluations=1)
    job = job_of(settings, TASK, None, tmp_path)
    diary = Diary(str(tmp_path), 0)
    Training(job, make_task(TASK), Torn(), diary).run()
    diary.close()
    follower = Follower(tmp_path, [FileEntries(tmp_path, 0)])
    follower.catch_up()
    assert follower.result(settings, 0).summary["torn_updates"] == 2


def test_shaped_links_pass_the_count_on() -> None:
    """What slows the links down hides nothing."""
    assert ShapedTransport(Torn(), Links()).torn_updates == 2
