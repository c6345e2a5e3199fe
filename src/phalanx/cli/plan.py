"""``phalanx plan``: search a plan for a program, print it, and write it to files."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from phalanx.cli.arguments import positive, seconds
from phalanx.errors import InvalidTypeError, NotFoundError
from phalanx.parallel.hardware import PROFILES, Hardware, profile
from phalanx.parallel.hardware_files import load_hardware
from phalanx.parallel.plan import Plan
from phalanx.parallel.searching import MODES, search
from phalanx.runtime.formatting import shown

__all__ = ["add_plan_parser"]

_DESCRIPTION = """\
Search the cheapest layout of a program over devices. MODULE:FUNCTION names a function without arguments
that returns a pair: the program, usually a loss, and a tuple of its example arguments, which may be
jax.ShapeDtypeStruct. Modules are also sought in the current directory.
"""


def add_plan_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``phalanx plan`` to the command line."""
    parser = commands.add_parser(
        "plan", help="lay a program out over devices", description=_DESCRIPTION, allow_abbrev=False
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("program", nargs="?", metavar="MODULE:FUNCTION", help="what to plan for")
    source.add_argument("--load", metavar="FILE", help="show a plan that was saved, and search nothing")
    parser.add_argument("--devices", type=positive, default=8, help="how many (default: 8)")
    parser.add_argument(
        "--hardware",
        default="A100",
        metavar="NAME",
        help=f"{', '.join(PROFILES)}, or a file of phalanx bench hardware (default: %(default)s)",
    )
    parser.add_argument("--memory", type=float, metavar="GB", help="of each device, in gigabytes")
    parser.add_argument("--mode", choices=list(MODES), default="exact", help="default: %(default)s")
    parser.add_argument("--time-limit", type=seconds, metavar="S", help="seconds for the search")
    parser.add_argument(
        "--pins", metavar="FILE", help="a saved plan, whose layouts are kept where they fit"
    )
    parser.add_argument("--explain", action="append", metavar="NAME", help="tell why; may be repeated")
    parser.add_argument("--save", metavar="FILE", help="write the plan as JSON")
    parser.add_argument("--html", metavar="FILE", help="write a report with pictures")
    parser.set_defaults(function=_run)


def _run(options: argparse.Namespace) -> int:
    plan = Plan.load(options.load) if options.load else _search(options)
    print(plan)
    for name in options.explain or ():
        print(f"\n{plan.explain(name)}")
    if options.save:
        plan.save(options.save)
    if options.html:
        title = f"Plan for {options.program or options.load}"
        Path(options.html).write_text(plan.to_html(title))
    return 0


def _search(options: argparse.Namespace) -> Plan:
    program, args = example(options.program)
    pins = None if options.pins is None else Plan.load(options.pins)
    return search(
        program,
        args,
        options.devices if pins is None else pins.mesh,
        _hardware(options.hardware),
        memory=None if options.memory is None else options.memory * 1e9,
        mode=options.mode,
        time_limit=options.time_limit,
        pins=pins,
    )


def _hardware(name: str) -> Hardware:
    return load_hardware(name) if name.endswith(".json") else profile(name)


def example(name: str) -> tuple[Any, Sequence[Any]]:
    """The program and the example arguments that a function of a module returns."""
    module_name, _, function_name = name.partition(":")
    if not module_name or not function_name:
        raise InvalidTypeError(f"A program is named as MODULE:FUNCTION. Received: {shown(name)}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise NotFoundError(f"{error}. Received: {shown(name)}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise NotFoundError(f"{module_name} has no such function. Received: {shown(name)}")
    found = function()
    if not (isinstance(found, tuple) and len(found) == 2 and callable(found[0])):
        raise InvalidTypeError(
            f"{name} must return a pair: a function, and a tuple of its example arguments. "
            f"Received: {shown(found)}"
        )
    program, args = found
    return program, args if isinstance(args, tuple | list) else (args,)
