"""Runs for other programs to read: tables, TensorBoard, Weights & Biases, MLflow.

    from gossamer.report.exporters import CsvExporter

    gossamer.simulate("digits-mlp", "ad_psgd", callbacks=[CsvExporter("figures")])

Each exporter is a callback of a run, and its `export` takes a run from its folder, as
`gossamer export` does. The package that an exporter needs is imported when the exporter is made.
"""

from gossamer.report.exporters.exporter import Exporter
from gossamer.report.exporters.mlflow import MlflowExporter
from gossamer.report.exporters.tables import CsvExporter, ParquetExporter
from gossamer.report.exporters.tensorboard import TensorBoardExporter
from gossamer.report.exporters.wandb import WandbExporter

__all__ = [
    "CsvExporter",
    "Exporter",
    "MlflowExporter",
    "ParquetExporter",
    "TensorBoardExporter",
    "WandbExporter",
]
