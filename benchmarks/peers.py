"""Virtual environments for the libraries that benchmarks compare with, made on first use.

``python benchmarks/peers.py tensorflow`` makes the environment (or finds the one made before) and
prints its interpreter; ``torch``, ``grain`` and ``ray`` are the other peers. An interpreter that has
the library already can be given instead, in the environment variable PHALANX_BENCH_TENSORFLOW_PYTHON,
PHALANX_BENCH_TORCH_PYTHON, PHALANX_BENCH_GRAIN_PYTHON or PHALANX_BENCH_RAY_PYTHON.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

HOME = Path(__file__).resolve().parent.parent / ".venvs"

# For each peer, what to install; the first that can be installed is taken.
PEERS = {
    "tensorflow": ("tensorflow-cpu==2.21.0", "tensorflow==2.21.0"),
    "torch": ("torch==2.13.0 numpy",),
    "grain": ("grain==0.2.18 numpy",),
    # Phalanx itself runs beside Ray, from the sources.
    "ray": ("ray>=2.40 jax==0.10.2 numpy optax cloudpickle rich",),
}

VENV_DEADLINE = 300.0
INSTALL_DEADLINE = 1800.0


class BenchmarkError(RuntimeError):
    """The benchmark has no result."""


def say(text: str) -> None:
    """Progress goes to standard error."""
    print(text, file=sys.stderr, flush=True)


def peer_python(peer: str) -> Path:
    """The interpreter that has a peer installed; makes its environment if there is none."""
    variable = f"PHALANX_BENCH_{peer.upper()}_PYTHON"
    given = os.environ.get(variable)
    if given:
        # A virtual environment's interpreter is a link, which must not be followed.
        python = Path(os.path.abspath(given))
        if not os.access(python, os.X_OK):
            raise BenchmarkError(f"{variable} must be a Python interpreter. Received: {given}")
        return python
    home = HOME / peer
    python = home / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    stamp = home / ".installed"
    if python.exists() and stamp.exists() and stamp.read_text().strip() in PEERS[peer]:
        return python
    _make(home, python, stamp, PEERS[peer])
    return python


def _make(home: Path, python: Path, stamp: Path, requirements: tuple[str, ...]) -> None:
    say(f"Making a virtual environment in {home.relative_to(HOME.parent)}")
    if home.exists():
        shutil.rmtree(home)  # left behind by an installation that was interrupted
    _run([sys.executable, "-m", "venv", str(home)], VENV_DEADLINE)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    failures = []
    for requirement in requirements:
        say(f"Installing {requirement}; this takes a few minutes")
        try:
            _run([*pip, *requirement.split()], INSTALL_DEADLINE)
        except BenchmarkError as error:
            failures.append(str(error))
            continue
        stamp.write_text(requirement + "\n")
        return
    raise BenchmarkError("Nothing could be installed.\n" + "\n".join(failures))


def _run(command: list[str], deadline: float) -> None:
    what = " ".join(command[1:])
    try:
        done = subprocess.run(
            command,
            check=False,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=deadline,
        )
    except subprocess.TimeoutExpired as late:
        raise BenchmarkError(f"python {what}: not done after {deadline:.0f} s") from late
    if done.returncode:
        raise BenchmarkError(f"python {what}: exit code {done.returncode}\n{done.stdout.strip()}")


def main() -> int:
    parser = argparse.ArgumentParser(description="Make a peer's environment and print its interpreter.")
    parser.add_argument("peer", choices=sorted(PEERS))
    try:
        print(peer_python(parser.parse_args().peer))
    except BenchmarkError as error:
        say(str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
