"""An exporter to MLflow: parameters and metrics in a folder or on a tracking server."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gossamer.errors import ConfigurationError
from gossamer.report.exporters.exporter import Exporter, first_line, known, require
from gossamer.report.exporters.facts import Facts, flat

_MOST_PARAMETERS = 100
"""The most parameters that MLflow takes at once."""
_LONGEST = 500
"""The most characters of a parameter."""
_ENDED = {"finished": "FINISHED", "diverged": "FINISHED", "interrupted": "KILLED"}


class MlflowExporter(Exporter):
    """Writes to MLflow; needs mlflow or mlflow-skinny.

    Without a `folder` MLflow's own setting (MLFLOW_TRACKING_URI) decides where runs go. The
    timestamp of a metric is the start of the export plus the run's own seconds.
    """

    def __init__(
        self, experiment: str = "gossamer", *, folder: Path | str | None = None,
        name: str | None = None, force: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(folder, name, force=force)
        place = {}
        if self._folder is not None:
            # MLflow's telemetry writes into the home folder and uses the network, unless it is
            # switched off before MLflow is imported.
            os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
            # MLflow keeps runs in files, which need no database, only with this setting.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            place["tracking_uri"] = self._folder.resolve().as_uri()
        mlflow = require("mlflow", "MLflow's format", "mlflow")
        self._entities = require("mlflow.entities", "MLflow's format", "mlflow")
        self._client: Any = mlflow.MlflowClient(**place)
        try:
            found = self._client.get_experiment_by_name(experiment)
            self._experiment = (
                self._client.create_experiment(experiment) if found is None else found.experiment_id
            )
        except Exception as error:
            raise ConfigurationError(
                f"MLflow did not give the experiment {experiment!r} ({first_line(error)}); "
                "check MLFLOW_TRACKING_URI, or name a folder"
            ) from error

    def _begin(self, name: str, about: Facts, settings: Mapping[str, Any]) -> None:
        self._began_ms = int(1000 * time.time())
        run = self._client.create_run(self._experiment, start_time=self._began_ms, run_name=name)
        self._id: str = run.info.run_id
        self._parameters = self._log_parameters({**flat(settings), **about}, frozenset())

    def _row(self, row: Facts, step: int) -> None:
        self._log_metrics(row)

    def _end(self, about: Facts, summary: Facts, status: str) -> None:
        texts = {name: value for name, value in summary.items() if isinstance(value, str)}
        self._log_parameters({**texts, **about}, self._parameters)
        measured = {name: value for name, value in summary.items() if name not in about}
        self._log_metrics({f"summary/{name}": value for name, value in measured.items()})
        ended_ms = self._began_ms + int(1000 * self._last[1])
        self._client.set_terminated(self._id, _ENDED.get(status, "FAILED"), end_time=ended_ms)

    def _log_metrics(self, facts: Facts) -> None:
        step, seconds = self._last
        moment = self._began_ms + int(1000 * seconds)
        metrics = [
            self._entities.Metric(_key(name), float(value), moment, step)
            for name, value in facts.items()
            if isinstance(value, int | float)
        ]
        self._client.log_batch(self._id, metrics=metrics)

    def _log_parameters(self, facts: Facts, before: frozenset[str]) -> frozenset[str]:
        """Log the parameters that are new, as MLflow refuses to change one; returns all names."""
        new = {
            _key(name): str(value)[:_LONGEST]
            for name, value in known(facts).items()
            if _key(name) not in before
        }
        parameters = [self._entities.Param(name, value) for name, value in new.items()]
        for at in range(0, len(parameters), _MOST_PARAMETERS):
            self._client.log_batch(self._id, params=parameters[at : at + _MOST_PARAMETERS])
        return before | frozenset(new)


def _key(name: str) -> str:
    """A name with only the characters that MLflow takes."""
    return "".join(sign if sign.isalnum() or sign in "_-. :/" else "_" for sign in name)
