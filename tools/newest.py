"""Runs the test suite on a newer Python and the newest JAX that Phalanx accepts.

``python tools/newest.py`` looks for Python 3.13, 3.14 or 3.12: the interpreter that the environment
variable PHALANX_NEWEST_PYTHON names, one on the PATH, or one of pyenv. If there is none, and this is
root on a machine with debootstrap, it makes a small Debian system in build/newest, which has one. Where
no interpreter or no package is to be had, it says so and ends with exit code 0.

Debian's system runs in name spaces of its own: what is mounted and what is started there ends with it.
Arguments after ``--`` go to pytest. Only the standard library is needed here.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HOME = ROOT / "build" / "newest"
GIVEN = "PHALANX_NEWEST_PYTHON"

PYTHONS = ("3.13", "3.14", "3.12")
SUITE = "trixie"  # the Debian that has the first of them
PYTEST = ("-n", "2", "--dist", "worksteal", "-q", "-m", "not soak and not ray")

PROBE_DEADLINE = 60.0
SYSTEM_DEADLINE = 1800.0
INSTALL_DEADLINE = 1800.0
TESTS_DEADLINE = 4 * 3600.0

# What a system needs of this machine to reach the same package indexes in the same way.
NETWORK_FILES = ("/etc/resolv.conf", "/etc/hosts", "/etc/pip.conf", "/etc/xdg/pip/pip.conf")
NETWORK_HOMES = (".config/pip/pip.conf", ".pip/pip.conf")
NETWORK_VARIABLES = ("PIP_CONFIG_FILE", "PIP_CERT", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE")

# Mounts and processes that no other process sees, and that end together.
APART = ("unshare", "--mount", "--pid", "--fork", "--kill-child")
INSIDE = """
set -e
mount --rbind /dev "$1/dev"
mount -t proc proc "$1/proc"
mount --bind "$2" "$1/phalanx"
exec chroot "$1" /usr/bin/env --chdir=/phalanx "${@:3}"
"""


class Unavailable(RuntimeError):
    """There is no interpreter, or no way to the packages."""


@dataclass(frozen=True)
class Place:
    """Where commands run: here, or in a Debian system below a folder."""

    python: str
    system: Path | None = None
    venv: str = field(default="", kw_only=True)

    def command(self, *words: str) -> list[str]:
        """A command line that runs `words` there, in the project's folder."""
        if self.system is None:
            return list(words)
        return [*APART, "bash", "-c", INSIDE, "bash", str(self.system), str(ROOT), *words]

    @property
    def venv_python(self) -> str:
        """The interpreter that has everything installed."""
        return f"{self.venv}/bin/python"


# -- finding an interpreter -----------------------------------------------------------------------


def interpreter(versions: Sequence[str]) -> str | None:
    """The first interpreter that runs and can make environments."""
    given = os.environ.get(GIVEN)
    if given:
        if not _runs(given, ""):
            raise SystemExit(f"{GIVEN} must be a Python interpreter. Received: {given}")
        return given
    for version in versions:
        for found in (shutil.which(f"python{version}"), _of_pyenv(version)):
            if found is not None and _runs(found, version):
                return found
    return None


def _runs(python: str, version: str) -> bool:
    code = "import ensurepip, sys, venv; print('%d.%d.' % sys.version_info[:2])"
    said = _output([python, "-c", code])
    return said is not None and said.startswith(version)


def _of_pyenv(version: str) -> str | None:
    """Pyenv puts every version on the PATH, but only the chosen one runs there."""
    if shutil.which("pyenv") is None:
        return None
    have = (_output(["pyenv", "versions", "--bare"]) or "").split()
    newest = [name for name in have if name.startswith(version + ".")][-1:]
    prefix = _output(["pyenv", "prefix", *newest]) if newest else None
    return f"{prefix}/bin/python{version}" if prefix else None


