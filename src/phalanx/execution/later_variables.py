"""Variables of models that get them when they are called for the first time.

A gradient tape looks at what a loss has read after it was computed. `value_and_grad` is given the
variables before. So a model that has none yet gives `LaterVariables`, and the loss runs up to the call
that makes them, before it is differentiated.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from phalanx.core.variables import transactions
from phalanx.core.variables.variable import Variable
from phalanx.errors import ContextError
from phalanx.runtime.formatting import shown

__all__ = ["LaterVariables", "made_by", "variables_are_made"]


class LaterVariables:
    """The variables of something that has none yet.

    Args:
        find: gives them, or None as long as there are none.
        owner: what makes them.
    """

    def __init__(self, find: Callable[[], list[Variable] | None], owner: Any) -> None:
        self.find, self.owner = find, owner

    def now(self) -> list[Variable]:
        """The variables; an error if there are none yet."""
        found = self.find()
        if found is None:
            raise ContextError(
                "The model has no variables yet: it gets them when it is called for the first time. "
                f"Give it a keras.Input, or call it before. Received: {shown(self.owner)}"
            )
        return found

    def __iter__(self) -> Iterator[Variable]:
        return iter(self.now())

    def __len__(self) -> int:
        return len(self.now())

    def __getitem__(self, index: Any) -> Any:
        return self.now()[index]

    def __add__(self, other: list[Variable]) -> list[Variable]:
        return [*self.now(), *other]

    __radd__ = __add__


class _Made(BaseException):
    """Variables were made; nothing of the loss was lost that must not run again."""


class _State(threading.local):
    waiting = False


_state = _State()


def variables_are_made() -> None:
    """Called where variables were made on a first call: a loss that waits for them begins again."""
    if _state.waiting:
        raise _Made


def made_by(
    fn: Callable[..., Any], nests: Sequence[Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[Any]:
    """The variables, of which some are made when `fn` is called: it runs as far as it must.

    >>> v = Variable(2.0)
    >>> made_by(lambda: None, [LaterVariables(lambda: [v], "model")], (), {})[0][0] is v
    True
    """
    later = [nest for nest in nests if isinstance(nest, LaterVariables)]
    while any(nest.find() is None for nest in later):
        before, _state.waiting = _state.waiting, True
        try:
            transactions.leaving_nothing(fn, *args, **kwargs)
        except _Made:
            continue
        finally:
            _state.waiting = before
        break
    return [nest.now() if isinstance(nest, LaterVariables) else nest for nest in nests]
