"""What the machines are like on which this runs: computing, links, and links under contention.

`gossamer probe` measures them without any method and describes them as a cluster that the
simulator reads. Worker 0 conducts; everybody else does what it is told and answers.
"""

from gossamer.plan.probe.description import describe
from gossamer.plan.probe.findings import ProbeFindings
from gossamer.plan.probe.fit import Fit, fit
from gossamer.plan.probe.toml_text import to_toml

__all__ = ["Fit", "ProbeFindings", "describe", "fit", "to_toml"]
