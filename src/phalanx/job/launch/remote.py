"""Processes on other hosts, over ssh.

On each host runs an *agent* (`phalanx.job.launch.agent`), which ssh connects to us. It is told what
to start and which signals to send through its standard input, so that the job's token is in no
command line, and so that the process ends when the connection does.
"""

from __future__ import annotations

import json
import shlex
import signal
import socket
from collections import Counter
from collections.abc import Mapping, Sequence

from phalanx.errors import InvalidValueError, UnavailableError
from phalanx.runtime.formatting import shown

FIRST_PORT = 12_300
"""The port of the first task on a host whose port was not given."""

_SIGNALS = range(128 + 1, 128 + 32)  # exit codes, in a shell, of processes that a signal has ended


def parse_hosts(text: str, count: int) -> tuple[list[str], list[str]]:
    """The hosts that `count` tasks are started on, and the tasks' addresses.

    Hosts are separated by commas; each may have the user to log in as in front and the port of its task
    at the end. If there are more tasks than hosts, the hosts are used again from the first on.

    >>> parse_hosts("me@a,b:2222", 3)
    (['me@a', 'b', 'me@a'], ['a:12300', 'b:2222', 'a:12301'])
    """
    listed = [host.strip() for host in text.split(",")]
    if not all(listed) or any(host.startswith("-") or len(host.split()) > 1 for host in listed):
        raise InvalidValueError(
            "Hosts are names with commas between them, such as 'a,b' or 'me@a,b:2222'. "
            f"Received: {shown(text)}"
        )
    used: Counter[str] = Counter()
    logins, addresses = [], []
    for i in range(count):
        login, _, port = listed[i % len(listed)].partition(":")
        host = login.rpartition("@")[2]
        if not host or (port and not port.isdigit()):
            raise InvalidValueError(
                "A host is a name, or a name and a port, such as 'a' or 'a:2222'. "
                f"Received: {shown(text)}"
            )
        logins.append(login)
        addresses.append(f"{host}:{int(port or FIRST_PORT) + used[host]}")
        used[host] += 1
    return logins, addresses


def agent_command(ssh: str, host: str, python: str) -> list[str]:
    """The command that starts an agent on a host."""
    return [*shlex.split(ssh), host, "--", shlex.join([python, "-m", "phalanx.job.launch.agent"])]


def agent_order(argv: Sequence[str], environ: Mapping[str, str], cwd: str) -> str:
    """What the agent is told first: one line of JSON."""
    return json.dumps({"argv": list(argv), "environ": dict(environ), "cwd": cwd})


def code_from_agent(code: int) -> int:
    """The exit code of a process on another host, -n if signal n ended it, from that of its agent.

    Agents can only say it as a shell does. 143 stays: it is also what programs end with that leave.

    >>> code_from_agent(3), code_from_agent(138), code_from_agent(143), code_from_agent(255)
    (3, -10, 143, 255)
    """
    return 128 - code if code in _SIGNALS and code != 128 + signal.SIGTERM else code


def shell_text(argv: Sequence[str], environ: Mapping[str, str], cwd: str | None = None) -> str:
    """A command for people to read, as they would type it; secrets are left out.

    >>> shell_text(["python", "train.py"], {"TF_CONFIG": "{}", "PHALANX_TOKEN": "secret"}, "/data")
    "cd /data && TF_CONFIG='{}' PHALANX_TOKEN=… python train.py"
    """
    shown = {k: "…" if k == "PHALANX_TOKEN" else shlex.quote(v) for k, v in environ.items()}
    words = [*(f"{k}={v}" for k, v in shown.items()), shlex.join(argv)]
    place = f"cd {shlex.quote(cwd)} && " if cwd else ""
    return place + " ".join(words)


def own_address(host: str) -> str:
    """The address of this machine that another host can reach; nothing is sent to it."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))
            return str(probe.getsockname()[0])
    except OSError as error:
        raise UnavailableError(
            f"There is no way to this host: {error.strerror or error}. Received: {shown(host)}"
        ) from error
