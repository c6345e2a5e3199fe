"""Runs one process of a job on this host, for a launcher on another: ``python -m`` this module.

The first line of the standard input says what to start; each further line names a signal to send to it.
When the input ends, the connection to the launcher is gone, and the process is ended.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading

from phalanx.job.launch import guard
from phalanx.job.launch.worker_process import Guard, shell_code

NO_START = 126
"""The exit code if the process cannot be started, as of a shell."""


def main() -> int:
    """Start the process and follow it; returns its exit code as a shell gives it."""
    order = json.loads(sys.stdin.readline())
    with Guard() as own_guard:
        mark = own_guard.mark
        try:
            process = subprocess.Popen(
                order["argv"],
                env={**os.environ, **order["environ"], guard.MARK: mark},
                cwd=order["cwd"],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            print(f"The process cannot be started: {error}", file=sys.stderr)
            return NO_START
        guard.mark_process(process.pid, mark)
        own_guard.watch(process.pid)
        threading.Thread(target=_follow, args=(process.pid, mark), daemon=True).start()
        code = process.wait()
        guard.send_to_group(process.pid, signal.SIGKILL)
        guard.send_to_marked(mark, signal.SIGKILL)
    return shell_code(code)


def _follow(group: int, mark: str) -> None:
    for line in sys.stdin:
        name = line.strip()
        if name in signal.Signals.__members__:
            guard.send_to_group(group, signal.Signals[name])
    guard.end_all(mark, [group])


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # the thread that follows the input may hold it
