"""What a parameter server holds: variables, and which closures have changed them. No sockets, no files.

A closure's updates count once. A server **pushes** the updates of a closure that concerns no other
server: it applies them at once and remembers the closure. Of a closure that concerns several servers,
each **stages** its part, and **commits** it when all have staged theirs. When a worker is lost, the
coordinator **inquires** after its attempts; that fences them off: from then on only the coordinator
decides about them. What is applied anywhere is applied everywhere, else it is dropped everywhere.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from functools import partial
from typing import Any

import numpy as np

from phalanx.errors import InvalidArgumentError, NotFoundError
from phalanx.parameter_server.buffers import BufferPool, is_shared
from phalanx.parameter_server.own_tokens import OwnTokens
from phalanx.parameter_server.previews import Ready, read_rows, rows_after, value_after
from phalanx.parameter_server.requests import OptimizerDefinition, Token, Update, VariableDefinition
from phalanx.parameter_server.server_optimizer import ServerOptimizer, Slots
from phalanx.parameter_server.updates import APPLY, apply_update, are_rows, checked, has_dtype
from phalanx.runtime.formatting import shown

__all__ = ["Outcome", "Store", "Trace"]

Array = np.ndarray[Any, Any]

_FEW = 256  # closures
_MOST_FENCED = 4096  # updates of no closure that are refused and remembered
_MOST_FREED = 4096  # variables that were freed and are remembered
_NOTHING: tuple[Sequence[Update], bytes] = ((), b"")


class Outcome(IntEnum):
    """What a server does with a request."""

    DONE = 0
    REPEATED = 1  # it was done before
    REFUSED = 2  # it must not be done: the attempt is fenced off, or another one counts
    DOUBTFUL = 3  # it cannot be read before attempts are settled whose task may be dead


class Trace(Enum):
    """What a server knows of an attempt."""

    NONE = 0
    STAGED = 1
    APPLIED = 2


@dataclass(eq=False)
class Held:
    """A variable, and what belongs to it.

    Attributes:
        definition: what the variable is.
        value: its value.
        version: another one for each value.
        slots: what optimizers keep beside it, by their ids.
    """

    definition: VariableDefinition
    value: Array
    version: int
    slots: dict[int, Slots] = field(default_factory=dict)
    _lent: list[Array] = field(default_factory=list)  # the bytes of the value, once they were lent

    def lend(self) -> memoryview:
        """The bytes of the value. They stay as they are as long as anything refers to them."""
        if not self._lent:
            self._lent = [bytes_of(self.value)]
        return self._lent[0].data

    def room(self, pool: BufferPool) -> Array:
        """Where the next value can be written: here, or elsewhere if this one is still being sent."""
        if self.value.flags.writeable and not (self._lent and is_shared(self._lent)):
            return self.value
        return pool.array(self.value.shape, self.value.dtype)

    def put(self, value: Array, version: int, lent: Sequence[Array] = ()) -> None:
        """Replace the value, by one whose bytes may have been lent before."""
        if value is not self.value:
            self.value, self._lent = value, list(lent)
        self.version = version


@dataclass(eq=False)
class Store:
    """What one server holds, and the rules for changing it. For one thread.

    Args:
        pool: memory for large values.
        version: from which versions count up. A server that restarts begins elsewhere, so that no task
            takes a new value for one that it has.
    """

    pool: BufferPool = field(default_factory=BufferPool)
    version: int = 0

    def __post_init__(self) -> None:
        self.variables: dict[int, Held] = {}
        self.optimizers: dict[int, ServerOptimizer] = {}
        self.applied: dict[int, int] = {}  # closure -> the attempt that counts
        self.values: dict[int, bytes] = {}  # closure -> what it returned
        self.own = OwnTokens()  # the same as `applied`, for updates of no closure
        self.staged: dict[Token, tuple[Sequence[Update], bytes]] = {}
        self._ready: dict[Token, dict[int, Ready]] = {}  # what was computed already of what is staged
        self.fences: dict[int, set[int]] = {}  # closure -> attempts that are refused
        self.doubtful: Collection[Token] = ()  # attempts of no closure whose task may be dead
        self.freed: dict[int, None] = {}  # variables that were freed; a late message holds none of them
        self.settled = 0  # closures with smaller numbers are done
        self._cleaned = 0  # and those with smaller ones than this are forgotten
        self.counts = {"pulls": 0, "commits": 0, "updates": 0, "duplicates": 0, "refused": 0}

    # -- variables ---------------------------------------------------------------------------------

    def create(self, definition: VariableDefinition, value: Array) -> bool:
        """Hold a variable; returns whether it is new. The value belongs to the store from now on."""
        if definition.id in self.freed or self.find(definition):
            return False
        dtype = has_dtype(definition)
        if value.shape != definition.shape or value.dtype != dtype:
            raise InvalidArgumentError(
                f"The initial value does not fit its variable {shown(definition.name)}, of shape "
                f"{list(definition.shape)} and dtype {definition.dtype}. "
                f"Received: shape {list(value.shape)}, dtype {value.dtype}"
            )
        self.variables[definition.id] = Held(definition, value, self._next_version())
        return True

    def find(self, definition: VariableDefinition) -> bool:
        """Whether a variable is held."""
        known = self.variables.get(definition.id)
        if known is None:
            return False
        if (known.definition.shape, known.definition.dtype) != (definition.shape, definition.dtype):
            raise InvalidArgumentError(
                "The server holds another variable with this id, of shape "
                f"{list(known.definition.shape)} and dtype {known.definition.dtype}. "
                f"Received: {shown(definition)}"
            )
        return True

    def free(self, variables: Sequence[int], optimizers: Sequence[int] = ()) -> Outcome:
        """Hold variables no more, and forget optimizers.

        No task uses them. What an attempt has staged that will be dropped may still refer to them.
        """
        known = [v for v in variables if v not in self.freed]
        if not known and not any(o in self.optimizers for o in optimizers):
            return Outcome.REPEATED
        for variable in known:
            self.variables.pop(variable, None)
            self.freed[variable] = None
        while len(self.freed) > _MOST_FREED:
            del self.freed[next(iter(self.freed))]
        for optimizer in optimizers:
            self.optimizers.pop(optimizer, None)
            for held in self.variables.values():
                held.slots.pop(optimizer, None)
        for token, (updates, value) in self.staged.items():
            self.staged[token] = [u for u in updates if self._is_possible(u)], value
        return Outcome.DONE

    def _is_possible(self, update: Update) -> bool:
        is_known = update.method != APPLY or update.optimizer in self.optimizers
        return is_known and update.variable.id in self.variables

    def define_optimizer(self, definition: OptimizerDefinition) -> bool:
        """Know an optimizer, or another learning rate; returns whether something is new."""
        if definition.id in self.optimizers:
            return self.optimizers[definition.id].set_rate(definition)
        self.optimizers[definition.id] = ServerOptimizer(definition)
        return True

    def held(self, variable: int) -> Held:
        """A variable by its id."""
        found = self.variables.get(variable)
        if found is None:
            raise NotFoundError(
                "The server does not hold this variable: it was not created, was freed because the "
                "coordinator's program does not refer to it any more, or belongs to another run. "
                f"Received: the variable with the id {variable}"
            )
        return found

    def rows(self, variable: int, indices: Array) -> Array:
        """Some rows of a variable, copied."""
        value = self._with_rows(variable, indices)
        rows = self.pool.array((len(indices), *value.shape[1:]), value.dtype)
        if len(indices):
            np.take(value, indices, axis=0, out=rows, mode="clip")
        return rows

    def _with_rows(self, variable: int, indices: Array) -> Array:
        """The value of a variable that has these rows."""
        held = self.held(variable)
        value = held.value
        count = len(value) if value.ndim else 0
        if indices.ndim != 1 or not are_rows(indices, count):
            raise InvalidArgumentError(
                f"Variable {shown(held.definition.name)} has rows from 0 to {count - 1}. "
                f"Received: {shown(indices)}"
            )
        return value

    def staged_by(self, tokens: Sequence[Token]) -> dict[int, list[tuple[Token, Update]]]:
        """What attempts have staged, for each variable. What counts by now is not among it."""
        found: dict[int, list[tuple[Token, Update]]] = {}
        for token in tokens:
            for update in self.staged.get(token, _NOTHING)[0]:
                found.setdefault(update.variable.id, []).append((token, update))
        return found

    def doubts(self, variables: Collection[int], own: Sequence[Token]) -> list[Token]:
        """The attempts in doubt that change any of these variables, but for those of the reader.

        Another server may have made such an attempt already, so what is held here may be half of it.
        """
        return [
            token
            for token in self.doubtful
            if token not in own
            and any(u.variable.id in variables for u in self.staged.get(token, _NOTHING)[0])
        ]

    def after(self, staged: Sequence[tuple[Token, Update]], variable: int, rows: Array | None) -> Any:
        """The bytes of a variable, or of some of its rows, as staged updates of it will leave it."""
        held, updates = self.held(variable), [update for _, update in staged]
        if any(update.method == APPLY for update in updates):
            [value] = self.preview(updates)
            return bytes_of(value if rows is None else value[rows])
        if rows is not None:
            changed = rows_after(held.value, updates)
            if changed is not None:
                places, new = changed
                self._get_ready(staged, variable, Ready(held.version, new, places))
                return view_of(read_rows(rows, places, new, partial(self._with_rows, variable)))
            self._with_rows(variable, rows)
        new = value_after(held.value, updates, self.pool)
        if rows is not None:
            return bytes_of(new[rows])
        lent = [bytes_of(new)]
        self._get_ready(staged, variable, Ready(held.version, new, None, lent))
        return lent[0].data

    def _get_ready(self, staged: Sequence[tuple[Token, Update]], variable: int, ready: Ready) -> None:
        """Remember what an attempt will make of a variable, unless it is not the only one."""
        token = staged[0][0]
        if staged[-1][0] == token:
            self._ready.setdefault(token, {})[variable] = ready

    # -- commits -----------------------------------------------------------------------------------

    def apply(self, updates: Sequence[Update]) -> None:
        """Make updates, and remember nothing of whose they were."""
        self._apply(self.checked(updates))
        self.counts["updates"] += len(updates)

    def preview(self, updates: Sequence[Update]) -> list[Array]:
        """What variables would hold after updates, each once, in the order of their first updates."""
        updates = self.checked(updates)
        copies: dict[int, Held] = {}
        for update in updates:
            held = self.held(update.variable.id)
            if update.variable.id not in copies:
                slots = {k: x.copied() for k, x in held.slots.items()}
                copies[update.variable.id] = Held(held.definition, held.value.copy(), 0, slots)
        scratch = Store(self.pool)
        scratch.variables, scratch.optimizers = copies, self.optimizers
        scratch._apply(updates)
        return [held.value for held in copies.values()]

    def push(self, token: Token, updates: Sequence[Update], value: bytes = b"") -> Outcome:
        """Make all updates of a closure that concerns only this server, or whose arbiter this is."""
        outcome = self._may(token)
        if outcome is None:
            updates = self.checked(updates)
            self.staged.pop(token, None)
            self._take(token, updates, value)
            return Outcome.DONE
        return self._counted(outcome)

    def stage(self, token: Token, updates: Sequence[Update], value: bytes = b"") -> Outcome:
        """Keep a part of a closure's updates until its commit."""
        outcome = self._may(token)
        if outcome is not None:
            return self._counted(outcome)
        if token in self.staged:
            return self._counted(Outcome.REPEATED)
        self.staged[token] = (self.checked(updates), value)
        return Outcome.DONE

    def commit(self, token: Token) -> Outcome:
        """Make the updates that were staged."""
        outcome = self._may(token)
        if outcome is None and token not in self.staged:
            outcome = Outcome.REFUSED
        if outcome is not None:
            return self._counted(outcome)
        self._take(token, *self.staged.pop(token))
        return Outcome.DONE

    def drop(self, token: Token) -> Outcome:
        """Forget what was staged."""
        self._ready.pop(token, None)
        return Outcome.REPEATED if self.staged.pop(token, None) is None else Outcome.DONE

    def inquire(self, token: Token) -> tuple[Trace, bytes]:
        """What is known of an attempt; from now on it is fenced off. Also what the closure returned."""
        self.fences.setdefault(token.closure, set()).add(token.attempt)
        if token.closure < 0:
            self._forget_fences()
        if self._attempt(token.closure) == token.attempt:
            return Trace.APPLIED, self.values.get(token.closure, b"")
        return (Trace.STAGED if token in self.staged else Trace.NONE), b""

    def _forget_fences(self) -> None:
        """Forget the oldest attempts of no closure that were fenced off, if there are many."""
        own = [closure for closure in self.fences if closure < 0]
        for closure in own[:-_MOST_FENCED]:
            del self.fences[closure]

    def decide(self, token: Token, is_commit: bool) -> Outcome:
        """Make, or forget, what an attempt has staged: the coordinator has decided."""
        if not is_commit:
            return self.drop(token)
        if token not in self.staged or token.closure in self.applied:
            return Outcome.REPEATED
        self._take(token, *self.staged.pop(token))
        return Outcome.DONE

    def forget(self, below: int) -> Outcome:
        """Closures with smaller numbers are done; their late messages are refused."""
        if below <= self.settled:
            return Outcome.REPEATED
        self.settled = below
        if below - self._cleaned < _FEW and len(self.applied) > _FEW:
            return Outcome.DONE  # looking through all of them each time would cost too much
        self._cleaned = below
        for known in (self.applied, self.values, self.fences):
            for closure in [c for c in known if 0 <= c < below]:
                del known[closure]
        for token in [t for t in self.staged if 0 <= t.closure < below]:
            self.drop(token)
        return Outcome.DONE

    def checked(self, updates: Sequence[Update]) -> list[Update]:
        """Updates that can be made without an error, whenever that will be."""
        return [self._checked(update) for update in updates]

    def _checked(self, update: Update) -> Update:
        self.held(update.variable.id)
        if update.method == APPLY:
            optimizer = self.optimizers.get(update.optimizer)
            if optimizer is None:
                raise NotFoundError(
                    f"The server does not know this optimizer. Received: the id {update.optimizer}"
                )
        return checked(update)

    def _attempt(self, closure: int) -> int | None:
        return self.applied.get(closure) if closure >= 0 else self.own.attempt(closure)

    def _may(self, token: Token) -> Outcome | None:
        """What to answer to an attempt without doing anything; None if it is to be done."""
        closure, attempt = token
        known = self._attempt(closure)
        if known is not None:
            return Outcome.REPEATED if known == attempt else Outcome.REFUSED
        if 0 <= closure < self.settled or attempt in self.fences.get(closure, ()):
            return Outcome.REFUSED
        if closure < 0 and self.own.is_over(closure):
            return Outcome.REFUSED
        return None

    def _counted(self, outcome: Outcome) -> Outcome:
        self.counts["duplicates" if outcome is Outcome.REPEATED else "refused"] += 1
        return outcome

    def _take(self, token: Token, updates: Sequence[Update], value: bytes) -> None:
        if token.closure >= 0:
            self.applied[token.closure] = token.attempt
            if value:
                self.values[token.closure] = value
        else:
            self.own.note(token)
        self.counts["updates"] += len(updates)
        ready = self._ready.pop(token, None)
        self._apply(updates if ready is None else self._put_ready(ready, updates))
        self.counts["commits"] += 1

    def _put_ready(self, ready: Mapping[int, Ready], updates: Sequence[Update]) -> list[Update]:
        """Put what is ready, where nothing has changed since; returns the updates that are left."""
        done = set()
        for variable, (version, value, places, lent) in ready.items():
            held = self.variables[variable]
            if held.version != version:
                continue
            done.add(variable)
            if places is None:
                held.put(value, self._next_version(), lent)
                continue
            new = held.room(self.pool)
            if new is not held.value:
                np.copyto(new, held.value)
            new[places] = value
            held.put(new, self._next_version())
        return [update for update in updates if update.variable.id not in done]

    def _apply(self, updates: Sequence[Update]) -> None:
        last = len(updates) - 1
        for i, (definition, method, values, indices, optimizer) in enumerate(updates):
            held = self.variables[definition.id]
            if method == APPLY:
                new = self.optimizers[optimizer].apply(
                    held.value, held.slots, values, indices, partial(held.room, self.pool)
                )
            elif method == "assign" and i == last and _is_whole(values, definition):
                new = values  # memory that was received, and that nothing else looks at after this
            else:
                new = held.room(self.pool)
                apply_update(method, held.value, new, values, indices)
            held.put(new, self._next_version())

    def _next_version(self) -> int:
        self.version += 1
        return self.version

    # -- for people --------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """What is held, and what has been done."""
        held = self.variables.values()
        return {
            **self.counts,
            "variables": len(held),
            "bytes": sum(h.value.nbytes + sum(s.nbytes for s in h.slots.values()) for h in held),
            "staged": len(self.staged),
            "remembered": len(self.applied),
        }


def bytes_of(array: Array) -> Array:
    """The bytes of an array, not copied; also of dtypes that Python has no letters for."""
    return array.reshape(-1).view(np.uint8)


def view_of(array: Array) -> Any:
    """The same as `bytes_of`, in a fraction of its time if Python can look at the array."""
    try:
        return array.data.cast("B")
    except (ValueError, TypeError):  # a dtype of its own, or an array without elements
        return bytes_of(array)


def _is_whole(values: Array, definition: VariableDefinition) -> bool:
    return values.shape == definition.shape and values.flags.writeable
