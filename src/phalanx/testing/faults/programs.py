"""The programs of a laboratory's jobs: functions and scripts, in new processes or in copies of one."""

from __future__ import annotations

import faulthandler
import os
import pickle
import runpy
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from phalanx.job.launch.process_group import Command, Spawn
from phalanx.job.launch.worker_process import Guard, Running
from phalanx.runtime.laboratory import FOLDER
from phalanx.runtime.shipping import frame
from phalanx.testing.copies import Copy, Template, find_template

__all__ = ["call", "forking", "run_script"]


def call(packed: bytes, argv: Sequence[str] = ()) -> None:
    """Call a function as the main program of this process, and end it.

    Args:
        packed: the function and its arguments.
        argv: a command that does the same, for programs that start Python anew.
    """
    _become_program(argv)
    try:
        fn, args, kwargs = pickle.loads(packed)
        fn(*args, **kwargs)
    except Exception:  # noqa: BLE001 - it ends the process, as in any program
        sys.excepthook(*sys.exc_info())
        sys.exit(1)
    sys.exit(0)


def run_script(words: Sequence[str], cwd: str) -> None:
    """Run a script as the main program of this process, and end it."""
    _become_program([sys.executable, *words])
    os.chdir(cwd)
    sys.argv = list(words)
    sys.path[:0] = [str(Path(words[0]).parent)]
    try:
        runpy.run_path(words[0], run_name="__main__")
    except Exception:  # noqa: BLE001 - it ends the process, as in any program
        sys.excepthook(*sys.exc_info())
        sys.exit(1)
    sys.exit(0)


def _become_program(argv: Sequence[str]) -> None:
    """Undo what workers of tests have and programs of users have not."""
    faulthandler.unregister(signal.SIGUSR1)
    if argv:
        sys.orig_argv[:] = argv


class _Forked(Copy):
    """A copy of a process that runs a program, as launchers see processes."""

    def __init__(self, template: Template, command: Command, guard: Guard, packed: bytes) -> None:
        orders, self._orders = os.pipe()
        self._replies, replies = os.pipe()
        try:
            super().__init__(
                template, command.environ, guard, name=command.name, pass_fds=(orders, replies)
            )
        finally:
            os.close(orders)
            os.close(replies)
        _write_all(self._orders, frame(sys.path) + frame((1, packed)))

    def write(self, data: bytes) -> None:
        """Nothing: the standard input is empty."""

    def close(self) -> int | None:
        """Kill what is left of the process and its children, and forget it; returns the exit code."""
        for fd in (self._orders, self._replies):
            if fd >= 0:
                os.close(fd)
        self._orders = self._replies = -1
        return super().close()


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def forking(modules: Sequence[str], packed: bytes) -> Spawn:
    """Starts workers as copies of a process that has imported modules, and lets them call `packed`."""

    def spawn(index: int, command: Command, guard: Guard) -> Running:
        # The process that is copied outlives the job, and so must not have what is the job's own.
        environ = {name: x for name, x in command.environ.items() if name not in (FOLDER, "TMPDIR")}
        template = find_template([__name__, *modules], environ)
        assert template is not None, "this system cannot copy processes"
        return _Forked(template, command, guard, packed)

    return spawn


def main(path: str) -> None:
    """Call the function in a file, with the places where its process has found modules."""
    data = Path(path).read_bytes()
    size = 8 + int.from_bytes(data[:8], "big")
    sys.path[:] = pickle.loads(data[8:size])
    call(data[size:])


if __name__ == "__main__":
    main(sys.argv[1])
