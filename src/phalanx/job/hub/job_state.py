"""What the hub knows of a job, as a pure state machine: events in, messages out.

A *peer* is a connection, named by a number. It becomes a member by joining as one of the expected
tasks, or stays an observer, which may only ask. Every event returns what must be sent to whom. There
are no sockets, threads or clocks in here: the time is an argument.

A job has one failure, the first. Every member that is there is told once, and every member that comes
later is told when it comes. What goes wrong afterwards is mostly an echo of it, and is told to none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from phalanx.errors import InvalidValueError
from phalanx.job.hub import admission, fields, wait_graph
from phalanx.job.hub.descriptions import Failure, Task, describe_exit, shorten
from phalanx.job.hub.program_order import MOST_CODES, Agreement
from phalanx.job.hub.progress import Frontier, TaskRecord, describe_deadline
from phalanx.job.hub.silent_members import Abandoned, SilentMembers, abandoned
from phalanx.job.hub.stack_requests import (
    SILENT_PATIENCE,
    STACK_PATIENCE,
    Out,
    StackRequest,
    StackRequests,
    acknowledged,
)
from phalanx.job.hub.wait_graph import WaitEdge

_LONG_INPUT = 1.0  # seconds after which a wait for input is worth a word


@dataclass
class _Exchange:
    """What members have brought to an exchange, and when."""

    since: float
    posts: dict[int, Any] = field(default_factory=dict)
    times: dict[int, float] = field(default_factory=dict)


class JobState:
    """The state of one job. `expected` are its tasks, in the order of their ranks.

    >>> state = JobState([Task("worker", 0), Task("worker", 1)])
    >>> _ = state.handle(7, {"type": "join", "task_type": "worker", "task_id": 0}, now=0.0)
    >>> out = state.handle(8, {"type": "join", "task_type": "worker", "task_id": 1}, now=1.0)
    >>> [peer for peer, message in out if message["type"] == "ready"]
    [7, 8]
    """

    def __init__(self, expected: Sequence[Task], *, has_service: bool = False) -> None:
        if len(set(expected)) < len(expected) or not expected:
            raise InvalidValueError(
                f"A job needs at least one task, and each of them once. Received: {list(expected)}"
            )
        self._records = [TaskRecord(task, rank) for rank, task in enumerate(expected)]
        self._by_task = {(s.task.type, s.task.id): s for s in self._records}
        self._by_peer: dict[int, TaskRecord] = {}
        self._has_service = has_service
        self._failure: Failure | None = None
        self._exchanges: dict[str, _Exchange] = {}
        self._agreement = Agreement(self._records)
        self._progress = Frontier()
        self._stack_requests = StackRequests(self._records)
        self._silent = SilentMembers()
        self._shown_at = -1e9  # when a member last showed the table
        self.workers_train = False
        """Whether a chief has said that workers do not serve it: they end by themselves."""

    # -- what is known ---------------------------------------------------------------------------

    @property
    def failure(self) -> Failure | None:
        """Why the job cannot go on, or None."""
        return self._failure

    @property
    def is_ready(self) -> bool:
        """Whether all tasks have joined, however many have gone since."""
        return all(record.info for record in self._records)

    @property
    def is_over(self) -> bool:
        """Whether no task is left that could still come or go on."""
        return all(record.is_gone for record in self._records)

    def present(self) -> list[Task]:
        """The tasks that have joined and are still there."""
        return [record.task for record in self._joined()]

    def missing(self) -> list[Task]:
        """The tasks that have not joined yet."""
        return [record.task for record in self._records if record.state == "absent"]

    def task_of(self, peer: int) -> Task | None:
        """The task whose loss the end of a connection would be, if any."""
        record = self._by_peer.get(peer)
        return record.task if record is not None and record.state == "joined" else None

    def rows(self, now: float) -> list[dict[str, Any]]:
        """The table of workers: one row per task, in the order of ranks."""
        wants = self._wants(now)
        return [
            {
                **self._progress.row(record, self._awaited(record, now), now),
                "waits": [w.describe(self._names()) for w in wants if w.rank == record.rank],
            }
            for record in self._records
        ]

    def _names(self) -> list[str]:
        return [str(record.task) for record in self._records]

    def _wants(self, now: float) -> list[WaitEdge]:
        """Who waits for whom."""
        wants = wait_graph.step_wants(self._records)
        for record in self._joined():
            wants += record.waits
        for name, exchange in self._exchanges.items():
            missing = [s.rank for s in self._joined() if s.rank not in exchange.posts]
            for rank, posted in exchange.times.items():
                record = self._records[rank]
                if missing and record.state == "joined" and record.phase in ("wait", "input"):
                    since = max(posted, record.since)
                    what, site = f"the exchange {name!r}", record.status.get("site", "")
                    wants.append(WaitEdge(rank, tuple(missing), since, record.reported, what, site))
        return wants

    def _awaited(self, record: TaskRecord, now: float) -> list[float]:
        """Since when others have waited for this task, other than in programs of the strategy."""
        since = [e.since for e in self._exchanges.values() if record.rank not in e.posts]
        since += [w.since for s in self._joined() for w in s.waits if record.rank in w.ranks]
        if self._all_read_input() and all(record.rank not in e.posts for e in self._exchanges.values()):
            since += [record.since] if now - record.since >= _LONG_INPUT else []
        return since

    def _all_read_input(self) -> bool:
        """Whether every task waits for its input, so that none is left to wait for them."""
        return all(r.state == "joined" and r.phase == "input" for r in self._records)

    # -- events ----------------------------------------------------------------------------------

    def handle(self, peer: int, message: Mapping[str, Any], now: float) -> list[Out]:
        """A message from a peer. What cannot be understood is an `InvalidValueError`; drop the peer."""
        kind = message.get("type")
        record = self._by_peer.get(peer)
        if record is not None:
            record.heard = now
        try:
            if kind == "join":
                return self._join(peer, message, now)
            if kind == "table":
                return self._table(peer, message, now)
            if kind == "stacks":
                return self._ask_stacks(peer, message, now)
            if kind == "workers":
                self.workers_train = message.get("train") is True
                return [(peer, acknowledged(message))]
            if record is None or record.is_gone:
                return [(peer, acknowledged(message))] if kind == "leave" else []
            handlers = {
                "status": self._status,
                "post": self._post,
                "sign": self._sign,
                "ran": self._ran,
                "fail": self._fail_message,
                "broken": self._broken,
                "deadline": self._deadline,
                "stack": self._stack,
                "end": self._end,
                "leave": self._leave,
                "knock": lambda *_: self._to_all({"type": "knock"}),
                "tell": self._tell,
            }
            if isinstance(kind, str) and kind in handlers:
                return handlers[kind](record, message, now)
        except Exception as error:
            raise InvalidValueError(
                f"The hub does not understand the message {kind!r:.80}. {error!s:.200}"
            ) from error
        raise InvalidValueError(f"There is no such message. Received: {kind!r:.80}")

    def lost(self, peer: int, now: float, cause: str = "") -> list[Out]:
        """The connection to a peer has ended. A member that had not left has died."""
        self._stack_requests.forget(peer)
        record = self._by_peer.pop(peer, None)
        if record is None:
            return []
        record.peer = None
        if record.state != "joined":
            return self._settle(now)
        record.state = "dead"
        how = cause or "died: its connection closed without a goodbye"
        site = record.place
        at = f" It was at {site}." if site else ""
        doing = f" while in phase {record.phase!r}" if record.phase else ""
        out = self._fail(Failure("died", f"{record} {how}{doing}.{at}", str(record.task)))
        return out + self._settle(now)

    def exited(self, task: Task, code: int, now: float) -> list[Out]:
        """A launcher has seen the process of a task end, with an exit code as `subprocess` gives it."""
        record = self._by_task[task.type, task.id]
        if record.state == "dead" or (record.info and code == 0):
            return []
        record.state, record.exit = ("dead" if code else "left"), describe_exit(code)
        return (self._fail_exit(record) if code else self._check_complete()) + self._settle(now)

    def _fail_exit(self, record: TaskRecord) -> list[Out]:
        when = "" if record.info else " before it joined the others"
        return self._fail(Failure("exited", f"{record} {record.exit}{when}.", str(record.task)))

    def _check_complete(self) -> list[Out]:
        """A failure if some wait for one that has ended without ever joining.

        A program that uses no strategy never joins, and that alone is no failure.
        """
        ended = [record for record in self._records if record.is_gone and not record.info]
        return self._fail_exit(ended[0]) if ended and self._joined() else []

    def tick(self, now: float) -> list[Out]:
        """Time has passed: stop waiting for answers that do not come."""
        return self._settle(now)

    def abandoned(self, now: float) -> list[Abandoned]:
        """The members for which nothing is left to wait; see `SilentMembers`."""
        return [abandoned(s, self._records) for s in self._silent.look(self._records, now)]

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
        problem = fields.failure(message, "problem")
        record = self._by_task.get(key)
        if record is None or record.state != "absent":
            return self._refuse(peer, Task(*key), record, info)
        record.peer, record.state, record.info, record.heard = peer, "joined", info, now
        record.status = {"phase": "start"}
        self._by_peer[peer] = record
        place = {"rank": record.rank, "size": len(self._records), "name": str(record.task)}
        out: list[Out] = [(peer, {"type": "welcome", **place})]
        if self._failure is not None:
            return [*out, (peer, {"type": "failure", **self._failure.as_dict()})]
        here = {"type": "joined", "worker": str(record.task), **info, "missing": self._missing_names()}
        out += self._to_all(here)
        if problem is not None:
            out += self._fail(problem)
        out += self._check_alike(record) or self._check_complete()
        if self.is_ready and self._failure is None:
            members = [{"worker": str(s.task), **s.info} for s in self._records]
            out += self._to_all({"type": "ready", "members": members, "service": self._has_service})
        return out

    def _refuse(
        self, peer: int, task: Task, record: TaskRecord | None, info: Mapping[str, Any]
    ) -> list[Out]:
        """Turn a newcomer away; while the job still starts, that is a failure of the job."""
        refusal = admission.refusal(task, record, info, self._names())
        out: list[Out] = [(peer, {"type": "failure", **refusal.as_dict()})]
        return out if self.is_ready else out + self._fail(refusal)

    def _check_alike(self, record: TaskRecord) -> list[Out]:
        """A failure if the newcomer differs from the first that joined in what all must share."""
        others = [s for s in self._joined() if s is not record]
        failure = admission.difference(others[0] if others else record, record)
        return [] if failure is None else self._fail(failure)

    def _missing_names(self) -> list[str]:
        return [str(task) for task in self.missing()]

    # -- what members say ------------------------------------------------------------------------

    def _status(self, record: TaskRecord, message: Mapping[str, Any], now: float) -> list[Out]:
        known = record.status.get("site", "")
        status = {
            "phase": fields.label(message, "phase", ""),
            "step": None if message.get("step") is None else fields.whole(message, "step"),
            "site": fields.label(message, "site", "") or known,
            "doing": fields.label(message, "doing", ""),
            "place": fields.label(message, "place", ""),
            "seconds": fields.seconds(message, "seconds", 0.0),
        }
        sequence = fields.whole(message, "sequence", 0)
        found = wait_graph.reported(record.rank, message, len(self._records), now)
        codes = fields.text(message, "codes", "")
        if len(codes) > MOST_CODES:
            raise InvalidValueError(f"Too many programs at once. Received: {len(codes)} characters")
        first = fields.whole(message, "first") if codes else 0
        record.status, record.reported, record.waits = status, now, found
        self._progress.reach(record, sequence, now)
        self._agreement.ran_codes(record.rank, first, codes, now)
        return self._settle(now)

    def _post(self, record: TaskRecord, message: Mapping[str, Any], now: float) -> list[Out]:
        name = fields.label(message, "name")
        last = None if message.get("last") is None else fields.whole(message, "last")
        operations = fields.mapping(message, "operations")
        counts = {str(channel): fields.whole(operations, channel) for channel in operations}
        exchange = self._exchanges.setdefault(name, _Exchange(now))
        exchange.posts[record.rank] = message.get("value")
        exchange.times[record.rank] = now
        if last is not None:
            record.last, record.operations = max(last, record.sequence), counts
        return self._settle(now)

    def _sign(self, record: TaskRecord, message: Mapping[str, Any], now: float) -> list[Out]:
        number, digest = fields.whole(message, "sequence"), fields.label(message, "digest")
        details = message.get("details")
        if isinstance(details, Mapping) and details.get("site"):
            record.status = {**record.status, "site": fields.label(details, "site")}
        self._progress.reach(record, number, now)
        self._agreement.sign(record.rank, number, digest, details)
        return self._settle(now)

    def _ran(self, record: TaskRecord, message: Mapping[str, Any], now: float) -> list[Out]:
        self._agreement.ran(record.rank, fields.whole(message, "sequence"), message.get("details"))
        return self._settle(now)

    def _tell(self, record: TaskRecord, message: Mapping[str, Any], now: float) -> list[Out]:
        name = fields.label(message, "name")
        news = {"type": "told", "name": name, "value": message.get("value"), "rank": record.rank}
        others = [other for other in self._joined() if other is not record]
        return [out for other in others for out in self._answer(other, news)]

    def notice(self, name: str, value: Any) -> list[Out]:
        """The launcher has something to tell all members."""
        return self._to_all({"type": "told", "name": name, "value": value, "rank": None})

    def _fail_message(self, record: TaskRecord, message: Mapping[str, Any], now: float) -> list[Out]:
        kind, text = fields.label(message, "kind"), fields.text(message, "text")
        out = self._fail(Failure(kind, text, str(record.task)))
        is_asked = message.get("request") is not None
        return out + self._answer(record, acknowledged(message)) if is_asked else out

    def _broken(self, record: TaskRecord, message: Mapping[str, Any], now: float) -> list[Out]:
        """A member lost a connection to another member; that tells nothing yet if all are there."""
        left = [s for s in self._records if s.state == "left"]
        site = fields.label(message, "site", "")
        return self._fail(admission.finished(left, record, site)) if left else []

    def _end(self, record: TaskRecord, message: Mapping[str, Any], now: float) -> list[Out]:
        """A member has come to its end, and may wait a moment for the others before it leaves."""
        record.patience = fields.seconds(message, "patience")
        return []

    def _leave(self, record: TaskRecord, message: Mapping[str, Any], now: float) -> list[Out]:
        record.state = "left"
        record.status = {**record.status, "phase": "done"}
        return [*self._answer(record, acknowledged(message)), *self._settle(now)]

    def _deadline(self, record: TaskRecord, message: Mapping[str, Any], now: float) -> list[Out]:
        """A member has waited for too long: ask those who are late where they are, then give up."""
        final = {
            "site": fields.label(message, "site", ""),
            "what": fields.label(message, "what", ""),
            "seconds": fields.seconds(message, "seconds", 0.0),
            "waiting": str(record.task),
        }
        ranks = fields.wholes(message, "ranks") if message.get("ranks") else ()
        if self._failure is not None or self._stack_requests.about_a_deadline:
            return []
        late = [s for s in self._joined() if self._progress.behind(s, self._awaited(s, now), now) > 0]
        guilty = wait_graph.culprits(self._wants(now))
        late = [s for s in late if s.rank in guilty] or late  # the others wait themselves
        others = [s for s in self._joined() if s is not record]
        late = late or [s for s in others if s.rank in ranks] or others
        late = [s for s in late if s.silence(now)] or late  # who is frozen keeps up the others
        final["late"] = [s.rank for s in late]
        is_frozen = all(s.silence(now) for s in late)  # who will hardly answer
        until = now + (SILENT_PATIENCE if is_frozen else STACK_PATIENCE)
        return self._stack_requests.ask(None, None, late, until, final) + self._settle(now)

    def _stack(self, record: TaskRecord, message: Mapping[str, Any], now: float) -> list[Out]:
        self._stack_requests.answer(
            record, fields.whole(message, "request"), fields.text(message, "text")
        )
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
            "workers_train": self.workers_train,
        }
        return [(peer, answer)]

    def _ask_stacks(self, peer: int, message: Mapping[str, Any], now: float) -> list[Out]:
        patience = min(60.0, fields.seconds(message, "patience", STACK_PATIENCE))
        name = message.get("request")
        return self._stack_requests.ask(peer, name, self._joined(), now + patience) + self._settle(now)

    # -- consequences ----------------------------------------------------------------------------

    def _settle(self, now: float) -> list[Out]:
        """Everything that has become true: exchanges and signatures complete, questions answered."""
        out: list[Out] = []
        for name in [n for n in self._exchanges if self._all_in(self._exchanges[n].posts)]:
            posts = self._exchanges.pop(name).posts
            values = [posts.get(record.rank) for record in self._records]
            out += self._to_all({"type": "exchanged", "name": name, "values": values})
        out += self._settle_agreement(now)
        out += self._settle_ends()
        out += self._settle_waits(now)
        for request in self._stack_requests.settle(now):
            out += self._answer_stacks(request, now)
        return out

    def _all_in(self, posts: Mapping[int, Any]) -> bool:
        return all(record.rank in posts or record.is_gone for record in self._records)

    def _settle_agreement(self, now: float) -> list[Out]:
        if self._failure is not None:
            return []
        verdict = self._agreement.settle(now)
        out: list[Out] = []
        for number in verdict.agreed:
            out += self._to_all({"type": "agreed", "sequence": number})
        for rank, number in verdict.questions:
            out += self._answer(self._records[rank], {"type": "ran?", "sequence": number})
        return out if verdict.failure is None else out + self._fail(verdict.failure)

    def _settle_ends(self) -> list[Out]:
        """A failure if some go on further than others, who have come to their end."""
        if self._failure is not None:
            return []
        for record in self._joined():
            ended = [s for s in self._joined() if s.last is not None and s.last < record.sequence]
            if ended:
                return self._fail(admission.finished(ended, record, record.status.get("site")))
            for want in (w for w in record.waits if w.channel):
                ended = [s for s in self._records if s.rank in want.ranks and s.has_ended(want)]
                if ended:
                    return self._fail(admission.finished(ended, record, want.site))
        return []

    def _settle_waits(self, now: float) -> list[Out]:
        """A failure if workers wait for each other in different calls."""
        if self._failure is not None or not any(record.waits for record in self._records):
            return []
        failure = wait_graph.deadlock(self._wants(now), self._names())
        return [] if failure is None else self._fail(failure)

    def _answer_stacks(self, request: StackRequest, now: float) -> list[Out]:
        if request.deadline is not None:
            return self._give_up(request, now)
        answer = {"type": "stacks", "request": request.name, "stacks": request.texts}
        return [] if request.asker is None else [(request.asker, answer)]

    def _give_up(self, request: StackRequest, now: float) -> list[Out]:
        message = request.deadline or {}
        late = [self._records[rank] for rank in message["late"]]
        if self.missing():
            return self._fail(admission.not_joined(self._records, message["seconds"]))
        rows = self.rows(now)
        late = [s for s in late if rows[s.rank]["quiet"]] or late  # it keeps up the others
        text = describe_deadline(message, late, rows)
        stacks = [f"\n{name}:\n{stack}" for name, stack in sorted(request.texts.items())]
        task = str(late[0].task) if len(late) == 1 else ""
        return self._fail(Failure("deadline", shorten(text + "".join(stacks)), task))

    def _fail(self, failure: Failure) -> list[Out]:
        if self._failure is not None:
            return []
        self._failure = failure
        return self._to_all({"type": "failure", **failure.as_dict()})

    def _to_all(self, message: dict[str, Any]) -> list[Out]:
        return [out for record in self._joined() for out in self._answer(record, message)]

    def _answer(self, record: TaskRecord, message: dict[str, Any]) -> list[Out]:
        return [] if record.peer is None else [(record.peer, message)]

    def _joined(self) -> list[TaskRecord]:
        return [record for record in self._records if record.state == "joined"]
