"""`RunConfig`: the task of this process, and what goes together."""

from __future__ import annotations

import json
from typing import Any

import pytest

import phalanx as px
from phalanx.integrations.estimator.driving import EvaluationPauses

CLUSTER = {
    "chief": ["host0:1"],
    "worker": ["host1:1", "host2:1"],
    "ps": ["host3:1"],
    "evaluator": ["host4:1"],
}


@pytest.mark.parametrize(
    ("task", "index", "chief", "number"),
    [
        ("chief", 0, True, 0),
        ("worker", 1, False, 2),
        ("ps", 0, False, 3),
        ("evaluator", 0, False, None),
    ],
)
def test_the_task_comes_from_tf_config(
    monkeypatch: Any, task: str, index: int, chief: bool, number: int | None
) -> None:
    config = {"cluster": CLUSTER, "task": {"type": task, "index": index}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    run = px.estimator.RunConfig()
    assert (run.task_type, run.task_id, run.is_chief) == (task, index, chief)
    assert (run.num_worker_replicas, run.num_ps_replicas) == (3, 1)
    assert run.global_id_in_cluster == number
    assert run.cluster_spec.as_dict() == CLUSTER


def test_the_first_worker_is_the_chief_if_there_is_none(monkeypatch: Any) -> None:
    cluster = {"worker": ["host0:1", "host1:1"]}
    for index in (0, 1):
        task = {"type": "worker", "index": index}
        monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": task}))
        assert px.estimator.RunConfig().is_chief == (index == 0)


def test_checkpoints_by_time_or_by_steps() -> None:
    assert px.estimator.RunConfig().save_checkpoints_secs == 600
    config = px.estimator.RunConfig(save_checkpoints_steps=5)
    assert config.save_checkpoints_secs is None
    assert config.replace(save_checkpoints_secs=7).save_checkpoints_steps is None
    assert px.estimator.RunConfig(save_checkpoints_secs=None).save_checkpoints_steps is None
    with pytest.raises(ValueError, match="by steps or by time"):
        px.estimator.RunConfig(save_checkpoints_steps=5, save_checkpoints_secs=5)
    with pytest.raises(ValueError, match="log_step_count_steps"):
        px.estimator.RunConfig(log_step_count_steps=0)
    with pytest.raises(TypeError, match="train_distribute"):
        px.estimator.RunConfig(train_distribute="mirrored")  # type: ignore[arg-type]


def test_evaluations_are_not_too_close() -> None:
    now = [0.0]
    throttle = EvaluationPauses(delay=10, pause=100, clock=lambda: now[0])
    due = []
    for now[0] in (9.0, 10.0, 20.0, 110.0):
        due.append(throttle.is_due())
        if due[-1]:
            throttle.evaluated()
    assert due == [False, True, False, True]
