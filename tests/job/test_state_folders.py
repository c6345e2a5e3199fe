"""Where servers keep what outlives them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from phalanx.job.hub.descriptions import Task
from phalanx.job.state_folders import folder_of_job, server_folder


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.delenv("PHALANX_STATE", raising=False)


def test_a_server_that_starts_again_finds_its_own(tmp_path: Path) -> None:
    folder = server_folder(Task("ps", 0, "[::1]:80"))
    assert folder == server_folder(Task("ps", 0, "[::1]:80"))
    assert folder.parent == tmp_path / "phalanx" / "servers"
    assert folder != server_folder(Task("ps", 0, "[::1]:81"))
    assert folder != server_folder(Task("ps", 1, "[::1]:80"))
    assert "/" not in folder.name


def test_the_folder_of_a_job_goes_with_it_and_so_do_those_of_the_dead(tmp_path: Path) -> None:
    dead = tmp_path / "phalanx" / "jobs" / f"{2**30}-abc"
    dead.mkdir(parents=True)
    with folder_of_job() as folder:
        assert not dead.exists()
        (folder / "servers").mkdir(parents=True)
        with folder_of_job() as other:
            assert other != folder
        assert folder.exists()
        assert folder.name.startswith(f"{os.getpid()}-")
    assert not folder.exists()


def test_a_folder_of_the_users_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHALANX_STATE", str(tmp_path / "own"))
    with folder_of_job() as folder:
        folder.mkdir()
    assert folder == tmp_path / "own"
    assert folder.exists()
    assert server_folder(Task("ps", 0, "a:1")).parent == folder / "servers"
