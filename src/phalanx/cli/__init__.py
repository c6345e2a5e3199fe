"""The ``phalanx`` command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import phalanx


def main(argv: Sequence[str] | None = None) -> int:
    """Run the ``phalanx`` command; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="phalanx", description="Distributed training on JAX, the tf.distribute way."
    )
    parser.add_argument("--version", action="version", version=f"phalanx {phalanx.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    demo = commands.add_parser("demo", help="train a small classifier on several replicas")
    demo.add_argument("--replicas", type=_positive, default=4, help="logical CPU devices (default: 4)")
    demo.add_argument("--epochs", type=_positive, default=15, help="passes over the data (default: 15)")
    options = parser.parse_args(argv)

    from phalanx.cli.demo import run_demo

    return run_demo(replicas=options.replicas, epochs=options.epochs)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be a positive number, not {text}")
    return number


if __name__ == "__main__":
    sys.exit(main())
