"""A worker of an elastic job that trains nothing: it speaks with the door as a real one would.

It needs no JAX, so that jobs of it start in a moment. Run by test_elastic_jobs.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

from phalanx.job.device_connections import cut_all
from phalanx.job.elastic.visitor import NUMBER, GenerationEntry, Released, Visitor
from phalanx.job.hub.client import Member

DEADLINE = 60.0  # seconds


def wait_for(path: Path, age: float = 0.0) -> None:
    """Wait until another process has made a file, and some seconds have passed since."""
    end = time.monotonic() + DEADLINE
    while not (path.exists() and time.time() - path.stat().st_mtime >= age):
        assert time.monotonic() < end, f"{path} has not come"
        threading.Event().wait(0.01)


def compute(seconds: float) -> None:
    """In native code that holds Python's lock, so that no thread can answer."""
    begun = time.process_time()
    sum(range(5_000_000))
    sum(range(int(5_000_000 * seconds / (time.process_time() - begun))))


def main(folder: Path, plan: str) -> int:
    """Go through generations; `plan` says what this worker does in which of them."""
    number = int(os.environ[NUMBER])
    deeds = dict(word.split("=") for word in plan.split(",") if word)
    if deeds.get(f"{number}.0"):  # before it can take notices
        os.kill(os.getpid(), int(deeds[f"{number}.0"]) - 128)
    visitor = Visitor.find()
    assert visitor is not None
    signal.signal(signal.SIGTERM, lambda *_: visitor.leave())
    stop = threading.Event()
    visitor.on_stop(stop.set)
    visitor.arrive(recoverable="checkpoint" in deeds)
    while True:
        answer = visitor.wait()
        if isinstance(answer, Released):
            print(f"{number} may go: {answer.why}", flush=True)
            if deeds.get(f"{number}.gone") == "freeze":
                os.kill(os.getpid(), signal.SIGSTOP)
            if deeds.get(f"{number}.gone") == "compute":
                compute(1.6)
            return 143 if answer.why == "left" else 0
        assert isinstance(answer, GenerationEntry)
        print(
            f"{number} in {answer.generation}: {', '.join(answer.names)}; {answer.reason}", flush=True
        )
        (folder / f"{number}.{answer.generation}").touch()
        deed = deeds.get(f"{number}.{answer.generation}", "")
        if deed.isdigit():  # an exit code, or a signal
            for name in answer.names:
                wait_for(folder / f"{name.split()[1]}.{answer.generation}")
            (folder / "lost").touch()
            os.kill(os.getpid(), int(deed) - 128) if int(deed) > 128 else os._exit(int(deed))
        if deed == "freeze":
            (folder / "lost").touch()
            os.kill(os.getpid(), signal.SIGSTOP)
        if deed == "busy":  # until another one has waited for longer than for one that is frozen
            wait_for(folder / "waits", age=1.5)
        if deed == "compute":
            wait_for(folder / "lost")
            compute(1.6)
        if deed == "cut":  # and what is told next must arrive all the same
            cut_all()
        if deed in ("notice", "cut"):
            os.kill(os.getpid(), signal.SIGTERM)
        if deed in ("halt", "end", "miss"):  # meet the others, and then freeze or come to the end
            member = Member(str(answer.hub), os.environ["PHALANX_TOKEN"], "worker", answer.rank)
            member.wait_joined(DEADLINE)
            (folder / f"met.{number}").touch()
            if deed == "halt":
                os.kill(os.getpid(), signal.SIGSTOP)
            if deed == "miss":  # the end that another one has come to
                wait_for(folder / "finished")
                for name in answer.names:
                    wait_for(folder / f"met.{name.split()[1]}")
                os.kill(os.getpid(), signal.SIGKILL)
            member.come_to_end(0.5)
        if deed in ("finish", "end", "fall"):
            visitor.finished(answer.generation)
            (folder / "finished").touch()
            if visitor.wait_for_end() is not None:
                if deed == "fall":  # in what the program does after the training
                    os.kill(os.getpid(), signal.SIGKILL)
                return 0
        elif deed in ("lose", "busy", "compute"):  # as if the hub had told that another worker is gone
            wait_for(folder / "lost")
            (folder / "waits").touch()
        else:
            assert stop.wait(DEADLINE), "no one has asked this worker to stop"
        stop.clear()
        visitor.stopped(answer.generation, holds="spread" not in deeds)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
