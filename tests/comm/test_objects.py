"""Objects that cannot be pickled or unpickled: an error for all who should have them."""

from __future__ import annotations

from typing import Any

import phalanx as px


class Shy:
    """Raises what it likes when it is pickled, or when it is unpickled."""

    def __init__(self, when: str) -> None:
        self.when = when

    def __reduce__(self) -> Any:
        if self.when == "pickled":
            raise RuntimeError("not me")
        return int, ("no number",)

    def __repr__(self) -> str:
        raise KeyError("not even that")


def outcome(call: Any) -> tuple[str, str]:
    try:
        return "", repr(call())
    except px.PhalanxError as error:
        return type(error).__name__, str(error)


def calls() -> dict[str, list[tuple[str, str]]]:
    px.comm.init()
    c, rank = px.comm, px.comm.get_rank()
    found = {}
    for when in ("pickled", "unpickled"):
        bad = Shy(when)
        mine = bad if rank == 1 else "good"
        found[when] = [
            outcome(lambda x=mine: c.all_gather_object(x)),
            outcome(lambda x=mine: c.gather_object(x, 0)),
            outcome(lambda x=mine: c.broadcast_object_list([x], 1)),
            outcome(lambda x=bad: c.scatter_object_list(["good", x] if rank == 1 else None, 1)),
            outcome(lambda: c.all_gather_object(rank)),  # they are still in step
        ]
    return found


def test_objects_that_cannot_travel_are_an_error_on_all_ranks() -> None:
    with px.testing.MultiProcess(2, preload=["phalanx"], env={"PHALANX_DEADLINE": "20"}) as cluster:
        found = cluster.run(calls)
    for rank, answers in enumerate(found):
        for kind, text in answers["pickled"][:4]:
            assert kind == "InvalidTypeError", (rank, answers)
            assert "The object of rank 1 at " in text
            assert "test_objects.py:" in text
            assert "cannot be pickled: RuntimeError('not me'). Received: " in text
            assert "<Shy whose repr fails with KeyError>" in text
        for which, (kind, text) in enumerate(answers["unpickled"][:4]):
            if (which, rank) not in ((1, 1), (3, 0)):  # those have nothing to unpickle
                assert kind == "InvalidTypeError", (rank, which, text)
                assert f"cannot be unpickled on rank {rank}" in text
                assert "invalid literal for int()" in text
        assert answers["pickled"][4] == answers["unpickled"][4] == ("", "[0, 1]")
