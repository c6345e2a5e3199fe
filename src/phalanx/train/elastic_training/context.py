"""`ElasticContext`: what a training function gets in each generation of the workers."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from phalanx import comm
from phalanx.core.strategy import Strategy
from phalanx.data.dataset import Dataset
from phalanx.data.distribute.distributed_dataset import DistributedDataset
from phalanx.data.plan.dataset_options import AutoShardPolicy, Options
from phalanx.errors import ContextError, InvalidTypeError, InvalidValueError, PhalanxError
from phalanx.job.bootstrap import JobConnection
from phalanx.job.elastic.visitor import GenerationEntry, Visitor
from phalanx.runtime import laboratory
from phalanx.runtime.formatting import shown
from phalanx.runtime.numbers import check_integer
from phalanx.train.agreed_stop import AgreedStop
from phalanx.train.checkpoints.checkpoint import Checkpoint
from phalanx.train.checkpoints.manager import CheckpointManager
from phalanx.train.checkpoints.options import CheckpointOptions
from phalanx.train.checkpoints.restoring import Restoring
from phalanx.train.checkpoints.saving_again import save_surely, settle
from phalanx.train.checkpoints.trackables import without_state
from phalanx.train.elastic_training.carried_state import CarriedState, StateReferences

__all__ = ["ElasticContext", "MembershipChange", "Saving"]

_log = logging.getLogger("phalanx")

_POSITION = "elastic_position"
_NO_SEED = -1


class MembershipChange(BaseException):
    """Ends a training function at a step that all workers agree on. Not an error: do not catch it."""


@dataclass(frozen=True)
class Saving:
    """Where checkpoints are saved, and after how many steps; None for the end of a generation only."""

    directory: str | None = None
    every: int | None = None


class ElasticContext:
    """What the function that `px.train.elastic` calls gets, new for each generation of the workers.

    Attributes:
        strategy: over the workers of this generation.
        workers: how many there are.
        rank: the number of this worker among them.
        generation: the number of the generation, from 1.
        batch_size: the size of the global batch.
        reason: why there is a new generation.
    """

    def __init__(
        self,
        strategy: Strategy,
        entry: GenerationEntry,
        batch_size: int,
        full_batch_size: int,
        saving: Saving,
        connection: JobConnection | None,
        visitor: Visitor | None,
        brought: tuple[int, CarriedState | None],
    ) -> None:
        self.strategy, self.workers, self.rank = strategy, entry.size, entry.rank
        self.generation, self.reason, self.batch_size = entry.generation, entry.reason, batch_size
        self._entry, self._full_batch_size, self._saving = entry, full_batch_size, saving
        self._connection, self._visitor = connection, visitor
        # The step at which this worker has come, and its state, until all have the state.
        self._brought: tuple[int, CarriedState | None] | None = brought
        self._position = {"step": 0, "epoch": 0, "examples": 0, "seed": _NO_SEED}
        self._checkpoint: Checkpoint | None = None
        self._manager: CheckpointManager | None = None
        self._latest: StateReferences | None = None
        self._latest_step = 0
        self._is_in_step = False
        self._is_whole = True
        self._has_steps = False
        self._stop = AgreedStop(
            connection,
            f"elastic stop {entry.generation}",
            "Let every worker go through the same steps of the context.",
        )
        if visitor is not None:
            visitor.on_stop(self._announce_stop)

    @property
    def step(self) -> int:
        """How many steps have been made, by all generations together."""
        return self._position["step"]

    @property
    def epoch(self) -> int:
        """The number of the epoch, from 0."""
        return self._position["epoch"]

    @property
    def is_ending(self) -> bool:
        """Whether this generation ends after one of the next steps, because workers come or go."""
        is_lost = self._connection is not None and self._connection.member.failure is not None
        return self._stop.is_pending or is_lost

    @property
    def scale(self) -> float:
        """`batch_size` divided by what it is with as many workers as there may be, 1 if it is kept.

        Multiply the learning rate by it if you scale it with the batch.
        """
        return self.batch_size / self._full_batch_size

    # -- the state -------------------------------------------------------------------------------

    def track(self, **objects: Any) -> Checkpoint:
        """Give objects the state of the training, and carry it over to later generations.

        Call it once, when everything is made and before `steps`. The state comes from the memory of a
        worker that has it, from the newest checkpoint, or is what the objects have at the beginning.

        Args:
            **objects: as for `px.train.Checkpoint`: variables, optimizers (built), metrics, keys,
                pytrees of arrays. Positions in the data are carried over without them.

        Returns:
            A checkpoint with the objects as attributes. Arrays and pytrees of arrays cannot be changed:
            read them from it, and put new ones there in each step.
        """
        if self._checkpoint is not None:
            raise ContextError(
                "The state of a training is given once: call `track` with all objects together. "
                f"Received: {sorted(objects)}"
            )
        if _POSITION in objects or not objects:
            raise InvalidValueError(
                "`track` needs the objects that the training changes, such as model=model and "
                f"optimizer=optimizer. Received: {sorted(objects)}"
            )
        if unbuilt := sorted(without_state(objects)):
            raise InvalidValueError(
                "An optimizer gets its part of the state when it is tracked. Make its variables "
                "before: optimizer.build(variables). "
                f"Received: {', '.join(unbuilt)} without state"
            )
        checkpoint = Checkpoint(**{**objects, _POSITION: self._position})
        if self._saving.directory is not None:
            self._manager = CheckpointManager(checkpoint, self._saving.directory, max_to_keep=3)
        self._checkpoint = checkpoint
        self._restore()
        self._brought = None
        self._is_whole = StateReferences(self._things()).is_whole()
        if not self._is_whole and self._manager is None and self.workers > 1:
            raise InvalidValueError(
                "Parts of the state are on one worker each, as those of a sharded optimizer and of "
                "metrics, and would be lost with it. Give px.train.elastic a `checkpoint_dir`, or "
                f"leave them out. Received: {sorted(objects)}"
            )
        self._remember()
        return checkpoint

    def _things(self) -> dict[str, Any]:
        assert self._checkpoint is not None
        return self._checkpoint.things()

    def _restore(self) -> None:
        entry, checkpoint = self._entry, self._checkpoint
        assert checkpoint is not None
        if entry.source is None:
            if self._manager is not None:
                path = self._manager.restore_or_initialize()
                if path is not None:
                    _log.info("The training goes on from %s.", path)
            return
        carried = None if self._brought is None else self._brought[1]
        laboratory.reach("carry")
        if len(entry.holders) < entry.size:
            carried = self._from_source(entry, carried)
        assert carried is not None
        restoring = Restoring(carried, self._things())  # type: ignore[arg-type]
        restoring.read()
        checkpoint.replace_values(restoring.give())

    def _from_source(self, entry: GenerationEntry, carried: CarriedState | None) -> CarriedState:
        """The state of the one that has it, for those that do not; all take part."""
        assert self._connection is not None
        assert entry.source is not None
        is_source = entry.rank == entry.source
        packed = carried.pack() if is_source and carried is not None else None
        sizes = self._connection.member.exchange(
            "size of the state", 0 if packed is None else packed.size
        )
        data = np.zeros(int(sizes[entry.source]), np.uint8) if packed is None else packed
        result, _ = comm.broadcast(data, src=entry.source)
        if carried is not None and entry.rank in entry.holders:
            return carried
        return CarriedState.unpack(np.asarray(result))

    def _remember(self) -> None:
        """Hold on to the state after this step: if the next one fails, it is what there was."""
        if self.workers > 1 and self._is_whole and jax.default_backend() == "cpu":
            self._latest = StateReferences(self._things())
        self._latest_step = self.step

    # -- steps -----------------------------------------------------------------------------------

    def steps(
        self,
        dataset: Dataset,
        epochs: int = 1,
        *,
        batched: Callable[[Dataset], Dataset] | None = None,
    ) -> Iterator[Any]:
        """Yields what the replicas of this worker get of each global batch that is left.

        What stands in the loop is one step. It counts when the loop comes back for the next batch; if a
        worker is lost before, the error is raised here, also if the step has ignored it. All survivors
        go back to the state before the step, or on to that after it if one of them has it. Every
        example of an epoch is seen once, by whichever workers there are.

        Args:
            dataset: of single examples, the same on all workers. It is put into batches here, because
                their size may change.
            epochs: how often to go through it.
            batched: makes another dataset of batches of the dataset of batches, one of each.
        """
        if self._checkpoint is None:
            raise ContextError(
                "Call `track` before `steps`, with what the training changes: it restores the state."
            )
        if self._has_steps:
            raise ContextError(
                "There is one loop over `steps` in a training function, so that a position in the data "
                "is a position in the training. Give `epochs`, or concatenate datasets."
            )
        if not isinstance(dataset, Dataset):
            raise InvalidTypeError(
                "`steps` needs a px.data.Dataset of single examples, which it puts into batches and "
                f"distributes itself. Received: {shown(dataset)}"
            )
        count = check_integer(epochs, "epochs", 1)
        self._has_steps = True
        return self._steps(dataset, count, batched)

    def _steps(
        self, dataset: Dataset, epochs: int, batched: Callable[[Dataset], Dataset] | None
    ) -> Iterator[Any]:
        position = self._position
        whole: DistributedDataset | None = None
        while position["epoch"] < epochs:
            if position["examples"]:
                data = self._distributed(dataset.skip(position["examples"]), batched)
            else:
                data = whole = whole or self._distributed(dataset, batched)
            iterator = data.iterator()
            if position["seed"] == _NO_SEED:
                position["seed"] = iterator.state()["seed"]
            iterator.restore({"epoch": position["epoch"], "index": 0, "seed": position["seed"]})
            while True:
                self._stop_if_agreed()
                try:
                    batch = next(iterator)
                except StopIteration:
                    break
                self._stop.begin()
                laboratory.note("elastic step", generation=self.generation, number=position["step"])
                self._is_in_step = True
                yield batch
                self._is_in_step = False
                del batch
                if self._connection is not None:
                    # The program may have ignored the error. A step that is not counted is made again.
                    self._connection.member.check()
                position["step"] += 1
                position["examples"] += self.batch_size
                if self._visitor is not None and position["step"] == self._entry.step + 1:
                    self._visitor.made(position["step"])
                self._after_step()
            position["epoch"] += 1
            position["examples"] = 0
        self._remember()
        if self._manager is not None and self._saving.every is not None:
            self._save_now()  # so that a job that is started again knows that it is done

    def _distributed(
        self, dataset: Dataset, batched: Callable[[Dataset], Dataset] | None
    ) -> DistributedDataset:
        options = Options()
        options.experimental_distribute.auto_shard_policy = AutoShardPolicy.DATA
        batches = dataset.batch(self.batch_size)
        if batched is not None:
            batches = batched(batches)
        distributed = self.strategy.experimental_distribute_dataset(batches.with_options(options))
        assert isinstance(distributed, DistributedDataset)
        return distributed

    def _after_step(self) -> None:
        self._remember()
        every = self._saving.every
        if self._manager is not None and every is not None and self.step % every == 0:
            settle(self._manager, self._connection)
            self._save(CheckpointOptions(enable_async=True))

    def _save_now(self) -> None:
        """Save a checkpoint that is needed."""
        assert self._manager is not None
        save_surely(self._manager, self._connection, self._save)

    def _save(self, options: CheckpointOptions | None = None) -> None:
        assert self._manager is not None
        self._manager.save(checkpoint_number=self.step, options=options)

    # -- the end of a generation -----------------------------------------------------------------

    def _announce_stop(self) -> None:
        with contextlib.suppress(PhalanxError):  # the generation has failed already
            self._stop.announce()

    def _stop_if_agreed(self) -> None:
        self._stop.wait_for_answers()
        if self._stop.is_over:
            saves = self._visitor is not None and self._visitor.wants_checkpoint
            if self._manager is not None and (saves or not self._is_whole):
                self._save_now()
            raise MembershipChange

    def close(self) -> None:
        """The training has ended: wait for a checkpoint that is under way."""
        if self._manager is not None:
            self._manager.sync()

    def end(self, failed: bool) -> tuple[int, CarriedState | None]:
        """What this worker carries over: a step, and the state after it if it has all of that.

        Args:
            failed: whether a worker was lost; else all stand after the same step.
        """
        self._stop.close()
        if self._visitor is not None:
            self._visitor.on_stop(lambda: None)
        if self._brought is not None:  # it has not come as far as to restore
            return self._brought
        assert self._checkpoint is not None
        with contextlib.suppress(Exception):  # a checkpoint that was under way may fail now
            self._checkpoint.sync()
        if not self._is_whole:
            return self.step, None
        latest = self._latest
        if failed:
            return self._latest_step, None if latest is None else latest.carried()
        if self._is_in_step and latest is not None:  # the loop was left, so the step does not count
            return self._latest_step, latest.carried()
        return self.step, StateReferences(self._things()).carried()
