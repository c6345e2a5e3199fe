"""What the hub knows of a job, as a pure state machine: events in, messages out.

A *peer* is a connection, named by a number. It becomes a member by joining as one of the expected
tasks, or stays an observer, which may only ask. Every event returns what must be sent to whom. There
are no sockets, threads or clocks in here: the time is an argument.

A job has one failure, the first. Every member that is there is told once, and every member that comes
later is told when it comes. What goes wrong afterwards is mostly an echo of the first failure, so it is
only written down.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from phalanx.cluster.hub import fields, joining, waits
from phalanx.cluster.hub.agreement import MOST_CODES, Agreement
from phalanx.cluster.hub.facts import Failure, Task, describe_exit, shorten
from phalanx.cluster.hub.progress import Progress, Seat, describe_place
from phalanx.cluster.hub.questions import STACK_PATIENCE, Out, Questions, StackRequest, heard
from phalanx.cluster.hub.waits import Want
from phalanx.core.errors import InvalidValueError

__all__ = ["STACK_PATIENCE", "Board", "Out"]

_LONG_INPUT = 1.0  # seconds after which a wait for input is worth a word
_MOST_LATER = 64  # failures after the first that are written down


@dataclass
class _Exchange:
    """What members have brought to an exchange, and when."""

    since: float
    posts: dict[int, Any] = field(default_factory=dict)
    times: dict[int, float] = field(default_factory=dict)


class Board:
    """The state of one job. `expected` are its tasks, in the order of their ranks.

    >>> board = Board([Task("worker", 0), Task("worker", 1)])
    >>> _ = board.handle(7, {"type": "join", "task_type": "worker", "task_id": 0}, now=0.0)
    >>> out = board.handle(8, {"type": "join", "task_type": "worker", "task_id": 1}, now=1.0)
    >>> [peer for peer, message in out if message["type"] == "ready"]
    [7, 8, None]
    """

    def __init__(self, expected: Sequence[Task], *, has_service: bool = False) -> None:
        if len(set(expected)) < len(expected) or not expected:
            raise InvalidValueError(
                f"A job needs at least one task, and each of them once. Received: {list(expected)}"
            )
        self._seats = [Seat(task, rank) for rank, task in enumerate(expected)]
        self._by_task = {(s.task.type, s.task.id): s for s in self._seats}
        self._by_peer: dict[int, Seat] = {}
        self._has_service = has_service
        self._failure: Failure | None = None
        self._later: list[Failure] = []
        self._exchanges: dict[str, _Exchange] = {}
        self._agreement = Agreement(self._seats)
        self._progress = Progress()
        self._questions = Questions(self._seats)
        self._shown_at = -1e9  # when a member last showed the table

    # -- what is known ---------------------------------------------------------------------------

    @property
    def failure(self) -> Failure | None:
        """Why the job cannot go on, or None."""
        return self._failure

    @property
    def later_failures(self) -> list[Failure]:
        """What else went wrong after the failure; mostly its consequences."""
        return list(self._later)

    @property
    def is_ready(self) -> bool:
        """Whether all tasks have joined, however many have gone since."""
        return all(seat.info for seat in self._seats)

    @property
    def is_over(self) -> bool:
        """Whether nobody is left who could still come or go on."""
        return all(seat.is_gone for seat in self._seats)

    def present(self) -> list[Task]:
        """The tasks that have joined and are still there."""
        return [seat.task for seat in self._joined()]

    def missing(self) -> list[Task]:
        """The tasks that have not joined yet."""
        return [seat.task for seat in self._seats if seat.state == "absent"]

    def task_of(self, peer: int) -> Task | None:
        """The task whose loss the end of a connection would be, if any."""
        seat = self._by_peer.get(peer)
        return seat.task if seat is not None and seat.state == "joined" else None

    def rows(self, now: float) -> list[dict[str, Any]]:
        """The table of workers: one row per task, in the order of ranks."""
        wants = self._wants(now)
        return [
            {
                **self._progress.row(seat, self._awaited(seat, now), now),
                "waits": [w.describe(self._names()) for w in wants if w.rank == seat.rank],
            }
            for seat in self._seats
        ]

    def _names(self) -> list[str]:
        return [str(seat.task) for seat in self._seats]

    def _wants(self, now: float) -> list[Want]:
        """Who waits for whom."""
        wants = waits.step_wants(self._seats)
        for seat in self._joined():
            wants += seat.waits
        for name, exchange in self._exchanges.items():
            missing = [s.rank for s in self._joined() if s.rank not in exchange.posts]
            for rank, posted in exchange.times.items():
                seat = self._seats[rank]
                if missing and seat.state == "joined" and seat.status.get("phase") in ("wait", "input"):
                    since = max(posted, seat.reported - seat.status.get("seconds", 0.0))
                    what, site = f"the exchange {name!r}", seat.status.get("site", "")
                    wants.append(Want(rank, tuple(missing), since, seat.reported, what, site))
        return wants

    def _awaited(self, seat: Seat, now: float) -> list[float]:
        """Since when others have waited for this task, other than in programs of the strategy."""
        since = [e.since for e in self._exchanges.values() if seat.rank not in e.posts]
        since += [w.since for s in self._joined() for w in s.waits if seat.rank in w.ranks]
        if self._all_read_input() and all(seat.rank not in e.posts for e in self._exchanges.values()):
            begun = seat.reported - seat.status.get("seconds", 0.0)
            since += [begun] if now - begun >= _LONG_INPUT else []
        return since

    def _all_read_input(self) -> bool:
        """Whether every task waits for its input, so that nobody is left to wait for them."""
        return all(
            seat.state == "joined" and seat.status.get("phase") == "input" for seat in self._seats
        )

    def _behind(self, seat: Seat, now: float) -> float:
        return self._progress.behind(seat, self._awaited(seat, now), now)

    # -- events ----------------------------------------------------------------------------------

    def handle(self, peer: int, message: Mapping[str, Any], now: float) -> list[Out]:
        """A message from a peer. What cannot be understood is an `InvalidValueError`; drop the peer."""
        kind = message.get("type")
        seat = self._by_peer.get(peer)
        if seat is not None:
            seat.heard = now
        try:
            if kind == "join":
                return self._join(peer, message, now)
            if kind == "table":
                return self._table(peer, message, now)
            if kind == "stacks":
                return self._ask_stacks(peer, message, now)
            if seat is None or seat.is_gone:
                return [(peer, heard(message))] if kind == "leave" else []
            handlers = {
                "status": self._status,
                "post": self._post,
                "sign": self._sign,
                "ran": self._ran,
                "fail": self._fail_message,
                "broken": self._broken,
                "deadline": self._deadline,
                "stack": self._stack,
                "leave": self._leave,
                "knock": lambda *_: self._to_all({"type": "knock"}),
            }
            if isinstance(kind, str) and kind in handlers:
                return handlers[kind](seat, message, now)
        except Exception as error:
            raise InvalidValueError(
                f"The hub does not understand the message {kind!r:.80}. {error!s:.200}"
            ) from error
        raise InvalidValueError(f"There is no such message. Received: {kind!r:.80}")

    def lost(self, peer: int, now: float, cause: str = "") -> list[Out]:
        """The connection to a peer has ended. A member that had not left has died."""
        self._questions.forget(peer)
        seat = self._by_peer.pop(peer, None)
        if seat is None:
            return []
        seat.peer = None
        if seat.state != "joined":
            return self._settle(now)
        seat.state = "dead"
        how = cause or "died: its connection closed without a goodbye"
        site = seat.place
        at = f" It was at {site}." if site else ""
        phase = seat.status.get("phase")
        doing = f" while in phase {phase!r}" if phase else ""
        out = self._fail(Failure("died", f"{seat} {how}{doing}.{at}", str(seat.task)))
        return out + self._settle(now)

    def exited(self, task: Task, code: int, now: float) -> list[Out]:
        """A launcher has seen the process of a task end, with an exit code as `subprocess` gives it."""
        seat = self._by_task[task.type, task.id]
        if seat.state == "dead" or (seat.info and code == 0):
            return []
        seat.state, seat.exit = ("dead" if code else "left"), describe_exit(code)
        return (self._fail_exit(seat) if code else self._check_complete()) + self._settle(now)

    def _fail_exit(self, seat: Seat) -> list[Out]:
        when = "" if seat.info else " before it joined the others"
        return self._fail(Failure("exited", f"{seat} {seat.exit}{when}.", str(seat.task)))

    def _check_complete(self) -> list[Out]:
        """A failure if some wait for one that has ended without ever joining.

        A program that uses no strategy never joins, and that alone is nobody's failure.
        """
        ended = [seat for seat in self._seats if seat.is_gone and not seat.info]
        return self._fail_exit(ended[0]) if ended and self._joined() else []

    def declare(self, failure: Failure, now: float) -> list[Out]:
        """Whoever runs the hub says that the job cannot go on."""
        return self._fail(failure) + self._settle(now)

    def tick(self, now: float) -> list[Out]:
        """Time has passed: stop waiting for answers that do not come."""
        return self._settle(now)

    def ask_stacks(self, request: int, now: float, patience: float = STACK_PATIENCE) -> list[Out]:
        """Whoever runs the hub wants the stacks of all members."""
        message = {"request": request, "patience": patience}
        return self._ask_stacks(None, message, now)

    # -- joining ---------------------------------------------------------------------------------

    def _join(self, peer: int, message: Mapping[str, Any], now: float) -> list[Out]:
        if peer in self._by_peer:
            raise InvalidValueError("A member can join once only.")
        key = (fields.label(message, "task_type"), fields.whole(message, "task_id"))
        info: dict[str, Any] = {
            name: fields.text(message, name, "")
            for name in ("host", "phalanx", "jax", "python", "cluster")
        }
        info["pid"] = fields.whole(message, "pid", 0)
        info["devices"] = None if message.get("devices") is None else fields.whole(message, "devices")
        problem = fields.failure(message, "problem")
        seat = self._by_task.get(key)
        if seat is None or seat.state != "absent":
            return self._refuse(peer, Task(*key), seat, info)
        seat.peer, seat.state, seat.info, seat.heard = peer, "joined", info, now
        seat.status = {"phase": "start"}
        self._by_peer[peer] = seat
        out: list[Out] = [(peer, {"type": "welcome", "rank": seat.rank, "size": len(self._seats)})]
        if self._failure is not None:
            return [*out, (peer, {"type": "failure", **self._failure.as_dict()})]
        here = {"type": "joined", "worker": str(seat.task), **info, "missing": self._missing_names()}
        out += self._to_all(here)
        out.append((None, here))
        if problem is not None:
            out += self._fail(problem)
        out += self._check_alike(seat) or self._check_complete()
        if self.is_ready and self._failure is None:
            members = [{"worker": str(s.task), **s.info} for s in self._seats]
            ready = {"type": "ready", "members": members, "service": self._has_service}
            out += [*self._to_all(ready), (None, ready)]
        return out

    def _refuse(self, peer: int, task: Task, seat: Seat | None, info: Mapping[str, Any]) -> list[Out]:
        """Turn a newcomer away; while the job still starts, that is a failure of the job."""
        refusal = joining.refusal(task, seat, info, self._names())
        out: list[Out] = [(peer, {"type": "failure", **refusal.as_dict()})]
        return out if self.is_ready else out + self._fail(refusal)

    def _check_alike(self, seat: Seat) -> list[Out]:
        """A failure if the newcomer differs from the first that joined in what all must share."""
        others = [s for s in self._joined() if s is not seat]
        failure = joining.difference(others[0] if others else seat, seat)
        return [] if failure is None else self._fail(failure)

    def _missing_names(self) -> list[str]:
        return [str(task) for task in self.missing()]

    # -- what members say ------------------------------------------------------------------------

    def _status(self, seat: Seat, message: Mapping[str, Any], now: float) -> list[Out]:
        known = seat.status.get("site", "")
        status = {
            "phase": fields.label(message, "phase", ""),
            "step": None if message.get("step") is None else fields.whole(message, "step"),
            "site": fields.label(message, "site", "") or known,
            "doing": fields.label(message, "doing", ""),
            "place": fields.label(message, "place", ""),
            "seconds": fields.seconds(message, "seconds", 0.0),
        }
        sequence = fields.whole(message, "sequence", 0)
        found = waits.reported(seat.rank, message, len(self._seats), now)
        codes = fields.text(message, "codes", "")
        if len(codes) > MOST_CODES:
            raise InvalidValueError(f"Too many programs at once. Received: {len(codes)} characters")
        first = fields.whole(message, "first") if codes else 0
        seat.status, seat.reported, seat.waits = status, now, found
        self._progress.reach(seat, sequence, now)
        self._agreement.ran_codes(seat.rank, first, codes, now)
        return self._settle(now)

    def _post(self, seat: Seat, message: Mapping[str, Any], now: float) -> list[Out]:
        name = fields.label(message, "name")
        last = None if message.get("last") is None else fields.whole(message, "last")
        operations = fields.mapping(message, "operations")
        counts = {str(channel): fields.whole(operations, channel) for channel in operations}
        exchange = self._exchanges.setdefault(name, _Exchange(now))
        exchange.posts[seat.rank] = message.get("value")
        exchange.times[seat.rank] = now
        if last is not None:
            seat.last, seat.operations = max(last, seat.sequence), counts
        return self._settle(now)

    def _sign(self, seat: Seat, message: Mapping[str, Any], now: float) -> list[Out]:
        number, digest = fields.whole(message, "sequence"), fields.label(message, "digest")
        details = message.get("details")
        if isinstance(details, Mapping) and details.get("site"):
            seat.status = {**seat.status, "site": fields.label(details, "site")}
        self._progress.reach(seat, number, now)
        self._agreement.sign(seat.rank, number, digest, details)
        return self._settle(now)

    def _ran(self, seat: Seat, message: Mapping[str, Any], now: float) -> list[Out]:
        self._agreement.ran(seat.rank, fields.whole(message, "sequence"), message.get("details"))
        return self._settle(now)

    def _fail_message(self, seat: Seat, message: Mapping[str, Any], now: float) -> list[Out]:
        kind, text = fields.label(message, "kind"), fields.text(message, "text")
        out = self._fail(Failure(kind, text, str(seat.task)))
        if message.get("request") is not None and seat.peer is not None:
            out.append((seat.peer, heard(message)))
        return out

    def _broken(self, seat: Seat, message: Mapping[str, Any], now: float) -> list[Out]:
        """A member lost a connection to another member; that tells nothing yet if all are there."""
        left = [s for s in self._seats if s.state == "left"]
        site = fields.label(message, "site", "")
        return self._fail(joining.finished(left, seat, site)) if left else []

    def _leave(self, seat: Seat, message: Mapping[str, Any], now: float) -> list[Out]:
        seat.state = "left"
        seat.status = {**seat.status, "phase": "done"}
        out: list[Out] = [(None, {"type": "left", "worker": str(seat.task)})]
        out.append((seat.peer, heard(message)))
        return out + self._settle(now)

    def _deadline(self, seat: Seat, message: Mapping[str, Any], now: float) -> list[Out]:
        """A member has waited for too long: ask those who are late where they are, then give up."""
        final = {
            "site": fields.label(message, "site", ""),
            "what": fields.label(message, "what", ""),
            "seconds": fields.seconds(message, "seconds", 0.0),
            "waiting": str(seat.task),
        }
        ranks = fields.wholes(message, "ranks") if message.get("ranks") else ()
        if self._failure is not None or self._questions.about_a_deadline:
            return []
        late = [s for s in self._joined() if self._behind(s, now) > 0]
        guilty = waits.culprits(self._wants(now))
        late = [s for s in late if s.rank in guilty] or late  # the others wait themselves
        late = [s for s in late if s.silence(now)] or late  # who is frozen keeps up the others
        others = [s for s in self._joined() if s is not seat]
        late = late or [s for s in others if s.rank in ranks] or others
        final["late"] = [s.rank for s in late]
        return self._questions.ask(None, None, late, now + STACK_PATIENCE, final) + self._settle(now)

    def _stack(self, seat: Seat, message: Mapping[str, Any], now: float) -> list[Out]:
        self._questions.answer(seat, fields.whole(message, "request"), fields.text(message, "text"))
        return self._settle(now)

    # -- questions -------------------------------------------------------------------------------

    def _table(self, peer: int, message: Mapping[str, Any], now: float) -> list[Out]:
        rows = self.rows(now)
        late = any(row["behind"] or row["quiet"] for row in rows)
        every = message.get("every")
        first = late and every is not None and now - self._shown_at > fields.seconds(message, "every")
        if first:
            self._shown_at = now
        answer = {
            "type": "table",
            "request": message.get("request"),
            "rows": rows,
            "first": first,
            "failure": self._failure.as_dict() if self._failure else None,
        }
        return [(peer, answer)]

    def _ask_stacks(self, peer: int | None, message: Mapping[str, Any], now: float) -> list[Out]:
        patience = min(60.0, fields.seconds(message, "patience", STACK_PATIENCE))
        name = message.get("request")
        return self._questions.ask(peer, name, self._joined(), now + patience) + self._settle(now)

    # -- consequences ----------------------------------------------------------------------------

    def _settle(self, now: float) -> list[Out]:
        """Everything that has become true: exchanges and signatures complete, questions answered."""
        out: list[Out] = []
        for name in [n for n in self._exchanges if self._all_in(self._exchanges[n].posts)]:
            posts = self._exchanges.pop(name).posts
            values = [posts.get(seat.rank) for seat in self._seats]
            out += self._to_all({"type": "exchanged", "name": name, "values": values})
        out += self._settle_agreement(now)
        out += self._settle_ends()
        out += self._settle_waits(now)
        for request in self._questions.settle(now):
            out += self._answer_stacks(request, now)
        return out

    def _all_in(self, posts: Mapping[int, Any]) -> bool:
        return all(seat.rank in posts or seat.is_gone for seat in self._seats)

    def _settle_agreement(self, now: float) -> list[Out]:
        if self._failure is not None:
            return []
        verdict = self._agreement.settle(now)
        out: list[Out] = []
        for number in verdict.agreed:
            out += self._to_all({"type": "agreed", "sequence": number})
        for rank, number in verdict.questions:
            out.append((self._seats[rank].peer, {"type": "ran?", "sequence": number}))
        return out if verdict.failure is None else out + self._fail(verdict.failure)

    def _settle_ends(self) -> list[Out]:
        """A failure if some go on further than others, who have come to their end."""
        if self._failure is not None:
            return []
        for seat in self._joined():
            ended = [s for s in self._joined() if s.last is not None and s.last < seat.sequence]
            if ended:
                return self._fail(joining.finished(ended, seat, seat.status.get("site")))
            for want in (w for w in seat.waits if w.channel):
                ended = [s for s in self._seats if s.rank in want.ranks and s.has_ended(want)]
                if ended:
                    return self._fail(joining.finished(ended, seat, want.site))
        return []

    def _settle_waits(self, now: float) -> list[Out]:
        """A failure if workers wait for each other in different calls."""
        if self._failure is not None or not any(seat.waits for seat in self._seats):
            return []
        failure = waits.deadlock(self._wants(now), self._names())
        return [] if failure is None else self._fail(failure)

    def _answer_stacks(self, request: StackRequest, now: float) -> list[Out]:
        if request.deadline is not None:
            return self._give_up(request, now)
        return [(request.asker, {"type": "stacks", "request": request.name, "stacks": request.texts})]

    def _give_up(self, request: StackRequest, now: float) -> list[Out]:
        message = request.deadline or {}
        late = [self._seats[rank] for rank in message["late"]]
        if missing := self._missing_names():
            here = ", ".join(map(str, self._joined()))
            where = ", ".join(f"{t} ({t.address})" if t.address else str(t) for t in self.missing())
            text = (
                f"{len(missing)} of {len(self._seats)} workers did not join within "
                f"{message['seconds']:g} seconds. Missing: {where}. Joined: {here}. "
                "Start the missing ones, or look into their output."
            )
            return self._fail(Failure("deadline", text))
        rows = self.rows(now)
        late = [seat for seat in late if rows[seat.rank]["quiet"]] or late  # it keeps up the others
        places = [describe_place(seat, rows[seat.rank]) for seat in late]
        what = f" in {message['what']}" if message["what"] else ""
        source = "PHALANX_DEADLINE" + (", or the timeout of the call" if what else "")
        text = (
            f"{message['waiting']} waited for {message['seconds']:g} seconds{what} at "
            f"{message['site'] or 'an unknown place'}, which is the deadline ({source}). "
            f"Late: {', '.join(places) or 'nobody that is known'}."
        )
        waiting = [f"\n  {row['worker']} {wait}" for row in rows for wait in row["waits"]]
        text += "\nWho waits:" + "".join(waiting) if waiting else ""
        stacks = [f"\n{name}:\n{stack}" for name, stack in sorted(request.texts.items())]
        task = str(late[0].task) if len(late) == 1 else ""
        return self._fail(Failure("deadline", shorten(text + "".join(stacks)), task))

    def _fail(self, failure: Failure) -> list[Out]:
        if self._failure is not None:
            del self._later[_MOST_LATER - 1 :]
            self._later.append(failure)
            return [(None, {"type": "later", **failure.as_dict()})]
        self._failure = failure
        message = {"type": "failure", **failure.as_dict()}
        return [*self._to_all(message), (None, message)]

    def _to_all(self, message: dict[str, Any]) -> list[Out]:
        return [(seat.peer, message) for seat in self._joined() if seat.peer is not None]

    def _joined(self) -> list[Seat]:
        return [seat for seat in self._seats if seat.state == "joined"]
