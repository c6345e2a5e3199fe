"""What users' threads ask the coordinator's thread, which answers when it can."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from phalanx.net.event_loop import EventLoop
from phalanx.runtime.interrupts import Bell

__all__ = ["Question", "Questions"]

Answer = Callable[[], tuple[Any] | None]


class Question:
    """Something that a thread waits for.

    Args:
        answer: called in the coordinator's thread until it returns the answer, in a tuple.
    """

    __slots__ = ("answer", "bell", "is_dropped", "result")

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.bell = Bell()
        self.result: tuple[Any] | None = None
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

    def __bool__(self) -> bool:
        return bool(self._open)

    def ask(self, answer: Answer) -> Question:
        """Ask; the caller waits for the bell of the question."""
        question = Question(answer)
        self._loop.call_soon(lambda: self._open.append(question))
        return question

    def answer(self) -> None:
        """Answer what can be answered."""
        questions, self._open = self._open, []
        for question in questions:
            if question.is_dropped:
                continue
            try:
                question.result = question.answer()
            except BaseException as error:  # noqa: BLE001 - the thread that asked gets to see it
                question.result = (error,)
            if question.result is None:
                self._open.append(question)
            else:
                question.bell.ring()
