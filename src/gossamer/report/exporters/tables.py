"""Two tidy tables for statistics programs: a row per evaluation, and a row per run."""

from __future__ import annotations

import csv
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gossamer.files import replacement
from gossamer.report.exporters.exporter import Exporter, check_vacant, require
from gossamer.report.exporters.facts import Facts, Scalar

Column = list[Scalar | None]


class TableExporter(Exporter):
    """Keeps the rows and writes both tables anew whenever there is news, so that whatever ends
    the run, whole tables are on disk."""

    suffix: str

    def __init__(
        self, path: Path | str, *, name: str | None = None, force: bool = False
    ) -> None:  # fmt: skip
        """`path` is a folder, made if it is not there."""
        super().__init__(name)
        self._folder = Path(path)
        check_vacant(self._folder, force=force)
        self._rows: list[Facts] = []
        self._summaries: list[Facts] = []
        self._first = 0
        """Of the rows of the run under way, whose labels may come with its end."""

    def _begin(self, name: str, about: Facts, settings: Mapping[str, Any]) -> None:
        self._first = len(self._rows)
        self._about: Facts = {"run": name} | about

    def _row(self, row: Facts, step: int) -> None:
        self._rows.append(self._about | row)
        if self._is_open:
            self._write_table("metrics", self._rows)

    def _end(self, about: Facts, summary: Facts, status: str) -> None:
        self._about = self._about | {
            key: value for key, value in about.items() if value is not None
        }
        self._rows[self._first :] = [row | self._about for row in self._rows[self._first :]]
        # The labels are in front already.
        self._summaries.append(self._about | {"status": status} | summary | self._about)
        self._write_table("metrics", self._rows)
        self._write_table("summary", self._summaries)

    def _write_table(self, table: str, rows: Sequence[Facts]) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        with replacement(self._folder / f"{table}{self.suffix}") as part:
            self._write(part, columns(rows))

    @abstractmethod
    def _write(self, path: Path, table: Mapping[str, Column]) -> None: ...


def columns(rows: Sequence[Facts]) -> dict[str, Column]:
    """By name, in order of appearance; what a row does not have is None."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    return {name: [row.get(name) for row in rows] for name in names}


class CsvExporter(TableExporter):
    """metrics.csv and summary.csv in a folder; what is not known is empty."""

    suffix = ".csv"

    def _write(self, path: Path, table: Mapping[str, Column]) -> None:
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(table)
            writer.writerows(zip(*table.values(), strict=True))


class ParquetExporter(TableExporter):
    """metrics.parquet and summary.parquet in a folder; needs pyarrow."""

    suffix = ".parquet"

    def __init__(
        self, path: Path | str, *, name: str | None = None, force: bool = False
    ) -> None:  # fmt: skip
        self._arrow = require("pyarrow", "a Parquet file", "pyarrow")
        self._parquet = require("pyarrow.parquet", "a Parquet file", "pyarrow")
        super().__init__(path, name=name, force=force)

    def _write(self, path: Path, table: Mapping[str, Column]) -> None:
        alike = {name: one_type(column) for name, column in table.items()}
        self._parquet.write_table(self._arrow.table(alike), str(path))


def one_type(column: Column) -> Column:
    """A column of one type, the narrowest that holds all: a folder may be damaged or of another
    version, and a table with a text among numbers is better than none."""
    kinds = {type(value) for value in column if value is not None}
    convert: Callable[[Scalar], Scalar] = str
    if len(kinds) <= 1:
        return column
    if kinds == {int, float}:
        convert = float
    return [None if value is None else convert(value) for value in column]
