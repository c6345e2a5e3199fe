"""Random faults in jobs of real processes: each history must be one that users can rely on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.coordinator.fault_player import Player, schedule_of
from tests.coordinator.fault_tasks import random_plan

from phalanx.testing.faults.checkers import closure_violations
from phalanx.testing.faults.history import Named
from phalanx.testing.faults.schedules import Fault, Schedule


@pytest.fixture(scope="module")
def player(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Player]:
    with Player(tmp_path_factory.mktemp("faults")) as found:
        yield found


def check(player: Player, seed: int) -> None:
    plan = random_plan(seed)
    schedule = schedule_of(seed, plan)
    history = player.play(plan, schedule)
    wrong = closure_violations(history, max_staleness=dict(plan.options)["max_staleness"])
    assert not wrong, "\n".join([*wrong[:20], f"{plan.options}", str(schedule)])


@pytest.mark.parametrize("seed", range(20))
def test_histories_of_faults(player: Player, seed: int) -> None:
    check(player, seed)


def test_the_faults_had_consequences(player: Player) -> None:
    """Histories without retries and repeated messages would show nothing."""
    faults = [Fault(1, 0.02 * i, "lose_answers", f"ps {i % 2}", 0.02) for i in range(4)]
    faults += [Fault(2, 0.02 * i, "isolate", f"worker {i}", 0.1) for i in range(2)]
    player.play(random_plan(0), Schedule(0, tuple(faults)))
    assert player.counts["duplicates"] > 0
    assert player.counts["refused"] > 0
    assert player.counts["retried"] > 0


def test_missing_tasks_are_named_in_time(player: Player) -> None:
    faults = [
        Fault(1, 0.0, "kill", "ps 0", 6.5),  # while all workers use it
        Fault(1, 0.1, "freeze", "worker 0", 6.5),
        Fault(1, 0.1, "kill", "worker 2", 6.5),
    ]
    history = player.play(random_plan(0), Schedule(0, tuple(faults)))
    assert not closure_violations(history), list(history.all(Named))


def test_servers_that_forget_closures_are_caught(tmp_path: Path) -> None:
    found: list[str] = []
    with Player(tmp_path, forgetful=True) as player:
        for seed in range(0, 60, 6):  # any staleness, no errors, no backup workers
            faults = [
                Fault(w, 0.01 * i, "lose_answers", f"ps {i % 2}", 0.02)
                for w in (1, 2)
                for i in range(4)
            ]
            history = player.play(random_plan(seed), Schedule(seed, tuple(faults)))
            found = [text for text in closure_violations(history) if "counts 2 times" in text]
            if found:
                break
    assert found, "a closure counted twice, and nobody noticed"


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(1000, 1300))
def test_histories_of_many_faults(player: Player, seed: int) -> None:
    check(player, seed)
