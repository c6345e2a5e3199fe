"""Input that never comes: the worker that waits for it is named, with its line, and the job ends."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import phalanx as px
from tests.multi_worker.faults import me, reduce

DEADLINE = 3

Outcome = tuple[str, str, float]


def reading(stuck: tuple[int, ...]) -> Outcome:
    """Steps over a dataset whose third batch never comes on some workers."""
    s = px.MultiWorkerMirroredStrategy()
    over = threading.Event()

    def batches() -> Iterator[Any]:
        for i in range(6):
            if i == 2 and me() in stuck:
                over.wait(60)
            yield np.ones(2, np.float32)

    dataset = px.data.Dataset.from_generator(batches, output_types=np.float32).batch(1)
    begin = time.monotonic()
    try:
        for x in s.distribute_datasets_from_function(lambda c: dataset):
            s.run(reduce, args=(x,))
    except Exception as error:  # noqa: BLE001 - the test looks at it
        over.set()
        return type(error).__name__, str(error), time.monotonic() - begin
    return "", "", 0.0


FILE = r"\S*test_input\.py:\d+"
LATE = (
    r"worker {} \(.*in phase 'input' for \d+ seconds at "
    f"{FILE} in reading, which reads its input at {FILE} in batches"
)


@pytest.mark.parametrize("stuck", [(1,), (0, 1)], ids=["one", "all"])
def test_an_input_that_hangs_is_reported(stuck: tuple[int, ...]) -> None:
    env = {"PHALANX_DEADLINE": str(DEADLINE)}
    preload = ["phalanx", "tests.multi_worker.faults"]
    with px.testing.MultiProcess(2, 1, env=env, preload=preload) as cluster:
        results = cluster.start(reading, stuck).results(timeout=60.0)
        shown = [cluster.stderr(i) for i in range(2)]
    for result in results:
        assert result.error is None, result.error
        kind, text, _ = result.value
        assert kind == "DeadlineExceededError", text
        assert re.match(rf"worker \d waited for {DEADLINE} seconds at \S*test_input\.py:\d+ in ", text)
        for worker in stuck:
            assert re.search("Late: .*" + LATE.replace("{}", str(worker)), text), text
    if len(stuck) == 1:
        assert "phalanx: worker 0 waits for worker 1 at " in shown[0]
        assert "Late: worker 1 in phase 'input'" in shown[0]
    else:
        assert "phalanx: all workers have waited for their input for " in shown[0] + shown[1]
    table = shown[0] + shown[1]
    assert re.search(r"worker 1 .* input .* in batches", table), table
