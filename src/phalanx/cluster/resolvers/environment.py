"""Reading environment variables, and saying clearly what is wrong with them."""

from __future__ import annotations

import json
import os
from typing import Any

from phalanx.cluster.tasks import task_index
from phalanx.errors import ClusterEnvironmentError, InvalidValueError
from phalanx.runtime.formatting import shown


class InvalidJsonError(InvalidValueError, json.JSONDecodeError):
    """The value of an environment variable is not JSON."""

    def __init__(self, msg: str, doc: str, pos: int) -> None:
        super().__init__(msg, doc, pos)
        self.args = (msg,)  # without the position, which the message has already


def json_variable(name: str, default: Any, example: str) -> Any:
    """Returns the value of an environment variable that holds JSON, or the default if it is not set.

    `example` is shown as a right value if the value is not JSON.

    >>> json_variable("NO_SUCH_VARIABLE", default=[], example="[1, 2]")
    []
    """
    text = os.environ.get(name)
    if text is None:
        return default
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        problem = f"{error.msg} at line {error.lineno}, column {error.colno}"
        position = error.pos
    except ValueError:
        problem, position = "a number has thousands of digits", 0
    except RecursionError:
        problem, position = "lists are in lists too deeply", 0
    raise InvalidJsonError(
        f"{name} is not valid JSON: {problem}. Write for example {example}, or unset the variable. "
        f"Received: {shown(text)}",
        text,
        position,
    )


def variable(name: str, hint: str) -> str:
    """Returns an environment variable that must be set; `hint` says how it gets set."""
    value = os.environ.get(name)
    if value is None:
        raise ClusterEnvironmentError(
            f"The environment variable {name} is not set. {hint} Received: no {name}"
        )
    return value


def number_variable(name: str, hint: str) -> int:
    """Returns an environment variable that must hold a whole number from 0."""
    return task_index(variable(name, hint), f"The environment variable {name}")
