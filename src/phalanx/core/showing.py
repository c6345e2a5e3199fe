"""Values of any kind in messages for people."""

from __future__ import annotations

from typing import Any

__all__ = ["shown"]

_LONGEST = 200


def shown(value: Any, longest: int = _LONGEST) -> str:
    """A value as text that is not too long, whatever its own description does.

    >>> shown("host0"), shown(list(range(1000)), 12)
    ("'host0'", '[0, 1, 2, 3,…')
    >>> shown(10**5000)
    'a whole number of about 5000 digits'
    """
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - an object may raise anything
        if isinstance(value, int):
            return f"a whole number of about {int(abs(value).bit_length() * 0.30103)} digits"
        return f"an object of type {type(value).__name__}"
    return text if len(text) <= longest else f"{text[:longest]}…"
