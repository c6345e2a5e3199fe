"""Saves that a training depends on: one that fails is not the last word."""

from __future__ import annotations

import logging
from collections.abc import Callable

from phalanx.errors import PhalanxError
from phalanx.job.bootstrap import JobConnection
from phalanx.train.checkpoints.manager import CheckpointManager

__all__ = ["save_surely", "settle"]

_log = logging.getLogger("phalanx")


def settle(manager: CheckpointManager, connection: JobConnection | None) -> None:
    """Wait for a checkpoint that is under way. If it fails, the training goes on: it has the state.

    A full disk, say. It was logged; the next checkpoint may succeed.

    Args:
        manager: saves the checkpoints.
        connection: to the other workers; if one of them was lost, that is raised.
    """
    try:
        manager.sync()
    except Exception as error:  # noqa: BLE001 - also of a callback of the program
        _check(connection)
        _log.warning("The training goes on without a checkpoint that was not saved: %s", error)


def save_surely(
    manager: CheckpointManager, connection: JobConnection | None, save: Callable[[], object]
) -> None:
    """Save a checkpoint that is needed, after the one that is under way, and wait for it.

    What fails is tried once more before it is an error.

    Args:
        manager: saves the checkpoints.
        connection: as for `settle`.
        save: saves by the manager.
    """
    settle(manager, connection)
    before = manager.latest_checkpoint
    try:
        save()
        manager.sync()
    except (OSError, PhalanxError) as error:
        _check(connection)
        if manager.latest_checkpoint != before:  # it is there; a callback has failed, on this worker
            raise
        _log.warning("A checkpoint was not saved, and is saved again: %s", error)
        save()
        manager.sync()


def _check(connection: JobConnection | None) -> None:
    if connection is not None:
        connection.member.check()
