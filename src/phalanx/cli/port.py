"""``phalanx port``: rewrite a tf.distribute program, beside the old one."""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from phalanx.cli.porting_names import table
from phalanx.errors import InvalidValueError, NotFoundError, UnavailableError

__all__ = ["add_port_parser"]

_DESCRIPTION = """\
Rewrite a program for tf.distribute: imports, names, gradient tapes. What cannot be rewritten keeps its
name and gets a comment, `# PORT:`, with the reason. No file is ever overwritten.
"""


def add_port_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``phalanx port`` to the command line."""
    parser = commands.add_parser(
        "port", help="rewrite a tf.distribute program", description=_DESCRIPTION, allow_abbrev=False
    )
    parser.add_argument("script", nargs="?", help="the program")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("-o", "--output", metavar="FILE", help="where to write (default: NAME_px.py)")
    where.add_argument(
        "--in-place", action="store_true", help="write to the program itself, and keep NAME.py.orig"
    )
    parser.add_argument("--table", action="store_true", help="print all names that are known, and end")
    parser.set_defaults(function=_run)


def _run(options: argparse.Namespace) -> int:
    if options.table:
        print(table(), end="")
        return 0
    if options.script is None:
        raise InvalidValueError("phalanx port needs a program. Received: none")
    try:
        from phalanx.cli.porting import port
    except ImportError as error:
        raise UnavailableError(
            f"phalanx port needs libcst: pip install 'phalanx[port]'. Received: {error}"
        ) from error
    import libcst

    source = Path(options.script)
    if not source.is_file():
        raise NotFoundError(f"There is no such file. Received: {str(source)!r}")
    try:
        module = libcst.parse_module(source.read_bytes())
        done = port(module.code)
    except (libcst.ParserSyntaxError, SyntaxError, UnicodeError) as error:
        raise InvalidValueError(f"{source} is no Python program: {error}") from error
    if options.in_place:
        target = source.resolve()  # a link stays a link
        backup, partial = (target.with_name(target.name + end) for end in (".orig", ".partial"))
        _refuse_existing(backup, partial)
        _write_new(partial, done.text, module.encoding)
        shutil.copymode(target, partial)
        shutil.copy2(target, backup)
        partial.replace(target)
    else:
        target = Path(options.output or source.with_name(f"{source.stem}_px{source.suffix}"))
        _write_new(target, done.text, module.encoding)
    lifted = f", {done.models} Keras models lifted" if done.models else ""
    counts = f"{done.renamed} names and {done.tapes} gradient tapes rewritten{lifted}"
    print(f"{target}: {counts}, {len(done.marks)} things left to do", file=sys.stderr)
    for line, text in done.places:
        print(f"{target}:{line}: {text}", file=sys.stderr)
    return 0


def _write_new(path: Path, text: str, encoding: str) -> None:
    """Write a file that must not exist yet, with the encoding and the line ends of the program."""
    _refuse_existing(path)
    try:
        with path.open("x", encoding=encoding, newline="") as file:
            file.write(text)
    except OSError as error:
        raise InvalidValueError(f"phalanx port cannot write there: {error}") from error


def _refuse_existing(*paths: Path) -> None:
    for path in paths:
        if path.exists():
            raise InvalidValueError(
                "phalanx port overwrites no file; remove it, or name another with -o. "
                f"Received: {str(path)!r}"
            )
