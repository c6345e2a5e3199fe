"""`convert_checkpoint`: a checkpoint in the other format."""

from __future__ import annotations

import shutil

from phalanx.errors import InvalidValueError
from phalanx.runtime.formatting import shown
from phalanx.train.checkpoints import directories, files, orbax_files
from phalanx.train.checkpoints.checkpoint import open_checkpoint
from phalanx.train.checkpoints.contents import whole_contents
from phalanx.train.checkpoints.options import FORMATS
from phalanx.train.checkpoints.state import path_of

__all__ = ["convert_checkpoint"]


def convert_checkpoint(source: str, target: str, format: str = "orbax") -> None:
    """Write a checkpoint anew, in one piece and in another format.

    Neither the objects nor the devices that it is for are needed; the whole checkpoint must fit into
    memory.

    Args:
        source: the directory of a checkpoint, in either format.
        target: the directory to write.
        format: "orbax" or "phalanx".

    Examples:
        >>> import tempfile
        >>> import phalanx as px
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = px.train.Checkpoint(w=px.Variable([1.0])).write(f"{folder}/a")
        ...     px.train.convert_checkpoint(path, f"{folder}/b", "orbax")
        ...     px.train.load_variable(f"{folder}/b", "w").tolist()
        [1.0]
    """
    if format not in FORMATS:
        raise InvalidValueError(
            f"`format` must be one of {', '.join(FORMATS)}. Received: {shown(format)}"
        )
    contents = whole_contents(open_checkpoint(path_of(source)))
    path = path_of(target)
    partial = directories.begin(path)
    try:
        if format == "orbax":
            orbax_files.write(partial, path, contents)
        else:
            part_index = files.write_part(partial, 0, contents.arrays, contents.values)
            files.commit(partial, path, [part_index])
    finally:
        shutil.rmtree(partial, ignore_errors=True)
