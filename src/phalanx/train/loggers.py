"""Loggers: numbers of each step as CSV, as JSON lines, or as event files for TensorBoard.

Of the workers of a job only the first one writes.
"""

from __future__ import annotations

import csv
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np

from phalanx.collectives import groups
from phalanx.errors import InvalidTypeError, InvalidValueError
from phalanx.runtime.formatting import shown
from phalanx.runtime.numbers import check_integer
from phalanx.train.event_files import EventFile, scalar_value

__all__ = ["CSVLogger", "JSONLinesLogger", "TensorBoardLogger"]


class _Logger:
    """Base of loggers: checks what is given, and writes on the first worker only."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        if not isinstance(path, str | os.PathLike):
            raise InvalidTypeError(f"A logger needs a path. Received: {shown(path)}")
        self._path = Path(path)

    def log(self, step: Any, metrics: Mapping[str, Any] | None = None, **more: Any) -> None:
        """Write the numbers of a step; metrics of `px.metrics` are read.

        Args:
            step: the number of the step, or a variable that counts.
            metrics: numbers by name.
            **more: the same.
        """
        number = check_integer(int(np.asarray(step)), "step", 0)
        numbers = {str(k): _as_float(k, v) for k, v in {**(metrics or {}), **more}.items()}
        if not groups.is_initialized() or groups.world().rank == 0:
            self.write(number, numbers)

    def write(self, step: int, numbers: dict[str, float]) -> None:
        """Write the numbers of a step."""
        raise NotImplementedError

    def close(self) -> None:
        """Close the file. Safe to call twice."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _as_float(name: str, value: Any) -> float:
    read = getattr(value, "result", None)
    array = np.asarray(read() if callable(read) else value)
    if array.shape != ():
        raise InvalidValueError(
            f"A logger writes single numbers. Received: {name} of shape {array.shape}"
        )
    return float(array)


class CSVLogger(_Logger):
    """Writes a table: a row per step, a column per name. The first row decides which names there are.

    Args:
        path: the file; rows are appended to one that exists, if it has the same columns.

    Examples:
        >>> import phalanx as px, tempfile, pathlib
        >>> path = pathlib.Path(tempfile.mkdtemp(), "log.csv")
        >>> with px.train.CSVLogger(path) as log:
        ...     log.log(0, loss=2.0)
        ...     log.log(1, loss=1.5)
        >>> path.read_text().split()
        ['step,loss', '0,2.0', '1,1.5']
    """

    _columns: list[str] | None = None

    def write(self, step: int, numbers: dict[str, float]) -> None:
        """Append a row."""
        if self._columns is None:
            self._columns = ["step", *numbers]
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if self._path.exists() and self._path.stat().st_size:
                with self._path.open(newline="") as file:
                    header = next(csv.reader(file), [])
                if header != self._columns:
                    raise InvalidValueError(
                        f"{self._path} has the columns {header}. Received: {self._columns}"
                    )
            else:
                self._append(self._columns)
        if ["step", *numbers] != self._columns:
            raise InvalidValueError(
                f"A table has the same columns in each row: {self._columns[1:]}. "
                f"Received: {list(numbers)}"
            )
        self._append([step, *numbers.values()])

    def _append(self, row: list[Any]) -> None:
        with self._path.open("a", newline="") as file:
            csv.writer(file, lineterminator="\n").writerow(row)


class JSONLinesLogger(_Logger):
    """Writes an object per step, each in a line of its own; names may differ between steps.

    Numbers that are not finite are written as null, which JSON has in their place.

    Args:
        path: the file; lines are appended to one that exists.
    """

    def write(self, step: int, numbers: dict[str, float]) -> None:
        """Append a line."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        finite = {k: v if math.isfinite(v) else None for k, v in numbers.items()}
        with self._path.open("a") as file:
            file.write(json.dumps({"step": step, **finite}) + "\n")


class TensorBoardLogger(_Logger):
    """Writes event files, which TensorBoard shows.

    Args:
        path: the directory.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path)
        self._file = EventFile(path)

    def write(self, step: int, numbers: dict[str, float]) -> None:
        """Write an event with all numbers."""
        self._file.add(step, *(scalar_value(k, v) for k, v in numbers.items()))

    def close(self) -> None:
        """Close the file. Safe to call twice."""
        self._file.close()
