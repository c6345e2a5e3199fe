"""Whole jobs with parameter servers, as users start them: with `phalanx run`, or one task at a time."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

from tests.launching import run_script

from phalanx.job.launch.ports import PortReservation

SERVE = """
import os, signal, sys
import numpy as np
import phalanx as px

resolver = px.cluster_resolver.TFConfigClusterResolver()
if resolver.task_type in ("worker", "ps"):
    px.Server(resolver.cluster_spec(), resolver.task_type, resolver.task_id).join()
    sys.exit()

def coordinator_of(**options):
    options = px.experimental.ParameterServerOptions(**options)
    strategy = px.ParameterServerStrategy(resolver, options=options)
    return strategy, px.coordinator.ClusterCoordinator(strategy)

def status_of(index):
    client = px.rpc.Client.create("grpc", resolver.cluster_spec().task_address("ps", index))
    try:
        return client.status_blocking()
    finally:
        client.close()
"""


def run(folder: Path, program: str, **tasks: int) -> subprocess.CompletedProcess[str]:
    script = folder / "train.py"
    script.write_text(SERVE + textwrap.dedent(program))
    return run_script(script, folder=folder, env={"COLUMNS": "200"}, **tasks)


def test_a_server_that_dies_comes_back_with_everything(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        """
        strategy, coordinator = coordinator_of(durability="log", server_timeout=60.0)
        with strategy.scope():
            counts = [px.Variable(0, name=f"count{i}") for i in range(2)]

        @px.function
        def step():
            for count in counts:
                count.assign_add(1)

        for i in range(300):
            coordinator.schedule(step)
            if i == 150:
                os.kill(status_of(1)["pid"], signal.SIGKILL)
        coordinator.join()
        print([int(count) for count in counts], flush=True)
        from phalanx.cli import main
        print("explained:", main(["explain"]), flush=True)
        """,
        workers=2,
        ps=2,
        restarts=1,
    )
    assert done.returncode == 0, done.stderr
    assert "[chief 0] [300, 300]\n" in done.stdout
    shown = re.sub(r"\[chief 0\] ", "", done.stdout)
    assert re.search(r"chief 0 +coordinates +0 queued, 0 in flight, 0 in doubt, 300 done", shown)
    assert len(re.findall(r"ps \d +serves +1 variables, 4 B held, \d+ updates", shown)) == 2
    assert len(re.findall(r"worker \d +works +\d+ functions run", shown)) == 2
    assert len(re.findall(r"worker \d +up +0 ", shown)) == 2
    assert "explained: 0" in shown
    assert re.search(r"ps 1 was killed by signal 9 .* It is started again \(1\)", done.stderr)
    assert not list((tmp_path / "state" / "phalanx" / "jobs").iterdir())  # nothing is left behind


def test_a_server_that_keeps_nothing_is_named(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        """
        strategy, coordinator = coordinator_of(server_timeout=20.0)
        with strategy.scope():
            count = px.Variable(0)
        os.kill(status_of(0)["pid"], signal.SIGKILL)
        coordinator.schedule(px.function(lambda: count.assign_add(1)))
        try:
            coordinator.join()
        except px.errors.UnavailableError as error:
            print(error, flush=True)
        """,
        ps=1,
        restarts=1,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"ps task 0, .* kept nothing", done.stdout)


def test_tasks_that_are_started_by_hand_in_any_order(tmp_path: Path) -> None:
    """The chief first, and a server last; the servers are told to stop at the end."""
    script = tmp_path / "train.py"
    script.write_text(
        SERVE
        + textwrap.dedent(
            """
            strategy, coordinator = coordinator_of()
            with strategy.scope():
                v = px.Variable(1.0)
            value = coordinator.schedule(px.function(lambda: v.assign_add(1.0)))
            coordinator.join()
            print(float(v), flush=True)
            coordinator.close()
            for job in ("worker", "ps"):
                address = resolver.cluster_spec().task_address(job, 0)
                client = px.rpc.Client.create("grpc", address)
                client.stop_blocking()
                client.close()
            """
        )
    )
    with PortReservation(3) as reservation:
        jobs = ("chief", "worker", "ps")
        cluster = {job: [f"127.0.0.1:{p}"] for job, p in zip(jobs, reservation.ports, strict=True)}
        processes = {}
        try:
            for job in jobs:
                config = {"cluster": cluster, "task": {"type": job, "index": 0}}
                processes[job] = subprocess.Popen(
                    [sys.executable, str(script)],
                    env={
                        **os.environ,
                        "TF_CONFIG": json.dumps(config),
                        "XDG_RUNTIME_DIR": str(tmp_path),
                        "JAX_PLATFORMS": "cpu",
                    },
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            outputs = {job: process.communicate(timeout=120) for job, process in processes.items()}
        finally:
            for process in processes.values():
                if process.poll() is None:
                    process.kill()
                    process.communicate()
    assert {job: process.returncode for job, process in processes.items()} == dict.fromkeys(jobs, 0)
    assert outputs["chief"][0] == "2.0\n"


def test_a_task_that_is_missing_is_named(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        SERVE
        + textwrap.dedent(
            """
            strategy, coordinator = coordinator_of(worker_timeout=1.0, server_timeout=1.0)
            """
        )
    )
    with PortReservation(3) as reservation:
        chief, worker, ps = (f"127.0.0.1:{port}" for port in reservation.ports)
        cluster = {"chief": [chief], "worker": [worker], "ps": [ps]}
        config = {"cluster": cluster, "task": {"type": "chief", "index": 0}}
        done = subprocess.run(
            [sys.executable, str(script)],
            env={**os.environ, "TF_CONFIG": json.dumps(config), "XDG_RUNTIME_DIR": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    assert done.returncode != 0
    assert ps in done.stderr.splitlines()[-1]