def _output(command: Sequence[str]) -> str | None:
    """What a command prints, or None if it fails."""
    try:
        done = subprocess.run(
            command, check=True, capture_output=True, text=True, timeout=PROBE_DEADLINE
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


# -- a Debian system ------------------------------------------------------------------------------


def debian(suite: str) -> Path:
    """The folder of a Debian system with Python; made on first use."""
    for tool in ("unshare", "chroot", "debootstrap"):
        if shutil.which(tool) is None:
            raise Unavailable(f"{tool} is not installed")
    if os.geteuid() != 0:
        raise Unavailable("a Debian system takes root")
    system = HOME / suite
    if not (system / "phalanx").exists():
        _say(f"Making a Debian system in {system.relative_to(ROOT)}; this takes a few minutes")
        shutil.rmtree(system, ignore_errors=True)  # left behind by an interrupted run
        system.mkdir(parents=True)
        make = ["debootstrap", "--variant=minbase", "--include=python3,python3-venv,ca-certificates"]
        _run([*APART, *make, suite, str(system), *_mirror()], SYSTEM_DEADLINE)
        # The project's folder, seen from inside; also the mark that everything is there.
        (system / "phalanx").mkdir()
    _connect(system)
    return system


def _mirror() -> list[str]:
    """The mirror that this machine's apt is configured with; none leaves the choice to debootstrap."""
    asked = ["apt-get", "indextargets", "--format", "$(LABEL) $(REPO_URI)", "Created-By: Packages"]
    lines = (_output(asked) or "").splitlines()
    return [uri for label, uri in (line.split(" ", 1) for line in lines) if label == "Debian"][:1]


def _connect(system: Path) -> None:
    """Give the system this machine's settings of the network and of pip."""
    files = [*NETWORK_FILES, *(str(Path.home() / name) for name in NETWORK_HOMES)]
    files += [os.environ[name] for name in NETWORK_VARIABLES if name in os.environ]
    for file in files:
        if Path(file).is_file():
            inside = system / Path(file).relative_to("/")
            inside.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, inside)


# -- packages and tests ---------------------------------------------------------------------------


def find_place(suite: str | None, versions: Sequence[str]) -> Place:
    """Where to run; the first interpreter that there is, or else a Debian system."""
    python = None if suite else interpreter(versions)
    if python is not None:
        version = _output([python, "-c", "import platform; print(platform.python_version())"])
        return Place(python, venv=str(HOME / f"python-{version}"))
    system = debian(suite or SUITE)
    return Place("python3", system, venv="/venv")


def install(place: Place, jax: str | None) -> None:
    """Install the package with its tools, and the newest or the given JAX, in an environment there."""
    _run(place.command(place.python, "-m", "venv", place.venv), INSTALL_DEADLINE)
    pip = (place.venv_python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    _say("Installing packages; this takes a few minutes")
    _run(place.command(*pip, "--upgrade", "pip"), INSTALL_DEADLINE)
    wanted = f"jax=={jax}" if jax else "jax"
    _run(place.command(*pip, "--upgrade", "-e", ".[dev]", wanted), INSTALL_DEADLINE)


def run_tests(place: Place, arguments: Sequence[str]) -> int:
    """Say which versions are tested, and test them."""
    code = (
        "import platform, jax, numpy; print('Python', platform.python_version(), '· JAX', "
        "jax.__version__, '· NumPy', numpy.__version__, flush=True)"
    )
    subprocess.run(
        place.command(place.venv_python, "-c", code), cwd=ROOT, check=True, timeout=PROBE_DEADLINE
    )
    tests = place.command(place.venv_python, "-m", "pytest", *arguments)
    return subprocess.run(tests, cwd=ROOT, check=False, timeout=TESTS_DEADLINE).returncode


def _run(command: Sequence[str], deadline: float) -> None:
    try:
        done = subprocess.run(
            command,
            check=False,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=deadline,
        )
    except subprocess.TimeoutExpired as late:
        raise Unavailable(f"{command[0]} was not done after {deadline:.0f} s") from late
    if done.returncode:
        last = "\n".join(done.stdout.strip().splitlines()[-5:])
        raise Unavailable(f"{command[0]} ended with exit code {done.returncode}:\n{last}")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    """Parse the command line, and run."""
    parser = argparse.ArgumentParser(description="Run the tests on a newer Python and the newest JAX.")
    parser.add_argument("--python", choices=PYTHONS, help="take only this version")
    parser.add_argument("--debian", metavar="SUITE", help="take the Python of this Debian")
    parser.add_argument("--jax", metavar="VERSION", help="take this JAX rather than the newest")
    parser.add_argument("pytest", nargs="*", help="arguments of pytest, after --")
    options = parser.parse_args()
    try:
        place = find_place(options.debian, [options.python] if options.python else PYTHONS)
        install(place, options.jax)
    except Unavailable as reason:
        _say(f"Skipped: there is no newer Python with the newest JAX here, because {reason}")
        _say(f"Put python{PYTHONS[0]} on the PATH, or run as root with debootstrap and a network.")
        return 0
    return run_tests(place, options.pytest or PYTEST)


if __name__ == "__main__":
    sys.exit(main())
