"""Eager `strategy.run` of a training step: Phalanx beside TensorFlow.

``python benchmarks/eager.py`` makes an environment for TensorFlow on first use (see `peers.py`), runs
all variants side by side, prints a table and writes it to ``benchmarks/results/eager.md``.

Each variant is a child process with logical CPU devices of its own. The children stay alive; the parent
tells them in turn to run a round of steps, so that a busy spell of the machine hits all of them alike.
Every round starts from the same parameters, and the losses at its end must agree.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import platform
import selectors
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from peers import PeerError, peer_python

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "eager.md"

WARM_UP_STEPS = 20
LOSS_TOLERANCE = 1e-4

START_DEADLINE = 300.0
ROUND_DEADLINE = 120.0  # and two seconds for each step
STOP_DEADLINE = 10.0


@dataclass(frozen=True)
class Variant:
    """One way to write the step; `arguments` follow the number of replicas."""

    name: str
    script: str
    arguments: tuple[str, ...] = ()
    peer: str | None = None


TENSORFLOW = Variant("TensorFlow, eager", "_eager_tensorflow.py", peer="tensorflow")
VARIANTS = (
    TENSORFLOW,
    Variant("Phalanx, nothing compiled", "_eager_phalanx.py", ("plain",)),
    Variant("Phalanx, `jax.jit(jax.value_and_grad(loss))`", "_eager_phalanx.py", ("jit",)),
)


class BenchmarkError(RuntimeError):
    """The benchmark has no result."""


# -- children -----------------------------------------------------------------------------------


class Child:
    """A variant's process; a context manager that ends it."""

    def __init__(self, variant: Variant, replicas: int, python: Path) -> None:
        self.name = f"{variant.name} ({replicas} replicas)"
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by __exit__
        self._unread = b""
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "CUDA_VISIBLE_DEVICES": "-1",
            "TF_CPP_MIN_LOG_LEVEL": "2",
        }
        self._process = subprocess.Popen(
            [str(python), str(HERE / variant.script), str(replicas), *variant.arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            bufsize=0,
            env=environment,
        )

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self._end()
        finally:
            self._errors.close()

    def _end(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.terminate()
            self._process.wait(STOP_DEADLINE)
        except subprocess.TimeoutExpired:
            say(f"{self.name} does not stop within {STOP_DEADLINE:.0f} s and is killed")
            self._process.kill()
            self._process.wait(STOP_DEADLINE)
        finally:
            self._process.stdin.close()
            self._process.stdout.close()

    def send(self, **command: Any) -> None:
        """Give the child a command."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(command).encode() + b"\n")
        except BrokenPipeError:
            raise BenchmarkError(f"{self.name} is gone{self._last_words()}") from None

    def receive(self, what: str, deadline: float) -> dict[str, Any]:
        """The child's next answer, which must come within `deadline` seconds."""
        assert self._process.stdout is not None
        give_up = time.monotonic() + deadline
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._unread:
                left = give_up - time.monotonic()
                if left <= 0 or not selector.select(left):
                    late = f"{self.name}: no answer to '{what}' within {deadline:.0f} s"
                    raise BenchmarkError(late + self._last_words())
                read = os.read(self._process.stdout.fileno(), 65536)
                if not read:
                    raise BenchmarkError(f"{self.name} ended during '{what}'{self._last_words()}")
                self._unread += read
        line, self._unread = self._unread.split(b"\n", 1)
        return json.loads(line)

    def run(self, steps: int) -> tuple[float, float]:
        """A round: seconds for all steps, and the loss of the last one."""
        self.send(steps=steps)
        answer = self.receive(f"run {steps} steps", ROUND_DEADLINE + 2.0 * steps)
        return answer["seconds"], answer["loss"]

    def _last_words(self) -> str:
        self._errors.seek(0)
        text = self._errors.read().decode(errors="replace").strip()
        return ". It wrote:\n" + "\n".join(text.splitlines()[-20:]) if text else ", without a word"


# -- measuring ----------------------------------------------------------------------------------


@dataclass
class Measurement:
    """What one variant did with one number of replicas: milliseconds per step, by round."""

    variant: Variant
    replicas: int
    rounds: list[float] = field(default_factory=list)


def measure(
    replicas: int, rounds: int, steps: int, pythons: dict[Variant, Path]
) -> tuple[list[Measurement], list[str]]:
    """Run all variants side by side; returns what they took, and the versions in each environment."""
    versions: list[str] = []
    measurements = {v: Measurement(v, replicas) for v in VARIANTS}
    with ExitStack() as stack:
        say(f"{replicas} replicas: starting {len(VARIANTS)} processes")
        children = {v: stack.enter_context(Child(v, replicas, pythons[v])) for v in VARIANTS}
        for child in children.values():
            found = child.receive("start", START_DEADLINE)["versions"]
            listed = ", ".join(f"{name} {version}" for name, version in found.items())
            if listed not in versions:
                versions.append(listed)
        say(f"{replicas} replicas: warming up")
        losses = {v: child.run(WARM_UP_STEPS)[1] for v, child in children.items()}
        check_losses(losses, replicas, WARM_UP_STEPS)
        for i in range(rounds):
            turn = i % len(VARIANTS)
            for variant in VARIANTS[turn:] + VARIANTS[:turn]:
                seconds, losses[variant] = children[variant].run(steps)
                measurements[variant].rounds.append(1000 * seconds / steps)
            check_losses(losses, replicas, steps)
            times = ", ".join(f"{measurements[v].rounds[-1]:.2f}" for v in VARIANTS)
            say(f"{replicas} replicas: round {i + 1} of {rounds}: {times} ms per step")
    return list(measurements.values()), versions


def check_losses(losses: dict[Variant, float], replicas: int, steps: int) -> None:
    """Refuse to compare variants that do not compute the same thing."""
    expected = losses[TENSORFLOW]
    if all(math.isfinite(x) and abs(x - expected) <= LOSS_TOLERANCE for x in losses.values()):
        return
    listing = "\n".join(f"  {variant.name}: {loss:.6f}" for variant, loss in losses.items())
    raise BenchmarkError(
        f"With {replicas} replicas the losses after {steps} steps differ by more than "
        f"{LOSS_TOLERANCE:g}:\n{listing}"
    )


# -- reporting ----------------------------------------------------------------------------------


def table(measurements: Sequence[Measurement]) -> str:
    """All measurements as a Markdown table."""
    base = {m.replicas: m for m in measurements if m.variant is TENSORFLOW}
    rows = [["replicas", "variant", "ms per step", "min..max", "time relative to TensorFlow"]]
    for m in measurements:
        ratios = [a / b for a, b in zip(m.rounds, base[m.replicas].rounds, strict=True)]
        relative = f"{statistics.median(ratios):.2f} ({min(ratios):.2f}..{max(ratios):.2f})"
        rows.append(
            [
                str(m.replicas),
                m.variant.name,
                f"{statistics.median(m.rounds):.2f}",
                f"{min(m.rounds):.2f}..{max(m.rounds):.2f}",
                "1" if m.variant is TENSORFLOW else relative,
            ]
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["| " + " | ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)) + " |" for r in rows]
    lines.insert(1, "|" + "|".join("-" * (w + 2) for w in widths) + "|")
    return "\n".join(lines)


def report(
    measurements: Sequence[Measurement], versions: Sequence[str], rounds: int, steps: int
) -> str:
    """The whole result as Markdown."""
    replicas = " ".join(str(n) for n in dict.fromkeys(m.replicas for m in measurements))
    today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    return f"""# Eager training steps

{table(measurements)}

Measured: one `strategy.run` of a training step of the MLP 784-64-64-10 (float32, cross-entropy, SGD,
global batch of 64) under `MirroredStrategy` on logical CPU devices, in one process per variant. On each
replica: loss and gradients, `all_reduce` of the gradients, and one `merge_call` that updates every
variable with `strategy.extended.update` and `assign_sub`. No variant compiles the step as a whole
(there is no `tf.function`); the last one compiles the loss and its gradients, and nothing else.

{rounds} rounds of {steps} steps for each variant, taking turns, in an order that rotates. The time of a
round ends when all devices have finished. "ms per step" is the median over rounds. "time relative to
TensorFlow" is the median (and range) of the ratios to TensorFlow's time in the same round; below 1 is
faster. The losses of all variants agreed to {LOSS_TOLERANCE:g} at the end of every round.

{"; ".join(versions)}; {os.cpu_count()} CPUs, {platform.system()} {platform.machine()}; {today}.

To repeat: `python benchmarks/eager.py --rounds {rounds} --steps {steps} --replicas {replicas}`.
"""


def say(text: str) -> None:
    """Progress goes to standard error."""
    print(text, file=sys.stderr, flush=True)


def positive(text: str) -> int:
    """A positive number given on the command line."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1. Received: {text}")
    return number


def main() -> int:
    parser = argparse.ArgumentParser(description="Time eager training steps beside TensorFlow's.")
    parser.add_argument("--rounds", type=positive, help="rounds per variant (default 7)")
    parser.add_argument("--steps", type=positive, help="steps per round (default 50)")
    parser.add_argument("--replicas", type=positive, nargs="+", default=[2, 4], help="default 2 4")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="2 rounds of 5 steps, to see that everything works; the result is printed only",
    )
    options = parser.parse_args()
    rounds = options.rounds or (2 if options.quick else 7)
    steps = options.steps or (5 if options.quick else 50)
    measurements: list[Measurement] = []
    versions: list[str] = []
    try:
        pythons = {v: peer_python(v.peer) if v.peer else Path(sys.executable) for v in VARIANTS}
        for replicas in options.replicas:
            measured, versions = measure(replicas, rounds, steps, pythons)
            measurements += measured
    except (BenchmarkError, PeerError) as error:
        say(f"error: {error}")
        return 1
    text = report(measurements, versions, rounds, steps)
    print(text)
    if not options.quick:
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(text)
        say(f"Written to {RESULTS.relative_to(HERE.parent)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
