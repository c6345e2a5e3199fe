"""Become one task of a cluster that a scheduler has started: ask a resolver which one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from phalanx.cluster.resolvers import (
    ClusterResolver,
    GCEClusterResolver,
    KubernetesClusterResolver,
    SageMakerClusterResolver,
    SimpleClusterResolver,
    SlurmClusterResolver,
    TFConfigClusterResolver,
)
from phalanx.cluster.roles import validate_cluster_spec
from phalanx.errors import ClusterEnvironmentError, InvalidTypeError, InvalidValueError
from phalanx.job.hub.descriptions import Task
from phalanx.runtime.formatting import shown

RESOLVERS: dict[str, type[ClusterResolver]] = {
    "gce": GCEClusterResolver,
    "kubernetes": KubernetesClusterResolver,
    "sagemaker": SageMakerClusterResolver,
    "slurm": SlurmClusterResolver,
    "tfconfig": TFConfigClusterResolver,
}
"""The resolvers by the names that the command line has for them."""


def parse_arguments(words: list[str]) -> dict[str, Any]:
    """Arguments as ``name=value``; a value is JSON, or else a text.

    >>> parse_arguments(["port=8470", "zone=europe-west4-a"])
    {'port': 8470, 'zone': 'europe-west4-a'}
    """
    arguments: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not name.isidentifier() or not equals:
            raise InvalidValueError(
                f"An argument of a resolver is written name=value. Received: {shown(word)}"
            )
        try:
            arguments[name] = json.loads(value)
        except ValueError:
            arguments[name] = value
    return arguments


def parse_task(text: str) -> Task:
    """A task as ``worker:1``.

    >>> parse_task("worker:1")
    Task(type='worker', id=1, address='')
    """
    kind, _, index = text.partition(":")
    if not kind or not index.isdigit():
        raise InvalidValueError(
            f"A task is written as its type and index, such as worker:1. Received: {shown(text)}"
        )
    return Task(kind, int(index))


def resolved(name: str, arguments: Mapping[str, Any], task: Task | None) -> SimpleClusterResolver:
    """The cluster and the task of this process, from the resolver with this name.

    `task` says which task this process is, for resolvers that cannot know it.
    """
    try:
        resolver = RESOLVERS[name](**arguments)
    except TypeError as error:
        if isinstance(error, InvalidTypeError):
            raise
        raise InvalidValueError(
            f"{RESOLVERS[name].__name__} cannot be made with these arguments: {error}. "
            f"Received: {dict(arguments)}"
        ) from error
    kind = resolver.task_type if task is None else task.type
    index = resolver.task_id if task is None else task.id
    cluster = resolver.cluster_spec()
    if not cluster or kind is None or index is None:
        raise ClusterEnvironmentError(
            f"{RESOLVERS[name].__name__} does not know which task of which cluster this process is. "
            "Say it with --task worker:0. "
            f"Received: {cluster}, task type {shown(kind)}, index {shown(index)}"
        )
    validate_cluster_spec(cluster, kind, index)
    return SimpleClusterResolver(cluster, task_type=kind, task_id=index)


def resolved_config(resolver: ClusterResolver) -> str:
    """The value of TF_CONFIG that says the same as a resolver.

    >>> from phalanx.cluster import ClusterSpec
    >>> cluster = ClusterSpec({"worker": ["host0:2222"]})
    >>> resolved_config(SimpleClusterResolver(cluster, task_type="worker", task_id=0))
    '{"cluster": {"worker": ["host0:2222"]}, "task": {"type": "worker", "index": 0}}'
    """
    task = {"type": resolver.task_type, "index": resolver.task_id}
    return json.dumps({"cluster": resolver.cluster_spec().as_dict(), "task": task})
