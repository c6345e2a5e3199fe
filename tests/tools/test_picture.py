"""The picture of the README, and the script that draws it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from xml.etree import ElementTree

from phalanx.cli.demo import TrainingResult

ROOT = Path(__file__).parents[2]
SVG = "{http://www.w3.org/2000/svg}"

_spec = importlib.util.spec_from_file_location("picture", ROOT / "tools" / "picture.py")
assert _spec is not None
assert _spec.loader is not None
picture = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(picture)


def test_one_line_for_each_run() -> None:
    losses = [1.0 / (epoch + 1) for epoch in range(picture.EPOCHS)]
    other = [loss * 1.5 for loss in losses]
    runs = [TrainingResult(x, 0.5, [], 1.0) for x in (losses, losses, other, losses)]
    drawn = ElementTree.fromstring(picture.drawn(runs))
    first, second, third, fourth = (line.get("points") for line in drawn.iter(f"{SVG}polyline"))
    assert first == second == fourth
    assert first != third


def test_the_picture_in_the_readme_is_one_of_these() -> None:
    drawn = ElementTree.parse(picture.FILE).getroot()
    words = [text.text or "" for text in drawn.iter(f"{SVG}text")]
    assert len(list(drawn.iter(f"{SVG}polyline"))) == len(picture.REPLICAS)
    assert len({word for word in words if word.startswith("test accuracy")}) == 1
    for page in ("README.md", "docs/index.md"):
        assert "images/demo.svg" in (ROOT / page).read_text()
