"""Workers of `px.experimental.ParameterServerStrategy` that die, in real processes."""

from __future__ import annotations

import re
from pathlib import Path

from tests.launching import run_script

PROGRAM = """
import os, signal, subprocess, sys, time
import phalanx as px
from phalanx.parameter_server.server_link import ServerLink
from phalanx.parameter_server.wire import Kind

resolver = px.cluster_resolver.TFConfigClusterResolver()
if resolver.task_type == "ps":
    px.Server(resolver.cluster_spec(), "ps", resolver.task_id).join()
    sys.exit()

is_first_life = os.environ["PHALANX_RESTART"] == "0"
options = px.experimental.ParameterServerOptions(worker_timeout=60.0)
strategy = px.experimental.ParameterServerStrategy(resolver, options=options)
with strategy.scope():
    one, other = px.Variable(0), px.Variable(0)  # each on its own server
    chief = px.Variable(0)

@px.function
def add(n):
    one.assign_add(n)
    other.assign_add(n)

def wait_until(what):
    give_up = time.monotonic() + 60
    while not what():
        assert time.monotonic() < give_up, (int(one), int(other))

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def is_gone(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False

if resolver.task_type == "chief":
    if is_first_life:
        add(100)
        die()
    wait_until(lambda: int(one) == int(other) == 104)
    subprocess.run([sys.executable, "-m", "phalanx", "explain"], check=True, timeout=60)
    chief.assign(os.getpid())
    print("the chief is done", flush=True)
elif is_first_life:
    wait_until(lambda: int(one) == 100)
    for _ in range(3):
        add(1)
    send = ServerLink.flush

    def flush(link):
        if link.index == 0 and any(request[0][0] == Kind.COMMIT for request in link._held):
            die()
        send(link)

    ServerLink.flush = flush
    add(1)
else:
    wait_until(lambda: int(chief))
    wait_until(lambda: is_gone(int(chief)))
    for _ in range(5):
        add(1)
    print("after all", int(one), int(other), flush=True)
"""


def test_a_commit_of_a_worker_that_dies_counts_on_all_servers_and_the_job_waits_for_all(
    tmp_path: Path,
) -> None:
    script = tmp_path / "train.py"
    script.write_text(PROGRAM)
    done = run_script(script, folder=tmp_path, ps=2, restarts=1, env={"COLUMNS": "200"})
    assert done.returncode == 0, done.stderr
    assert re.search("worker 0 +trains +on its own", done.stdout), done.stdout
    assert "[chief 0] the chief is done\n" in done.stdout
    assert "[worker 0] after all 109 109\n" in done.stdout
    assert "All of them have now made its updates." in done.stderr
