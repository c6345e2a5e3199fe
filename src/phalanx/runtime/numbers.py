"""Numbers that users and environments give, checked: integers and floats within bounds."""

from __future__ import annotations

import operator
from typing import Any

from phalanx.errors import InvalidTypeError, InvalidValueError
from phalanx.runtime.formatting import shown

MOST_DIGITS = 18
"""No sensible count, port or id has more digits."""


def check_integer(x: Any, name: str, least: int | None = None, most: int | None = None) -> int:
    """Require an integer within bounds, of any integer type; True and False are none."""
    try:
        number = None if isinstance(x, bool) else operator.index(x)
    except TypeError:
        number = None
    if number is None:
        raise InvalidTypeError(f"{name} must be an integer. Received: {shown(x)}")
    if (least is not None and number < least) or (most is not None and number > most):
        bounds = f"at least {least}" if most is None else f"an integer from {least} to {most}"
        raise InvalidValueError(f"{name} must be {bounds}. Received: {shown(number)}")
    return number


def check_number(x: Any, name: str, least: float, most: float) -> float:
    """Require a finite number within bounds."""
    try:
        number = None if isinstance(x, bool | str | bytes) else float(x)
    except OverflowError:
        number = float("inf")
    except Exception:  # noqa: BLE001 - whatever the user's class does
        number = None
    if number is None:
        raise InvalidTypeError(f"{name} must be a number. Received: {shown(x)}")
    if not least <= number <= most:
        raise InvalidValueError(
            f"{name} must be a finite number from {least:g} to {most:g}. Received: {shown(x)}"
        )
    return number


def parse_digits(text: str) -> int | None:
    """A plain decimal number, or None: '12', but not '+12', '1_2', '٣' or thousands of digits."""
    plain = text.isascii() and text.isdigit() and len(text.lstrip("0")) <= MOST_DIGITS
    return int(text) if plain else None
