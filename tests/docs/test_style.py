"""The words of the project: phrases that it does not use, and files that its pages name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

AVOIDED = {
    r"nobody|somebody|anybody|whoever": "name the process, the worker, the user or the code",
    r"inside of": 'write "inside" or "in"',
    r"for ever": 'write "forever"',
    r"what is \w+ is": "begin with the subject",
}


def texts() -> Iterator[Path]:
    """The files that people read, and the sources with their error messages."""
    yield from (ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"))
    for folder in ("src", "docs", "examples", "tools", "benchmarks"):
        for ending in ("py", "pyi", "md"):
            yield from sorted((ROOT / folder).rglob(f"*.{ending}"))


@pytest.mark.parametrize("phrase", AVOIDED)
def test_phrases_that_are_avoided(phrase: str) -> None:
    pattern = re.compile(rf"\b(?:{phrase})\b", re.IGNORECASE)
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in texts()
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if pattern.search(line)
    ]
    assert found == [], AVOIDED[phrase]


def test_files_that_pages_name_exist() -> None:
    """A page may leave the beginning of a path out, as in `core/values.py`."""
    folders = ("src", "tests", "docs", "examples", "tools", "benchmarks")
    known = [path.as_posix() for folder in folders for path in (ROOT / folder).rglob("*.*")]
    missing = [
        f"{page.relative_to(ROOT)}: {name}"
        for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
        for name in set(re.findall(r"`([\w./]+\.(?:py|md|svg))`", page.read_text()))
        if name != "train.py" and not any(path.endswith(f"/{name}") for path in known)
    ]
    assert missing == []
