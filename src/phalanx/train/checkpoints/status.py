"""What restoring a checkpoint did."""

from __future__ import annotations

from collections.abc import Iterable

from phalanx.errors import InvalidValueError
from phalanx.runtime.formatting import shown

__all__ = ["CheckpointStatus"]


class _NotRestoredError(InvalidValueError, AssertionError):
    """A checkpoint and the objects that it is for do not have the same variables."""


class CheckpointStatus:
    """What `Checkpoint.restore` did.

    Attributes:
        missing: names of values that the checkpoint does not have.
        unused: names in the checkpoint that no object has.
    """

    def __init__(
        self,
        path: str | None,
        missing: Iterable[str] = (),
        unused: Iterable[str] = (),
        restored: int = 0,
    ) -> None:
        self._path, self._restored = path, restored
        self.missing, self.unused = list(missing), list(unused)

    def assert_consumed(self) -> CheckpointStatus:
        """Check that everything in the checkpoint was used, and that every object was restored."""
        if self.unused:
            raise _NotRestoredError(
                f"The checkpoint has values that no object takes: {self.unused}. An optimizer takes "
                f"its own after `optimizer.build(variables)`. Received: {shown(self._path)}"
            )
        return self.assert_existing_objects_matched()

    def assert_existing_objects_matched(self) -> CheckpointStatus:
        """Check that every variable was restored."""
        if self.missing:
            raise _NotRestoredError(
                f"The checkpoint does not have all values; those of {self.missing} are missing. "
                f"Received: {shown(self._path)}"
            )
        return self

    def assert_nontrivial_match(self) -> CheckpointStatus:
        """Check that anything was restored at all."""
        if not self._restored:
            raise _NotRestoredError(
                "The checkpoint and the objects have no name in common; the checkpoint has "
                f"{self.unused}. Received: {shown(self._path)}"
            )
        return self

    def expect_partial(self) -> CheckpointStatus:
        """Say that the checkpoint may have more than the objects; nothing happens."""
        return self

    def run_restore_ops(self, session: None = None) -> None:
        """Nothing: values are restored at once."""

    def initialize_or_restore(self, session: None = None) -> None:
        """Nothing: values are restored at once, and variables have values when they are made."""
