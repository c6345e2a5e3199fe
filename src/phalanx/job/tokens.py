"""The job's token: what every process of a job knows, and no other."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

from phalanx.errors import ClusterEnvironmentError, PermissionDeniedError
from phalanx.job.registry import runtime_folder
from phalanx.runtime.formatting import shown

_SHORTEST = 16


def find_token(is_local: bool) -> str:
    """The token from PHALANX_TOKEN, or, if all processes are on this machine, the user's own."""
    token = os.environ.get("PHALANX_TOKEN", "")
    if token:
        return token
    if not is_local:
        raise ClusterEnvironmentError(
            "A cluster of several machines needs a token, so that only its own processes can join. Set "
            "the environment variable PHALANX_TOKEN to the same long random text on all of them, for "
            "example the output of `python -c 'import secrets; print(secrets.token_hex())'`. "
            "Received: no PHALANX_TOKEN"
        )
    return own_token(runtime_folder())


def own_token(folder: Path) -> str:
    """The token of this user on this machine, in a file that no other user can read; made if needed."""
    path = folder / "token"
    if not path.exists():
        fresh = folder / f"token.{os.getpid()}.{secrets.token_hex(4)}"
        with open(os.open(fresh, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
            file.write(secrets.token_hex(32))
        with contextlib.suppress(FileExistsError):
            os.link(fresh, path)  # the first process decides, and none sees half a file
        fresh.unlink()
    found = path.lstat()
    token = path.read_text().strip()
    if found.st_uid != os.getuid() or found.st_mode & 0o077 or len(token) < _SHORTEST:
        raise PermissionDeniedError(
            "The file with your token must belong to you, no other user may read it, and it must hold "
            f"a long random text. Remove it, and it is made again. Received: {shown(str(path))}"
        )
    return token
