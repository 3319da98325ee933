"""`gossamer probe`: measure these machines, and describe them as a cluster for the simulator.

It measures step times, links, and links under contention, without any method. Worker 0 conducts the
probe; the other workers do what it asks and answer. Read `conductor` first.
"""

from gossamer.plan.probe.description import describe
from gossamer.plan.probe.findings import ProbeFindings
from gossamer.plan.probe.fit import Fit, fit
from gossamer.plan.probe.toml_text import to_toml

__all__ = ["Fit", "ProbeFindings", "describe", "fit", "to_toml"]
