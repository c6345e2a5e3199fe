"""What users' threads ask the coordinator's thread, which answers when it can."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from phalanx.errors import ContextError
from phalanx.net.event_loop import EventLoop
from phalanx.runtime.interrupts import Bell

__all__ = ["Question", "Questions", "closed_error"]

Answer = Callable[[], tuple[Any] | None]


class Question:
    """Something that a thread waits for.

    Args:
        answer: called in the coordinator's thread until it returns the answer, in a tuple.
    """

    __slots__ = ("answer", "bell", "failure", "is_dropped", "result")

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.bell = Bell()
        self.result: tuple[Any] | None = None
        self.failure: BaseException | None = None
        """Why there is no answer, if that is so."""
        self.is_dropped = False
        """Whether no thread waits any more."""


class Questions:
    """The questions that are open. All but `ask` is for the coordinator's thread.

    Args:
        loop: has that thread.
    """

    def __init__(self, loop: EventLoop) -> None:
        self._loop = loop
        self._open: list[Question] = []
        self._is_closed = False

    def __bool__(self) -> bool:
        return bool(self._open)

    def ask(self, answer: Answer) -> Question:
        """Ask; the caller waits for the bell of the question."""
        question = Question(answer)
        self._loop.call_soon(lambda: self._add(question))
        if self._is_closed:  # so that the thread may be over
            _refuse(question)
        return question

    def _add(self, question: Question) -> None:
        if self._is_closed:
            _refuse(question)
        else:
            self._open.append(question)

    def answer(self) -> None:
        """Answer what can be answered."""
        questions, self._open = self._open, []
        for question in questions:
            if question.is_dropped:
                continue
            try:
                question.result = question.answer()
            except BaseException as error:  # noqa: BLE001 - the thread that asked gets to see it
                question.failure = error
            if question.result is None and question.failure is None:
                self._open.append(question)
            else:
                question.bell.ring()

    def close(self) -> None:
        """Refuse all questions from now on."""
        self._is_closed = True
        for question in self._open:
            _refuse(question)
        self._open.clear()


def _refuse(question: Question) -> None:
    question.failure = closed_error()
    question.bell.ring()


def closed_error() -> ContextError:
    """What is asked of a coordinator, or given to it, when it is closed."""
    return ContextError(
        "The coordinator has been closed, or its strategy has, so it does nothing any more. "
        "ClusterCoordinator(strategy) makes another one for a strategy that is not closed."
    )
