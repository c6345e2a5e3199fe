"""Makes the example scripts part of the site, so that pages can link to `examples/…`."""

from __future__ import annotations

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

EXAMPLES = Path(__file__).parents[2] / "examples"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the scripts to the files of the site."""
    for script in sorted(EXAMPLES.glob("*.py")):
        files.append(File.generated(config, f"examples/{script.name}", abs_src_path=str(script)))
    return files
