"""How Sphinx builds these pages: `make docs` calls it, and any warning fails."""

import dataclasses
import enum
import importlib
import inspect
import sys
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util import logging
from sphinx.util.inspect import signature, stringify_signature

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

import phalanx

project = "Phalanx"
author = "The Phalanx authors"
copyright = author
release = version = phalanx.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["conf.py"]

# Pages are Markdown. Links to a heading are checked, and so are links to files.
myst_heading_anchors = 3

# Docstrings are Google style. A word in single backticks is code, and a link if a page describes it.
default_role = "py:obj"
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False
autodoc_default_options = {"members": True, "exclude-members": "tree_flatten, tree_unflatten"}
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
add_module_names = False

html_theme = "furo"
html_title = "Phalanx"
html_copy_source = False
html_show_sphinx = False


class _Short:
    """A default value whose own form is long."""

    def __repr__(self) -> str:
        return "..."


_SHORT = _Short()


def shown_signature(app: Sphinx, what: str, name: str, obj: Any, *_: Any) -> tuple[str, None] | None:
    """Show the arguments of classes for which autodoc finds none, or ugly ones.

    Those are classes whose metaclass chooses what to make, as that of variables does, data classes
    whose defaults have no short form, and enumerations.
    """
    if what != "class":
        return None
    if issubclass(obj, enum.Enum):
        return "", None
    if (
        type(obj).__call__ is type.__call__ and not dataclasses.is_dataclass(obj)
    ) or not inspect.isfunction(obj.__init__):
        return None
    found = signature(obj.__init__, bound_method=True)
    given = [p for p in found.parameters.values() if not p.name.startswith("_")]
    short = [
        p.replace(default=_SHORT) if "<" in repr(p.default) and p.default is not p.empty else p
        for p in given
    ]
    found = found.replace(parameters=short)
    return stringify_signature(found, show_return_annotation=False, unqualified_typehints=True), None


def whole_sentence(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Undo what napoleon does to a property: it takes the words before a colon for its type."""
    for i, line in enumerate(lines):
        if what in ("attribute", "property") and line.startswith(":type: "):
            lines[0] = f"{line.removeprefix(':type: ')}: {lines[0]}"
            del lines[i]
            return


def check_names(app: Sphinx, env: BuildEnvironment) -> None:
    """Warn of public names that have no entry to link to."""
    described = env.domains.python_domain.objects
    for module in [name for name, entry in described.items() if entry.objtype == "module"]:
        for name in getattr(importlib.import_module(module), "__all__", ()):
            is_described = f"{module}.{name}" in described or (
                # It may be the same object as one of the package itself.
                f"phalanx.{name}" in described
                and getattr(phalanx, name) is getattr(importlib.import_module(module), name)
            )
            if not is_described:
                logging.getLogger(__name__).warning("no page describes %s.%s", module, name)


def setup(app: Sphinx) -> None:
    """Connect what is our own."""
    app.connect("env-check-consistency", check_names)
    app.connect("autodoc-process-signature", shown_signature)
    app.connect("autodoc-process-docstring", whole_sentence, priority=900)
