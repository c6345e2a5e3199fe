"""Jobs whose processes Ray places. `make test-ray` runs those that need Ray."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.job.launch.test_launcher import TASK, View
from tests.processes import wait_gone

import phalanx as px
from phalanx.cli import main
from phalanx.job.hub.descriptions import Task
from phalanx.job.launch.exit_policy import Patience
from phalanx.job.launch.launcher import Job, run_job
from phalanx.job.launch.ray_engine import RayOptions, parse_resources
from phalanx.job.launch.task_environment import job_tasks

TASKS = 6


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


# -- without Ray ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "word", ["GPU=1", "worker:", "worker:GPU", "worker:GPU=x", "worker:GPU=-1", ":CPU=1"]
)
def test_resources_that_make_no_sense(word: str) -> None:
    with pytest.raises(ValueError, match="worker:GPU=1"):
        parse_resources([word])


def test_a_task_needs_a_processor_unless_told_otherwise() -> None:
    options = RayOptions(resources=parse_resources(["worker:GPU=1", "worker:CPU=4", "ps:CPU=0.5"]))
    assert options.bundle(Task("worker", 0)) == {"CPU": 4.0, "GPU": 1.0}
    assert options.bundle(Task("ps", 0)) == {"CPU": 0.5}
    assert options.bundle(Task("chief", 0)) == {"CPU": 1.0}


def test_what_is_asked_of_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.touch()
    assert main(["run", "--engine", "ray", "--hosts", "a", str(script)]) == 2
    assert "Ray places" in capsys.readouterr().err
    assert main(["run", "--engine", "ray", "--dry-run", "-n", "1", "--ps", "1", str(script)]) == 0
    assert [x for x in capsys.readouterr().out.splitlines() if x.startswith("#")] == [
        "# chief 0",
        "# worker 0",
        "# ps 0",
    ]


def test_the_engine_needs_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    script = tmp_path / "train.py"
    script.touch()
    assert main(["run", "--engine", "ray", str(script)]) == 2
    assert "phalanx[ray]" in capsys.readouterr().err


# -- with Ray -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    import ray

    ray.init(
        num_cpus=TASKS,
        include_dashboard=False,
        object_store_memory=100 << 20,
        log_to_driver=False,
        configure_logging=False,
    )
    yield ray
    ray.shutdown()


def ray_job(program: str, folder: Path, tasks: list[Task], **options: Any) -> Job:
    argv = [sys.executable, "-S", "-c", TASK + textwrap.dedent(program), str(folder)]
    patience = Patience(peers=0.5, interrupt=0.5, terminate=5, kill=5, finish=5)
    ray_options = RayOptions(timeout=options.pop("room", 30.0))
    return Job(argv, tasks, "test.py", environ={}, patience=patience, ray=ray_options, **options)


@pytest.mark.ray
def test_a_job_on_ray_whose_worker_dies(ray: Any, tmp_path: Path) -> None:
    view = View()
    outcome = run_job(
        ray_job(
            """
            print(me, count, flush=True)
            if me == "chief 0":
                wait_for("worker 1")
                print("to stderr", file=sys.stderr)
            elif me == "worker 1" and count == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            else:
                note(me)
                serve()
            """,
            tmp_path,
            job_tasks(2, 1, chief=True),
            restarts=1,
        ),
        view,
    )
    assert outcome.exit_code == 0
    assert view.changes == ["worker 1 again: -9, 1"]
    assert {"chief 0 0", "worker 1 0", "worker 1 1"} <= set(view.printed())
    assert "to stderr" in [line for _, error, line in view.lines if error]
    everything = ray.util.placement_group([{"CPU": 1}] * TASKS)
    assert everything.wait(60), "not all was given back"
    ray.util.remove_placement_group(everything)


@pytest.mark.ray
def test_an_actor_that_dies_takes_its_process_along(ray: Any, tmp_path: Path) -> None:
    class Killing(View):
        def line(self, index: int, error: bool, line: bytes) -> None:
            super().line(index, error, line)
            if line.startswith(b"actor ") and len(self.pids) == 0:
                self.pids += [int(word) for word in line.split()[1:]]
                os.kill(self.pids[0], signal.SIGKILL)

        pids: list[int] = []  # noqa: RUF012 - one object

    view = Killing()
    program = """
        if me == "worker 0":
            print("actor", os.getppid(), os.getpid(), flush=True)
            if count == 1:
                note("back")
            serve()
        if me == "chief 0":
            wait_for("back")
        else:
            serve()
        """
    job = ray_job(program, tmp_path, job_tasks(1, 1, chief=True), restarts=1)
    assert run_job(job, view).exit_code == 0
    assert view.changes == ["worker 0 again: -9, 1"]
    assert "The Ray actor of worker 0 is gone" in "".join(x for _, _, x in view.lines)
    assert wait_gone(view.pids) == []


@pytest.mark.ray
def test_a_job_that_fails_on_ray(ray: Any, tmp_path: Path) -> None:
    view = View()
    program = """
        if me == "worker 1":
            raise ValueError("the reason")
        serve()
        """
    outcome = run_job(ray_job(program, tmp_path, job_tasks(2)), view)
    assert outcome.exit_code == 1
    assert str(outcome.culprit) == "worker 1"
    assert outcome.report[-1] == "ValueError: the reason"


@pytest.mark.ray
def test_there_is_no_room(ray: Any, tmp_path: Path) -> None:
    job = ray_job("", tmp_path, job_tasks(TASKS + 1), room=0.5)
    with pytest.raises(px.errors.ResourceExhaustedError, match="worker 6"):
        run_job(job, View())


@pytest.mark.ray
def test_actors_of_ones_own_find_each_other(ray: Any) -> None:
    @ray.remote(num_cpus=1)
    class Member:
        def cluster(self) -> Any:
            from phalanx.cluster.resolvers.ray import RayClusterResolver

            resolver = RayClusterResolver({"worker": 2, "ps": 1}, name="own", timeout=60)
            return resolver.task_type, resolver.task_id, resolver.cluster_spec().as_dict()

    members = [Member.remote() for _ in range(3)]
    answers = ray.get([m.cluster.remote() for m in members], timeout=120)
    assert sorted(a[:2] for a in answers) == [("ps", 0), ("worker", 0), ("worker", 1)]
    assert answers[0][2] == answers[1][2] == answers[2][2]
    assert len(answers[0][2]["worker"]) == 2
    for member in members:
        ray.kill(member)
    resolver = px.cluster_resolver.RayClusterResolver({"worker": 2, "ps": 1}, "ps", 0, name="own")
    resolver.close()


MIRRORED = """
import jax.numpy as jnp
import phalanx as px

strategy = px.MultiWorkerMirroredStrategy(px.cluster_resolver.RayClusterResolver())

@px.function
def step():
    return strategy.run(lambda: px.get_replica_context().all_reduce("SUM", jnp.float32(3)))

total = strategy.experimental_local_results(step())[0]
print("total", float(total), strategy.num_replicas_in_sync, flush=True)
"""


@pytest.mark.ray
def test_workers_that_train_together_as_a_user_starts_them(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(MIRRORED)
    command = [sys.executable, "-m", "phalanx", "run", "--engine", "ray", "-n", "2"]
    done = subprocess.run(
        [*command, "--env", "JAX_PLATFORMS=cpu", "--devices-per-worker", "1", str(script)],
        env={k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
        | {"RAY_USAGE_STATS_ENABLED": "0", "XDG_RUNTIME_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[worker 0] total 6.0 2", "[worker 1] total 6.0 2"]
