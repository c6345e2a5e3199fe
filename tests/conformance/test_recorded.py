"""Every recorded case, in the order of the files."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conformance import t01, t02, t03, t04, t05, t06, t08, t09  # noqa: F401 - they register cases
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

RECORDS = [
    r for prefix in ("t01", "t02", "t03", "t04", "t05", "t06", "t08", "t09") for r in records(prefix)
]


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
