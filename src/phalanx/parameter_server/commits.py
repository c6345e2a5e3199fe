"""Commits on their way: updates of a task, staged on several servers and then made, or made by one.

Updates that are staged and do not count yet can be read already, by the task that has staged them. So
they travel together with the reads of its next closure, and what makes them count with the next
updates: a closure takes one message to each server. What a closure has read must count before its own
updates do. A `Push` knows which others its closure has seen, and waits for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from phalanx.errors import PhalanxError
from phalanx.parameter_server import wire
from phalanx.parameter_server.placing import by_server, home_of
from phalanx.parameter_server.requests import Commit, Token, Update
from phalanx.parameter_server.server_link import ServerLink
from phalanx.parameter_server.store import Outcome
from phalanx.parameter_server.updates import APPLY, checked
from phalanx.parameter_server.wire import Kind

__all__ = ["Commits", "Push"]

_MOST_PENDING = 64  # requests to a server that wait for their answers before some are looked for


@dataclass(eq=False, slots=True)
class Push:
    """A commit on its way.

    Attributes:
        token: of the attempt.
        then: called with what has become of it.
        seen: other pushes whose updates its closure may have read before they counted.
        is_shown: whether servers show its updates, once they are staged, to this task.
        counts: whether its updates count, once that is known: one server that has made them is enough.
    """

    token: Token
    then: Callable[[Commit], None]
    seen: Sequence[Push]
    is_shown: bool = False
    counts: bool | None = None
    staged: list[int] = field(default_factory=list)
    staging: set[int] = field(default_factory=set)  # servers that have not answered in this phase
    committing: set[int] = field(default_factory=set)  # the same in the last phase
    is_refused: bool = False
    error: Exception | None = None
    _waiting: list[Callable[[], None]] = field(default_factory=list)

    def note(self, answer: Any) -> bool:
        """Take the answer of a server; returns whether it has done what it was asked for."""
        try:
            is_refused = wire.read_outcome(answer) is Outcome.REFUSED
        except PhalanxError as error:
            self.error, is_refused = error, True
        self.is_refused |= is_refused
        return not is_refused

    def know(self, counts: bool) -> None:
        """It is known whether its updates count."""
        if self.counts is None:
            self.counts = counts
            waiting, self._waiting = self._waiting, []
            for act in waiting:
                act()

    def when_seen_is_known(self, act: Callable[[], None]) -> None:
        """Call something when it is known whether all that its closure has read counts."""
        for other in self.seen:
            if other.counts is None:
                other._waiting.append(lambda: self.when_seen_is_known(act))
                return
        if any(not other.counts for other in self.seen):
            self.is_refused = True
        self.seen = ()
        act()


class Commits:
    """Makes the updates of a task on all servers concerned, or on none. For one thread.

    Args:
        links: to all servers.
        remembers: whether servers remember what they have made, so that it counts once.
        arbiter: whether several attempts of a closure may run at the same time.
    """

    def __init__(self, links: Sequence[ServerLink], remembers: bool, arbiter: bool) -> None:
        self._links, self._remembers, self._arbiter = links, remembers, arbiter
        self._staging: dict[Push, None] = {}  # those that have not been staged everywhere
        self._seen: list[Push] = []  # those that were read before it was known that they count

    def push(
        self,
        token: Token,
        updates: Sequence[Update],
        value: bytes,
        then: Callable[[Commit], None],
        hold: bool,
    ) -> None:
        """Make updates; see `ServerConnections.push_later`."""
        parts = by_server(map(checked, updates))
        push = Push(token, then, self._unknown())
        if not self._remembers:
            self._finish(
                push, {s: wire.push(Kind.APPLY, token, part) for s, part in parts.items()}, hold
            )
            return
        home = home_of(token, len(self._links), parts, self._arbiter and bool(parts))
        final = {} if home is None else {home: wire.push(Kind.PUSH, token, parts.get(home, []), value)}
        push.staged = [server for server in parts if server != home]
        if not push.staged:
            self._push_at_once(push, final, hold)
            return
        for server in push.staged:
            push.staging.add(server)
            final[server] = [wire.about(Kind.COMMIT, token)]
        push.is_shown = home is None and all(update.method != APPLY for update in updates)
        self._staging[push] = None
        hold = hold and push.is_shown  # else the next read waits for it, and it had better be done
        for server in push.staged:
            request = wire.push(Kind.STAGE, token, parts[server], value)
            self._links[server].ask(request, self._on_staged(push, server, home, final), hold=hold)
        self.look()

    def _push_at_once(self, push: Push, final: dict[int, list[Any]], hold: bool) -> None:
        """Make updates of one server, or report a closure that has none."""
        if final:  # what follows must see it, so it cannot wait in silence
            while any(other.counts is None for other in push.seen):
                self._wait_for(next(other for other in push.seen if other.counts is None))
        push.when_seen_is_known(lambda: self._finish(push, {} if push.is_refused else final, hold))

    # -- reading what is staged --------------------------------------------------------------------

    def shown(self) -> list[Push]:
        """The pushes that reads can see although they do not count yet; waits for all others."""
        if any(not push.is_shown for push in self._staging):
            self.finish_staging()
        return list(self._staging)

    def have_counted(self, shown: Sequence[Push]) -> bool:
        """Whether what was read after these pushes may be used; if not, it must be read again."""
        self.finish_staging()
        if any(push.is_refused for push in shown):
            return False
        self._seen = [*self._unknown(), *shown]
        return True

    @property
    def is_ahead(self) -> bool:
        """Whether something was read of which it is not known yet whether it counts."""
        return bool(self._unknown())

    def finish_staging(self) -> None:
        """Let all commits be on their way, so that what follows sees them."""
        while self._staging:
            self._wait_for(next(iter(self._staging)))

    def _unknown(self) -> list[Push]:
        if self._seen:
            self._seen = [push for push in self._seen if push.counts is None]
        return self._seen

    def _wait_for(self, push: Push) -> None:
        """Wait for an answer that brings a push on."""
        while not push.staging and not push.committing:
            push = next(other for other in push.seen if other.counts is None)
        self._links[next(iter(push.staging or push.committing))].answer()

    # -- phases ------------------------------------------------------------------------------------

    def _on_staged(
        self, push: Push, server: int, home: int | None, final: dict[int, list[Any]]
    ) -> Callable[[Any], None]:
        def then(answer: Any) -> None:
            push.note(answer)
            push.staging.discard(server)
            if not push.staging:
                push.when_seen_is_known(lambda: self._on_all_staged(push, home, final))

        return then

    def _on_all_staged(self, push: Push, home: int | None, final: dict[int, list[Any]]) -> None:
        if not push.is_refused and home is not None:
            self._decide(push, home, final)
            return
        self._staging.pop(push, None)
        if push.is_refused:
            self._drop(push)
        else:
            self._finish(push, final, hold=True)

    def _decide(self, push: Push, home: int, final: dict[int, list[Any]]) -> None:
        """Let the arbiter take or refuse the attempt; the other servers follow."""

        def then(answer: Any) -> None:
            push.note(answer)
            push.staging.discard(home)
            self._on_all_staged(push, None, final)

        push.staging.add(home)
        self._links[home].ask(final.pop(home), then)

    def _finish(self, push: Push, requests: dict[int, list[Any]], hold: bool) -> None:
        """Send what commits, now or with what comes next."""
        push.committing = set(requests)
        for server, request in requests.items():
            self._links[server].ask(request, self._on_committed(push, server), hold=hold)
        if not requests:
            self._end(push)
        self.look()

    def _on_committed(self, push: Push, server: int) -> Callable[[Any], None]:
        def then(answer: Any) -> None:
            push.committing.discard(server)
            if push.note(answer):
                push.know(True)
            if not push.committing:
                self._end(push)

        return then

    def _drop(self, push: Push) -> None:
        """An attempt is refused: nothing of it stays."""
        for server in push.staged:
            self._links[server].ask([wire.about(Kind.DROP, push.token)], lambda _: None)
        self._end(push)

    @staticmethod
    def _end(push: Push) -> None:
        push.know(not push.is_refused)
        push.then(Commit(not push.is_refused, push.error))

    def look(self) -> None:
        """Take answers, before too many of them wait."""
        for link in self._links:
            if len(link.pending) > _MOST_PENDING:
                while link.pending and link.poll():
                    pass
                while len(link.pending) > 4 * _MOST_PENDING:
                    link.answer()
                self.flush()

    def flush(self) -> None:
        """Send what is held."""
        for link in self._links:
            link.flush()
