"""Checkpoints: what they hold, how they are written and read, and which are kept.

* ``trackables``, ``contents``: the parts of objects that have a state, and their arrays
* ``restoring``, ``scalars``, ``waiting``: what objects get back
* ``files``, ``orbax_files``, ``converting``: the formats
* ``saving``, ``state``, ``status``, ``reader``, ``progress``, ``options``: one checkpoint
* ``checkpoint``, ``retention``, ``manager``: what users see
"""
