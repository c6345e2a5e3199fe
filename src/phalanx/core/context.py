"""Which strategy is current, and whether code runs on a replica or sees them all.

Each thread has a stack of modes. Outside of everything the default strategy's replica context is
current. `Strategy.scope` and merge functions push a cross-replica mode, `Strategy.run` pushes a replica
mode. New threads start with an empty stack.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from phalanx.errors import ContextError, InvalidTypeError, StrategyMismatchError
from phalanx.runtime import late_imports
from phalanx.runtime.formatting import shown

if TYPE_CHECKING:
    from phalanx.core.replica_context import ReplicaContext
    from phalanx.core.strategy import Strategy


@dataclass(frozen=True, eq=False)
class Mode:
    """One entry of a thread's stack.

    `replica_context` is None in cross-replica context. `update_index` is set while
    `StrategyExtended.update` works on one copy of a variable.
    """

    strategy: Strategy
    replica_context: ReplicaContext | None = None
    update_index: int | None = None


class _ThreadState(threading.local):
    def __init__(self) -> None:
        self.stack: list[Mode] = []
        self.set_scope: Scope | None = None
        self.colocate_with: list[Any] = []


_thread = _ThreadState()
_default: list[Mode] = []
_default_lock = threading.Lock()


def default_mode() -> Mode:
    """The mode outside of every scope; one object for the whole process."""
    if not _default:
        with _default_lock:
            if not _default:
                _default.append(_make_default())
    return _default[0]


def _make_default() -> Mode:
    # The one import that points upwards: the first who needs the default strategy loads it.
    made: Mode = importlib.import_module("phalanx.strategies.default").default_mode()
    return made


def current_mode() -> Mode:
    """The mode on top of this thread's stack."""
    stack = _thread.stack
    if stack:
        return stack[-1]
    return _default[0] if _default else default_mode()


def active_replica() -> ReplicaContext | None:
    """The replica that this thread runs for inside `Strategy.run`; None everywhere else."""
    stack = _thread.stack
    if not stack:
        return None
    mode = stack[-1]
    return None if mode is default_mode() else mode.replica_context


class push:  # noqa: N801 - reads as a statement
    """Make `mode` current in this thread for the duration of a ``with`` block.

    Leaving it goes back to the depth from before, also over what an interrupt may have left there.
    """

    __slots__ = ("_depth", "_mode")

    def __init__(self, mode: Mode) -> None:
        self._mode = mode

    def __enter__(self) -> None:
        stack = _thread.stack
        self._depth = len(stack)
        stack.append(self._mode)

    def __exit__(self, *error: object) -> None:
        del _thread.stack[self._depth :]


def depth() -> int:
    """How many modes this thread's stack has."""
    return len(_thread.stack)


def back_to(depth: int) -> None:
    """Take from this thread's stack what was put there since it had a depth."""
    del _thread.stack[depth:]


# -- the public questions -----------------------------------------------------------------------


def get_strategy() -> Strategy:
    """The current strategy of this thread; the default strategy if no scope is active.

    Examples:
        >>> import phalanx as px
        >>> strategy = px.MirroredStrategy(["CPU:0", "CPU:1"])
        >>> with strategy.scope():
        ...     px.get_strategy() is strategy
        True
    """
    return current_mode().strategy


def has_strategy() -> bool:
    """Whether a strategy other than the default one is current.

    Examples:
        >>> import phalanx as px
        >>> px.has_strategy()
        False
    """
    return get_strategy() is not default_mode().strategy


def get_replica_context() -> ReplicaContext | None:
    """The replica context: an object inside `Strategy.run` and outside of scopes, None in a scope.

    Examples:
        >>> import phalanx as px
        >>> strategy = px.MirroredStrategy(["CPU:0", "CPU:1"])
        >>> with strategy.scope():
        ...     print(px.get_replica_context())
        None
        >>> def replica_id():
        ...     return px.get_replica_context().replica_id_in_sync_group
        >>> print(strategy.run(replica_id))
        PerReplica:{
          0: Array(0, shape=(), dtype=int32),
          1: Array(1, shape=(), dtype=int32)
        }
    """
    return current_mode().replica_context


def in_cross_replica_context() -> bool:
    """Whether the code sees all replicas at once: in a scope, a merge function or an update.

    Examples:
        >>> import phalanx as px
        >>> px.in_cross_replica_context()
        False
    """
    return current_mode().replica_context is None


