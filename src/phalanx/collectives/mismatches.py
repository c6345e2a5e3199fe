"""What is told when ranks, workers or replicas, do not do the same, whichever backend finds it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

_RULE = (
    "The ranks of a group came to different operations. All of them must make the same calls in the "
    "same order, with arrays that fit together."
)


def different_operations(said: Mapping[str, tuple[str, str]]) -> str:
    """Ranks that came to different operations.

    `said` has the operation of each rank in words, and where it was called.

    >>> print(different_operations({"rank 0": ("barrier()", "a.py:1"), "rank 1": ("x()", "b.py:2")}))
    The ranks of a group came to different operations...
      rank 0: barrier() at a.py:1
      rank 1: x() at b.py:2
    """
    return "\n".join([_RULE, *(f"  {who}: {what} at {site}" for who, (what, site) in said.items())])


def different_parts(
    who: str, expected: Sequence[int], others: str, ranks: Sequence[int], sent: Sequence[int]
) -> str:
    """A rank that expects other parts of an array than the others send to it.

    >>> different_parts("rank 1", [1, 3], "ranks", (0, 1), [2, 2])
    'rank 1 expects parts of the sizes [1, 3] from the ranks [0, 1], but they send [2, 2].'
    """
    return (
        f"{who} expects parts of the sizes {list(expected)} from the {others} {list(ranks)}, but they "
        f"send {list(sent)}."
    )


def different_arrays(who: str, wanted: str, site: str, sender: str, sent: str, sent_at: str) -> str:
    """A rank that receives another array than was sent to it.

    >>> different_arrays("rank 1", "int8[2]", "a.py:1", "rank 0", "int8[3]", "a.py:2")
    'rank 1 receives int8[2] at a.py:1, but rank 0 sent int8[3] at a.py:2. Shapes and dtypes must...'
    """
    return (
        f"{who} receives {wanted} at {site}, but {sender} sent {sent} at {sent_at}. Shapes and dtypes "
        "must be the same."
    )
