"""`model.fit`: Phalanx beside keras.distribution, plain Keras on one device, and tf.keras.

``python benchmarks/keras.py`` makes an environment for TensorFlow on first use (see `peers.py`), trains
an MLP and a small CNN with BatchNormalization side by side, prints a table and writes it to
``benchmarks/results/keras.md``. Each variant is a child process (see `_keras_fit.py`), and one of them
computes at a time. Before anything is timed, all variants train an epoch from the same seed. Those that
use the whole batch for batch statistics must have the same loss.
"""

from __future__ import annotations

import statistics
import sys

import _harness as harness
from _harness import Child, Variant, median_and_spread

PHALANX = Variant("phalanx", "Phalanx")
DATA_PARALLEL = Variant("data_parallel", "keras DataParallel")
PLAIN = Variant("plain", "plain Keras, one device")
TENSORFLOW = Variant("tensorflow", "tf.keras, MirroredStrategy", peer="tensorflow")
VARIANTS = (PHALANX, DATA_PARALLEL, PLAIN, TENSORFLOW)

MODELS = {"mlp": "MLP", "cnn": "CNN"}
REPLICAS = (2, 4, 8)
BATCH, STEPS = 256, 8
LOSS_TOLERANCE = 1e-3

NOTES = """\
Milliseconds per step of 256 rows: the median over rounds of an epoch of eight steps each, with its
callbacks and its input from NumPy arrays. Ratios are Phalanx's time over another's, round by round: the
median and the range; below 1 Phalanx is faster. The MLP is 784-512-512-10, the CNN has two convolutions
with BatchNormalization. Replicas are logical CPU devices of one machine: more make nothing faster."""


def measure(
    model: str, replicas: int, rounds: int, variants: list[Variant], versions: list[str]
) -> dict[Variant, list[float]]:
    """Milliseconds per step of each variant, by round."""

    def start(variant: Variant) -> Child:
        script = str(harness.HERE / "_keras_fit.py")
        arguments = ["-P", script, variant.key, model, str(replicas)]
        return Child(f"{variant.name} ({model}, {replicas})", variant.python, arguments)

    with harness.started(variants, start, versions) as children:
        losses = {v.name: child.run(STEPS).loss for v, child in children.items() if v.peer is None}
        harness.check_same(f"{model} on {replicas}", losses, LOSS_TOLERANCE)
        for child in children.values():
            child.run(STEPS)
        found: dict[Variant, list[float]] = {v: [] for v in variants}
        for done in harness.take_turns(children, rounds, dict.fromkeys(variants, STEPS)):
            for v, turn in done.items():
                found[v].append(turn.milliseconds)
        return found


def report(rounds: int, variants: list[Variant]) -> str:
    """Measure everything, and say what was found."""
    others = [v for v in variants if v is not PHALANX]
    rows = [
        [
            "model",
            "replicas",
            *(f"{v.name}, ms" for v in variants),
            "Phalanx, examples/s",
            *(f"Phalanx / {v.name}" for v in others),
        ]
    ]
    versions: list[str] = []
    for model, name in MODELS.items():
        for replicas in REPLICAS:
            times = measure(model, replicas, rounds, variants, versions)
            medians = {v: statistics.median(x) for v, x in times.items()}
            rows.append(
                [
                    name,
                    str(replicas),
                    *(f"{medians[v]:.1f}" for v in variants),
                    f"{1000 * BATCH / medians[PHALANX]:.0f}",
                    *(median_and_spread(harness.ratios(times[PHALANX], times[v])) for v in others),
                ]
            )
            harness.say(" ".join(rows[-1]))
    table = harness.markdown_table(rows)
    where = harness.circumstances(versions)
    return f"# model.fit\n\n{NOTES}\n\n{table}\n\n{where}\n{rounds} rounds.\n"


def main() -> int:
    parser = harness.options_parser("Compare ways to train Keras models.", 12, ["tensorflow"])
    options = harness.parse(parser)
    variants = harness.wanted(VARIANTS, options.peers)
    return harness.finish("keras.md", lambda: report(options.rounds, variants), not options.quick)


if __name__ == "__main__":
    sys.exit(main())
