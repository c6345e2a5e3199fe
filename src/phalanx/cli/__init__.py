"""The ``phalanx`` command: a module per subcommand, ``arguments`` for all, ``terminal`` for ``run``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import phalanx
from phalanx.cli.arguments import positive
from phalanx.cli.bench import add_bench_parser
from phalanx.cli.chaos import add_chaos_parser
from phalanx.cli.inspect import add_doctor_parser, add_explain_parser
from phalanx.cli.plan import add_plan_parser
from phalanx.cli.port import add_port_parser
from phalanx.cli.resize import add_resize_parser
from phalanx.cli.run import add_run_parser
from phalanx.errors import PhalanxError

USAGE_ERROR = 2
"""The exit code if what was asked for cannot be done."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the ``phalanx`` command; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="phalanx", description="Distributed training on JAX, the tf.distribute way."
    )
    parser.add_argument("--version", action="version", version=f"phalanx {phalanx.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    demo = commands.add_parser("demo", help="train a small classifier on several replicas")
    demo.add_argument("--replicas", type=positive, default=4, help="logical CPU devices (default: 4)")
    demo.add_argument("--epochs", type=positive, default=15, help="passes over the data (default: 15)")
    demo.set_defaults(function=_demo)
    add_run_parser(commands)
    add_resize_parser(commands)
    add_chaos_parser(commands)
    add_explain_parser(commands)
    add_doctor_parser(commands)
    add_bench_parser(commands)
    add_plan_parser(commands)
    add_port_parser(commands)
    options = parser.parse_args(argv)
    try:
        return int(options.function(options))
    except PhalanxError as error:
        print(f"phalanx {options.command}: {error}", file=sys.stderr)
        return USAGE_ERROR


def _demo(options: argparse.Namespace) -> int:
    from phalanx.cli.demo import run_demo

    return run_demo(replicas=options.replicas, epochs=options.epochs)
