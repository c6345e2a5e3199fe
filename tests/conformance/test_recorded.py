"""Every recorded case, in the order of the files."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from tests.conformance.harness import (
    AWAITING,
    CASES,
    DIFFERENCES,
    DIFFERENCES_PAGE,
    encode,
    exception_type,
    records,
    same,
)

SUBJECTS = [
    "documentation",
    "scopes",
    "variables",
    "communication",
    "input",
    "several_workers",
    "clusters",
    "training_state",
    "parameter_servers",
    "coordinator",
]
for subject in SUBJECTS:  # each module registers its cases
    importlib.import_module(f"tests.conformance.{subject}")
RECORDS = [r for subject in SUBJECTS for r in records(subject)]


@pytest.mark.parametrize(
    "record", [r for r in RECORDS if r["case"] not in AWAITING], ids=lambda r: r["case"]
)
def test_recorded(record: dict[str, Any]) -> None:
    name = record["case"]
    if name in DIFFERENCES:
        DIFFERENCES[name]()
    elif "raises" in record:
        with pytest.raises(exception_type(record["raises"])):
            CASES[name]()
    else:
        actual = encode(CASES[name]())
        assert same(record["result"], actual), f"TensorFlow: {record['result']}\nours: {actual}"


def test_every_case_is_accounted_for_once() -> None:
    names = {r["case"] for r in RECORDS}
    tables = [set(CASES), set(DIFFERENCES), set(AWAITING)]
    assert names == set.union(*tables)
    assert sum(len(t) for t in tables) == len(names)


def test_every_difference_is_described() -> None:
    page = DIFFERENCES_PAGE.read_text()
    missing = [name for name in (*DIFFERENCES, *AWAITING) if f"`{name}`" not in page]
    assert not missing
