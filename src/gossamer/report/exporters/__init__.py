"""Runs for other programs to read: tables, TensorBoard, Weights & Biases, MLflow.

    from gossamer.report.exporters import CsvExporter

    gossamer.simulate("digits-mlp", "ad_psgd", callbacks=[CsvExporter("figures")])

Each is a callback that listens to a run, and takes kept runs with `export`; `gossamer export` does
that for run folders. What an exporter needs is imported when it is made.
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
