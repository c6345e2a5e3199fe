"""Kinds of arguments on the command line."""

from __future__ import annotations

import argparse
import math

__all__ = ["count", "positive", "seconds"]


def count(text: str) -> int:
    """A whole number from 0."""
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"must not be negative, not {text}")
    return number


def positive(text: str) -> int:
    """A whole number from 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be a positive number, not {text}")
    return number


def seconds(text: str) -> float:
    """A number of seconds."""
    number = float(text)
    if not (number >= 0 and math.isfinite(number)):
        raise argparse.ArgumentTypeError(f"must be a number of seconds, not {text}")
    return number
