"""What restoring a checkpoint did."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from phalanx.errors import InvalidValueError
from phalanx.runtime.formatting import shown
from phalanx.train.checkpoints.waiting import WaitingValues

__all__ = ["CheckpointStatus"]


class _NotRestoredError(InvalidValueError, AssertionError):
    """A checkpoint and the objects that it is for do not have the same variables."""


class CheckpointStatus:
    """What `Checkpoint.restore` did.

    Attributes:
        missing: names of values that the checkpoint does not have.
    """

    def __init__(
        self,
        path: str | None,
        missing: Iterable[str] = (),
        unused: Iterable[str] = (),
        restored: int = 0,
        waiting: Sequence[WaitingValues] = (),
    ) -> None:
        self._path, self._restored, self._waiting = path, restored, list(waiting)
        self.missing, self._unused = list(missing), list(unused)

    @property
    def unused(self) -> list[str]:
        """Names in the checkpoint that no object has, at this moment."""
        taken = {name for each in self._waiting if each.is_given for name in each.entries}
        return [name for name in self._unused if name not in taken]

    @property
    def lost(self) -> list[str]:
        """Names in the checkpoint that no object has, nor one that has made no variables yet."""
        waiting = {name for each in self._waiting for name in each.entries}
        return [name for name in self._unused if name not in waiting]

    def assert_consumed(self) -> CheckpointStatus:
        """Check that everything in the checkpoint was used, and that every object was restored."""
        self._check_there()
        if self.unused:
            raise _NotRestoredError(
                f"The checkpoint has values that no object takes: {self.unused}. An optimizer takes "
                "its own at its first step, or at `optimizer.build(variables)`; a Keras model when it "
                "is called. "
                f"Received: {shown(self._path)}"
            )
        return self.assert_existing_objects_matched()

    def assert_existing_objects_matched(self) -> CheckpointStatus:
        """Check that every variable was restored."""
        self._check_there()
        if self.missing:
            raise _NotRestoredError(
                f"The checkpoint does not have all values; those of {self.missing} are missing. "
                f"Received: {shown(self._path)}"
            )
        return self

    def assert_nontrivial_match(self) -> CheckpointStatus:
        """Check that anything was restored at all."""
        self._check_there()
        if not self._restored:
            raise _NotRestoredError(
                "The checkpoint and the objects have no name in common; the checkpoint has "
                f"{self.unused}. Received: {shown(self._path)}"
            )
        return self

    def _check_there(self) -> None:
        if self._path is None:
            raise _NotRestoredError(
                "There was no checkpoint to restore, so nothing has changed. Received: save_path=None"
            )

    def expect_partial(self) -> CheckpointStatus:
        """Say that the checkpoint may have more than the objects; nothing happens."""
        return self

    def run_restore_ops(self, session: None = None) -> None:
        """Nothing: values are restored at once."""

    def initialize_or_restore(self, session: None = None) -> None:
        """Nothing: values are restored at once, and variables have values when they are made."""
