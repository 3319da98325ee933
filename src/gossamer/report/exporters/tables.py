"""Two tables for statistics programs: a row for each evaluation, and a row for each run."""

from __future__ import annotations

import csv
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gossamer.files import replacement
from gossamer.report.exporters.exporter import Exporter, known, require
from gossamer.report.exporters.facts import Facts, Scalar

Column = list[Scalar | None]


class TableExporter(Exporter):
    """Keeps the rows and rewrites both tables after each new row, so that the tables on disk are
    whole however the run ends."""

    suffix: str

    def __init__(
        self, path: Path | str, *, name: str | None = None, force: bool = False
    ) -> None:  # fmt: skip
        """`path` is a folder, which is made if it does not exist."""
        super().__init__(path, name, force=force)
        self._path = Path(path)
        self._rows: list[Facts] = []
        self._summaries: list[Facts] = []
        self._first = 0
        """The first row of the run under way, whose labels may be known only at its end."""

    def _begin(self, name: str, about: Facts, settings: Mapping[str, Any]) -> None:
        self._first = len(self._rows)
        self._about: Facts = {"run": name} | about

    def _row(self, row: Facts, step: int) -> None:
        self._rows.append(self._about | row)
        if self._is_open:
            self._write_table("metrics", self._rows)

    def _end(self, about: Facts, summary: Facts, status: str) -> None:
        self._about |= known(about)
        self._rows[self._first :] = [row | self._about for row in self._rows[self._first :]]
        # The labels come first, and their values stand over those of the summary.
        self._summaries.append(self._about | {"status": status} | summary | self._about)
        self._write_table("metrics", self._rows)
        self._write_table("summary", self._summaries)

    def _write_table(self, table: str, rows: Sequence[Facts]) -> None:
        self._path.mkdir(parents=True, exist_ok=True)
        with replacement(self._path / f"{table}{self.suffix}") as part:
            self._write(part, columns(rows))

    @abstractmethod
    def _write(self, path: Path, table: Mapping[str, Column]) -> None: ...


def columns(rows: Sequence[Facts]) -> dict[str, Column]:
    """The columns by name, in order of appearance; None where a row has no value."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    return {name: [row.get(name) for row in rows] for name in names}


class CsvExporter(TableExporter):
    """metrics.csv and summary.csv in a folder; a cell without a value is empty."""

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
    """The column with all values of one type, text if nothing narrower holds them all.

    A damaged run folder, or one of another version, may have a text among the numbers.
    """
    kinds = {type(value) for value in column if value is not None}
    convert: Callable[[Scalar], Scalar] = str
    if len(kinds) <= 1:
        return column
    if kinds == {int, float}:
        convert = float
    return [None if value is None else convert(value) for value in column]
