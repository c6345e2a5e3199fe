"""Where the variables of a strategy are: its parameter servers, as this process reaches them.

Each strategy has servers of its own, so a program may use several. In a closure the servers are those
of the worker that runs it. Outside of closures, as in the program of the coordinator, each step is a
commit of its own.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from phalanx.core.variables.recorded_updates import Pending, TableRead
from phalanx.errors import AbortedError, ContextError
from phalanx.parameter_server.closure import current_closure, updates_of
from phalanx.parameter_server.own_tokens import TokenLine
from phalanx.parameter_server.requests import Read, Servers, Token, Update

__all__ = ["Freed", "ServersHome"]

_ATTEMPTS = 5  # to make an update of no closure


class Freed(NamedTuple):
    """What no code refers to any more, on one server.

    Args:
        variables: their ids.
        optimizers: their ids.
    """

    variables: Sequence[int]
    optimizers: Sequence[int] = ()


class ServersHome:
    """The parameter servers of a strategy.

    Args:
        run: names the run that the servers serve. Closures of other runs do not find the variables.
        connect: reaches the servers; called once, when they are first needed.
    """

    def __init__(self, run: str, connect: Callable[[], Servers]) -> None:
        self.run = run
        self._connect = connect
        self._servers: Servers | None = None
        self._turn = threading.RLock()  # `Servers` are for one thread at a time
        self._is_closed = False
        self._tokens = TokenLine()
        self._freed: dict[int, deque[Freed]] = {}  # by server
        self.when_freed: list[Callable[[int], None]] = []
        """Called with the id of each variable that servers do not hold any more."""

    def use(self, servers: Servers) -> None:
        """Use servers that were reached in another way."""
        self._servers = servers
        (self.run,) = servers.runs

    def servers(self) -> Servers:
        """The servers. Other threads may use them too: see `in_turn`."""
        with self._turn:
            if self._is_closed:
                raise ContextError(
                    "The strategy has been closed, so parameter servers do not hold its variables any "
                    "more. Make another strategy."
                )
            if self._servers is None:
                self._servers = self._connect()
                weakref.finalize(self, self._servers.close).atexit = False
            return self._servers

    @contextlib.contextmanager
    def in_turn(self) -> Iterator[Servers]:
        """The servers, while no other thread of this process talks to them."""
        running = current_closure()
        if running is not None:  # whose servers are those of its thread
            yield running.servers
            return
        with self._turn:
            yield self.servers()

    def close(self, without: Collection[int] = ()) -> None:
        """End the run: servers forget its variables, but for those that are known to be gone."""
        with self._turn:
            if self._is_closed:
                return
            servers, self._servers = self._servers, None
            self._is_closed = True
            self._freed.clear()
            if servers is not None:
                try:
                    servers.end(without)
                finally:
                    servers.close()

    # -- variables ---------------------------------------------------------------------------------

    def pending(self, variable: Any) -> Pending:
        """What the closure around this code has done to a variable; outside of closures, nothing."""
        running = current_closure()
        return Pending(variable) if running is None else running.pending(variable)

    def commit(self, changed: Mapping[Any, Pending]) -> None:
        """Record it in the closure around this code; outside of closures, push it."""
        running = current_closure()
        if running is not None:
            running.commit(changed)
            return
        updates = updates_of(changed)
        if updates:
            self._push_alone(updates)

    def pull(self, reads: Sequence[TableRead]) -> list[np.ndarray[Any, Any]]:
        """Read variables, or rows of them, in one round trip."""
        wanted: list[Read] = []
        parts = [table.row_reads(indices, wanted) for table, indices in reads]
        pulled: list[Any] = []
        running = current_closure()
        if running is not None:
            pulled = running.servers.pull(wanted) if wanted else []
        elif wanted:
            with self.in_turn() as servers:
                pulled = servers.pull(wanted)
        return [join(pulled) for join in parts]

    def preview(self, pending: Pending) -> np.ndarray[Any, Any]:
        """What a variable would hold after changes, which are not made."""
        updates = updates_of({pending.variable: pending})
        with self.in_turn() as servers:
            return servers.preview(updates)[0]

    def _push_alone(self, updates: Sequence[Update]) -> None:
        """Make updates that belong to no closure.

        Another task may have taken this one for lost, and settled the attempt. Then the servers say
        whether it counts; if it does not, it is made again.
        """
        with self.in_turn() as servers:
            closure = self._tokens.take().closure
            for attempt in range(_ATTEMPTS):
                token = Token(closure, attempt)
                if servers.push(token, updates).applied or servers.settle([token])[token].committed:
                    return
        raise AbortedError(
            f"The parameter servers have refused an update {_ATTEMPTS} times, because other tasks took "
            "this one for lost each time. "
            f"Received: updates of {sorted({u.variable.name for u in updates})}"
        )

    # -- freeing -----------------------------------------------------------------------------------

    def free(self, server: int, freed: Freed) -> None:
        """Let a server free variables, soon.

        The garbage collector calls it, in any thread and at any moment, so it only makes a note.
        """
        self._freed.setdefault(server, deque()).append(freed)

    def take_freed(self, server: int) -> Freed | None:
        """What a server is to free; who takes it calls `was_freed`, or `free` if that fails."""
        notes = self._freed.get(server)
        taken: list[Freed] = []
        while notes:
            taken.append(notes.popleft())
        if not taken:
            return None
        variables = [v for freed in taken for v in freed.variables]
        return Freed(variables, [o for freed in taken for o in freed.optimizers])

    def was_freed(self, freed: Freed) -> None:
        """A server has freed variables: tell those who have their last values."""
        servers = self._servers
        for variable in freed.variables:
            if servers is not None:
                servers.drop_known(variable)
            for tell in list(self.when_freed):
                tell(variable)

    def let_go(self, server: int) -> None:
        """Let a server free what was noted, before it is asked to hold more."""
        if self._freed.get(server):
            with self.in_turn() as servers:
                freed = self.take_freed(server)
                if freed is not None:
                    servers.free(server, freed.variables, freed.optimizers)
                    self.was_freed(freed)
