"""For MLflow: a run with parameters and metrics, in a folder or at a tracking server."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gossamer.errors import ConfigurationError
from gossamer.report.exporters.exporter import Exporter, check_vacant, require
from gossamer.report.exporters.facts import Facts, flat

_MOST_PARAMETERS = 100
"""That MLflow takes at once."""
_LONGEST = 500
"""Characters of a parameter."""
_ENDED = {"finished": "FINISHED", "diverged": "FINISHED", "interrupted": "KILLED"}


class MlflowExporter(Exporter):
    """Needs mlflow, or mlflow-skinny.

    Without a `folder` it goes where MLflow is set to go (MLFLOW_TRACKING_URI). A metric's
    timestamp is the beginning of the export plus the second of the run.
    """

    def __init__(
        self, experiment: str = "gossamer", *, folder: Path | str | None = None,
        name: str | None = None, force: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(name)
        if folder is not None:
            # Whoever names a folder wants it there and nowhere else: MLflow's telemetry writes
            # into the home folder and speaks to the outside unless told before it is imported.
            os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        mlflow = require("mlflow", "MLflow's format", "mlflow")
        self._entities = require("mlflow.entities", "MLflow's format", "mlflow")
        self._client: Any
        if folder is None:
            self._client = mlflow.MlflowClient()
        else:
            check_vacant(Path(folder), force=force)
            # MLflow asks for this word before it keeps runs in files, which need no database.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            place = Path(folder).resolve().as_uri()
            self._client = mlflow.MlflowClient(tracking_uri=place)
        try:
            known = self._client.get_experiment_by_name(experiment)
            self._experiment = (
                self._client.create_experiment(experiment) if known is None else known.experiment_id
            )
        except Exception as error:
            reason = str(error).strip().splitlines() or [type(error).__name__]
            raise ConfigurationError(
                f"MLflow did not give the experiment {experiment!r} ({reason[0].rstrip('.')}); "
                "check MLFLOW_TRACKING_URI, or name a folder"
            ) from error

    def _begin(self, name: str, about: Facts, settings: Mapping[str, Any]) -> None:
        self._began_ms = int(1000 * time.time())
        run = self._client.create_run(self._experiment, start_time=self._began_ms, run_name=name)
        self._id: str = run.info.run_id
        self._last = (0, 0.0)
        self._parameters = self._log_parameters({**flat(settings), **about}, frozenset())

    def _row(self, row: Facts, step: int) -> None:
        seconds = row.get("seconds")
        seconds = float(seconds) if isinstance(seconds, int | float) else self._last[1]
        self._last = (step, seconds)
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
        """Those that are new: MLflow refuses to change a parameter."""
        new = {
            _key(name): str(value)[:_LONGEST]
            for name, value in facts.items()
            if value is not None and _key(name) not in before
        }
        parameters = [self._entities.Param(name, value) for name, value in new.items()]
        for at in range(0, len(parameters), _MOST_PARAMETERS):
            self._client.log_batch(self._id, params=parameters[at : at + _MOST_PARAMETERS])
        return before | frozenset(new)


def _key(name: str) -> str:
    """MLflow takes letters, digits and these signs in a name."""
    return "".join(sign if sign.isalnum() or sign in "_-. :/" else "_" for sign in name)