def experimental_set_strategy(strategy: Strategy | None) -> None:
    """Make a strategy current without a ``with`` block; None goes back to the default one.

    Replaces a strategy that was set this way before. Not allowed inside ``with strategy.scope()``.

    Examples:
        >>> import phalanx as px
        >>> px.experimental_set_strategy(px.OneDeviceStrategy("CPU:0"))
        >>> px.has_strategy()
        True
        >>> px.experimental_set_strategy(None)
    """
    if strategy is not None and not hasattr(strategy, "scope"):
        raise InvalidTypeError(f"A px.Strategy or None is needed. Received: {shown(strategy)}")
    old = _thread.set_scope
    if len(_thread.stack) > (0 if old is None else 1):
        raise ContextError(
            "experimental_set_strategy must not be called inside a strategy's scope or run. Leave "
            f"the scope first. Received: {shown(strategy)} while {shown(get_strategy())} is active"
        )
    if old is not None:
        old.__exit__(None, None, None)
        _thread.set_scope = None
    if strategy is not None:
        scope = strategy.scope()
        scope.__enter__()
        _thread.set_scope = scope


# -- scopes -------------------------------------------------------------------------------------


class Scope:
    """What `Strategy.scope` returns: a re-entrant context manager that yields the strategy."""

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self._entered: list[Mode] = []

    def __enter__(self) -> Strategy:
        require_cross_replica_or_default(self._strategy, "Strategy.scope")
        late_imports.notice()
        mode = Mode(self._strategy)
        _thread.stack.append(mode)
        self._entered.append(mode)
        return self._strategy

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if not self._entered or not _thread.stack or _thread.stack[-1] is not self._entered[-1]:
            if error is not None:
                return
            raise ContextError(
                "Scopes must be left in the reverse order of entering them, in the same thread. "
                f"Received: the end of the scope of {shown(self._strategy)} while "
                f"{get_strategy()!r} is current"
            )
        self._entered.pop()
        _thread.stack.pop()


@contextmanager
def colocation(variable: Any) -> Iterator[None]:
    """New variables of this thread are placed like `variable`."""
    _thread.colocate_with.append(variable)
    try:
        yield
    finally:
        _thread.colocate_with.pop()


def colocated_with() -> Any | None:
    """The variable that new variables should be placed with, if any."""
    return _thread.colocate_with[-1] if _thread.colocate_with else None


# -- checks -------------------------------------------------------------------------------------


def require_cross_replica_or_default(strategy: Strategy, what: str) -> None:
    """Allow only the strategy's own cross-replica context, or code outside of every scope."""
    mode = current_mode()
    if mode is default_mode():
        return
    if mode.strategy is strategy and mode.replica_context is None:
        return
    require_same_strategy(strategy, what)
    raise ContextError(
        f"{what} needs the cross-replica context, but this code runs on a replica. Call it outside "
        "of Strategy.run, or from a function given to px.get_replica_context().merge_call()."
    )


def require_same_strategy(strategy: Strategy, what: str) -> None:
    """Allow any context of `strategy`, and code outside of every scope."""
    mode = current_mode()
    if mode is default_mode() or mode.strategy is strategy:
        return
    raise StrategyMismatchError(
        f"{what} belongs to {strategy!r} but was used while another strategy is current. Mixing "
        "different strategies in one scope is not possible; leave the other scope first. "
        f"Received: current strategy {shown(mode.strategy)}"
    )


def require_replica_context(context: ReplicaContext, what: str) -> None:
    """Allow only code that runs on exactly this replica."""
    mode = current_mode()
    if mode.replica_context is context:
        return
    if mode.replica_context is None:
        raise ContextError(
            f"{what} needs the replica context, but this code sees all replicas at once. Call it in "
            "the function that is given to Strategy.run."
        )
    if mode.strategy is not context.strategy:
        raise StrategyMismatchError(
            f"{what} was called on a replica context of {context.strategy!r}, which is no longer "
            f"active. Received: current strategy {shown(mode.strategy)}"
        )
    raise ContextError(
        f"{what} was called on the context of another replica or of an earlier run. Ask "
        "px.get_replica_context() for the current one each time."
    )


@contextmanager
def entered(strategy: Strategy, what: str) -> Iterator[None]:
    """Enter the strategy's cross-replica context if no scope is active; refuse foreign ones."""
    require_same_strategy(strategy, what)
    mode = current_mode()
    if mode is default_mode() and strategy is not mode.strategy:
        with push(Mode(strategy)):
            yield
    else:
        yield
