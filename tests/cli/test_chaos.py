"""`phalanx chaos` plays faults over a user's program, and says what went wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.cli import main
from phalanx.testing.faults import (
    ELASTIC_FAULTS,
    JobFault,
    JobHistory,
    JobRun,
    JobSchedule,
    JobVerdict,
    Laboratory,
    Life,
    random_job_schedule,
)

PROGRAM = """
import sys
from pathlib import Path
from phalanx.testing import faults

state = Path(sys.argv[1], "state")
done, total = map(int, state.read_text().split()) if state.exists() else (0, 0)
for i in range(DONE, 4):
    total += i + 1
    faults.record()
    fresh = state.with_name("fresh")
    fresh.write_text(f"{i + 1} {total}")
    fresh.replace(state)
faults.record(state={"total": float(total)})
"""
WORKERS, KINDS, STEPS, DEADLINE = 1, ["raise"], 4, 15.0
SEED = next(
    seed
    for seed in range(1000)
    for schedule in [random_job_schedule(seed, 1, kinds=KINDS, steps=STEPS, deadline=DEADLINE)]
    if [(x.phase, x.step) for x in schedule.faults] == [("record", 2)]
)


@pytest.mark.parametrize("start", ["0", pytest.param("done", marks=pytest.mark.soak)])
def test_a_program_is_judged(start: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One that goes on where it was is right; one that begins anew with an old total is not."""
    script, histories = tmp_path / "train.py", tmp_path / "histories"
    script.write_text(PROGRAM.replace("DONE", start))
    words = ["--schedules", "1", "-n", "1", "--faults", "raise", "--steps", "4", "--seed", str(SEED)]
    more = ["--history", str(histories), "--shrink", "0", str(script), "{folder}"]
    code = main(["chaos", *words, *more])
    shown = capsys.readouterr().out
    assert "raise" in shown
    assert f"seed {SEED}" in shown
    (history,) = histories.iterdir()
    assert history.name == f"seed-{SEED}.jsonl"
    if start == "done":
        assert code == 0, shown
        assert "1 of 1 schedules are right; 1 faults." in shown
        return
    assert code == 1
    assert "0 of 1 schedules are right" in shown
    assert "the final state of worker 0 differs from the undisturbed one: total. " in shown
    assert f"faults.JobSchedule({SEED}, 1, (" in shown


ELASTIC = """
import phalanx as px
from phalanx.testing import faults

def train(job):
    with job.strategy.scope():
        total = px.Variable(0.0)
    job.track(total=total)
    for batch in job.steps(px.data.Dataset.range(24)):
        faults.record(examples=batch)
        total.assign_add(float(job.strategy.reduce("SUM", batch, axis=0)))
    faults.record(state={"total": total})

px.train.elastic(train, batch_size=4)
"""


@pytest.mark.soak  # tests/testing/test_elastic_laboratory.py plays others
def test_an_elastic_program_is_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text(ELASTIC)
    words = ["--schedules", "2", "-n", "1:2", "--faults", "kill", "--deadline", "60"]
    assert main(["chaos", *words, str(script)]) == 0, capsys.readouterr().out
    shown = capsys.readouterr().out
    assert "2 of 2 schedules are right" in shown
    assert "no fault was reached" not in shown


@pytest.mark.parametrize("when", ["playing", "shrinking"])
def test_what_was_found_before_an_interrupt_is_shown(
    when: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule = JobSchedule(0, 1, (JobFault("kill", step=3), JobFault("kill", step=1)))
    history = JobHistory((Life(0, 0, ({"event": "step", "at": 1.0, "step": 0},)),))
    verdict = JobVerdict(JobRun(schedule, history, 1, 0.1), ("it is wrong",))
    played = iter([verdict, None])

    def play(*_: object) -> JobVerdict:
        found = next(played)
        if found is None:
            raise KeyboardInterrupt
        return found

    monkeypatch.setattr(Laboratory, "play", play)
    monkeypatch.setattr(Laboratory, "undisturbed", lambda *_: verdict.run)
    words = ["--schedules", "2" if when == "playing" else "1", "-n", "1", "--shrink", "5"]
    assert main(["chaos", *words, "train.py"]) == 1
    shown = capsys.readouterr().out
    assert "Interrupted" in shown
    assert "0 of 1 schedules are right" in shown
    assert "it is wrong" in shown
    assert "faults.JobSchedule(0, 1, (" in shown


def test_what_the_command_needs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chaos"]) == 2
    assert "which program" in capsys.readouterr().err
    assert main(["chaos", "--faults", "explode", "train.py"]) == 2
    assert "'explode'" in capsys.readouterr().err
    assert main(["chaos", "--workers", "1:2", "--faults", "explode", "train.py"]) == 2
    known = ", ".join(ELASTIC_FAULTS)
    assert f"--faults must be of {known}. Received: 'explode'" in capsys.readouterr().err
    assert main(["chaos", str(tmp_path / "none.py")]) == 2
    assert "no such file" in capsys.readouterr().err
