"""`RunConfig`: how an estimator runs, and which task of a cluster this process is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from phalanx.cluster import roles
from phalanx.cluster.resolvers.tfconfig import TFConfigClusterResolver
from phalanx.cluster.spec import ClusterSpec
from phalanx.core import context as ctx
from phalanx.core.strategy import Strategy
from phalanx.errors import InvalidTypeError, InvalidValueError
from phalanx.runtime.formatting import shown

_BY_TIME: Final = 600.0  # seconds between checkpoints, if nothing else is said
_UNSET: Any = object()


@dataclass(frozen=True)
class RunConfig:
    """How an estimator runs: where it keeps files, how often it saves, and under which strategies.

    Which task of a cluster this process is comes from the environment variable TF_CONFIG, which
    ``phalanx run`` sets. It is read once, when the configuration is made.

    Args:
        model_dir: where checkpoints and summaries are; the estimator's own argument is the same.
        tf_random_seed: what initial values are drawn from; 0 if it is None.
        save_summary_steps: after how many steps the loss is written for TensorBoard; 0 or None: never.
        save_checkpoints_steps: after how many steps a checkpoint is saved.
        save_checkpoints_secs: after how many seconds, if not by steps; by default 600. If both are
            None, there is one at the end only.
        keep_checkpoint_max: how many checkpoints stay; None or 0 keeps all.
        keep_checkpoint_every_n_hours: besides, one of every so many hours stays.
        log_step_count_steps: after how many steps the loss and the speed are logged; None: never.
        train_distribute: the strategy that trains, or a function without arguments that makes it; such
            a function is called only in tasks that train. None trains on one device.
        eval_distribute: the same for `evaluate`.

    Examples:
        >>> import phalanx as px
        >>> config = px.estimator.RunConfig(save_checkpoints_steps=100, keep_checkpoint_max=3)
        >>> config.task_type, config.is_chief, config.num_worker_replicas, config.num_ps_replicas
        ('worker', True, 1, 0)
        >>> config.replace(save_checkpoints_secs=60).save_checkpoints_steps is None
        True
    """

    model_dir: str | None = None
    tf_random_seed: int | None = None
    save_summary_steps: int | None = 100
    save_checkpoints_steps: int | None = _UNSET
    save_checkpoints_secs: float | None = _UNSET
    keep_checkpoint_max: int | None = 5
    keep_checkpoint_every_n_hours: float | None = None
    log_step_count_steps: int | None = 100
    train_distribute: Strategy | Callable[[], Strategy] | None = None
    eval_distribute: Strategy | Callable[[], Strategy] | None = None
    cluster_spec: ClusterSpec = dataclasses.field(init=False)
    task_type: str | None = dataclasses.field(init=False)
    task_id: int | None = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        steps, seconds = self.save_checkpoints_steps, self.save_checkpoints_secs
        if steps is _UNSET:
            steps = None
            seconds = _BY_TIME if seconds is _UNSET else seconds
        seconds = None if seconds is _UNSET else seconds
        if steps is not None and seconds is not None:
            raise InvalidValueError(
                "Checkpoints are saved by steps or by time; set one of them to None. Received: "
                f"save_checkpoints_steps={shown(steps)}, save_checkpoints_secs={shown(seconds)}"
            )
        self._set(save_checkpoints_steps=steps, save_checkpoints_secs=seconds)
        for name in ("save_checkpoints_steps", "save_checkpoints_secs", "log_step_count_steps"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise InvalidValueError(f"{name} must be positive or None. Received: {shown(value)}")
        for name in ("save_summary_steps", "keep_checkpoint_max"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise InvalidValueError(f"{name} must not be negative. Received: {shown(value)}")
        for name in ("train_distribute", "eval_distribute"):
            given = getattr(self, name)
            if not (given is None or isinstance(given, Strategy) or callable(given)):
                raise InvalidTypeError(
                    f"{name} must be a strategy, a function that makes one, or None. "
                    f"Received: {shown(given)}"
                )
        resolver = TFConfigClusterResolver()
        spec = resolver.cluster_spec()
        self._set(cluster_spec=spec, task_type=resolver.task_type, task_id=resolver.task_id)
        if not spec.jobs:
            self._set(task_type=self.task_type or "worker", task_id=self.task_id or 0)
        elif self.task_type is not None and self.task_id is not None:
            roles.validate_cluster_spec(spec, self.task_type, self.task_id)

    def _set(self, **values: Any) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def is_chief(self) -> bool:
        """Whether this task saves and logs: the chief, or the first worker if there is none."""
        if not self.cluster_spec.jobs:
            return True
        if self.task_type not in ("chief", "worker"):
            return False
        return roles.is_chief(self.cluster_spec, self.task_type, self.task_id)

    @property
    def num_worker_replicas(self) -> int:
        """How many tasks train, the chief among them."""
        return sum(self._count(job) for job in ("chief", "worker")) if self.cluster_spec.jobs else 1

    @property
    def num_ps_replicas(self) -> int:
        """How many parameter servers there are."""
        return self._count("ps")

    @property
    def global_id_in_cluster(self) -> int | None:
        """The number of this task: the chief first, then workers, then servers; None for evaluators."""
        if not self.cluster_spec.jobs:
            return 0
        order = ("chief", "worker", "ps")
        if self.task_type not in order or self.task_id is None:
            return None
        return self.task_id + sum(map(self._count, order[: order.index(self.task_type)]))

    def _count(self, job: str) -> int:
        return len(self.cluster_spec.job_tasks(job)) if job in self.cluster_spec.jobs else 0

    def replace(self, **changes: Any) -> RunConfig:
        """A copy with other values."""
        for one, other in (
            ("save_checkpoints_steps", "save_checkpoints_secs"),
            ("save_checkpoints_secs", "save_checkpoints_steps"),
        ):
            if changes.get(one) is not None and other not in changes:
                changes[other] = None
        return dataclasses.replace(self, **changes)


def made(given: Strategy | Callable[[], Strategy] | None) -> Strategy:
    """The strategy that was given, or that a function makes; the default one for None."""
    if given is None:
        return ctx.default_mode().strategy
    strategy = given if isinstance(given, Strategy) else given()
    if not isinstance(strategy, Strategy):
        raise InvalidTypeError(
            f"The function must return a strategy. Received: {shown(strategy)} from {shown(given)}"
        )
    return strategy
