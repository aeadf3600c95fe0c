"""The state folder: its paths, damaged records, and the lock."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TextIO

import pytest

from ddpjob.local import LocalError, state
from ddpjob.local.state import StateFolder, default_root
from tests.processes import die_with_parent

HOLD = """
import pathlib, sys
from ddpjob.local.state import StateFolder
with StateFolder(pathlib.Path(sys.argv[1])).job("default", "a").locked():
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize(
    ("environment", "root"),
    [
        ({"DDPJOB_STATE_DIR": "/a", "XDG_STATE_HOME": "/b"}, Path("/a")),
        ({"XDG_STATE_HOME": "/b"}, Path("/b/ddpjob")),
        ({"XDG_STATE_HOME": ""}, Path.home() / ".local/state/ddpjob"),
    ],
)
def test_state_folder_follows_the_environment(environment: dict[str, str], root: Path) -> None:
    assert default_root(environment) == root


META = {"namespace": "default", "name": "a", "uid": "0a1b2c3d"}


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", "{}", '{"pods": []}', '{"job": {}, "pods": []}', '{"job": 1, "pods": []}'),
        *(
            json.dumps({"job": job, "pods": []})
            for job in (
                {"metadata": META},
                {"metadata": META, "spec": "x"},
                {"metadata": META, "spec": {}, "status": "x"},
                {"metadata": META, "spec": {}, "status": {"conditions": ["x"]}},
                {"metadata": META | {"uid": None}, "spec": {}},
            )
        ),
    ],
)
def test_damaged_record_is_an_error_with_a_next_step(tmp_path: Path, text: str) -> None:
    folder = StateFolder(tmp_path).job("default", "a")
    folder.path.mkdir(parents=True)
    (folder.path / "job.json").write_text(text)
    with pytest.raises(LocalError) as error:
        folder.job()
    assert "job.json is damaged" in error.value.error
    assert "ddpjob delete a" in error.value.next_step


@pytest.mark.parametrize("name", ["..", ".", "", "a/b", "a\0b"])
def test_name_with_path_separators_is_refused(tmp_path: Path, name: str) -> None:
    for lead_out in (StateFolder(tmp_path).job, StateFolder(tmp_path).volume):
        for pair in ((name, "a"), ("default", name)):
            with pytest.raises(LocalError):
                lead_out(*pair)


def test_lock_names_its_holder_and_is_released_when_that_ends(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path).job("default", "a")
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        preexec_fn=die_with_parent,  # noqa: PLW1509
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"held\n"
    assert folder.runner() == holder.pid
    with pytest.raises(LocalError, match=f"in process {holder.pid}"), folder.locked():
        pass
    holder.send_signal(signal.SIGKILL)
    holder.communicate()
    assert folder.runner() is None
    with folder.locked():
        assert folder.runner() == os.getpid()
    assert folder.runner() is None


def test_lock_of_a_deletion_names_no_run_that_could_be_stopped(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path).job("default", "a")
    with folder.locked(to_run=False):
        assert folder.runner() is None
        with pytest.raises(LocalError, match="another command is starting or deleting"), folder.locked():
            pass


def test_reading_the_holder_does_not_block_the_lock(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path).job("default", "a")
    with folder.locked():
        pass
    asker = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys, pathlib; from ddpjob.local.state import StateFolder\n"
            "folder = StateFolder(pathlib.Path(sys.argv[1])).job('default', 'a')\n"
            "print('asks', flush=True)\nwhile True: folder.runner()",
            str(tmp_path),
        ],
        stdout=subprocess.PIPE,
        preexec_fn=die_with_parent,  # noqa: PLW1509
    )
    try:
        assert asker.stdout is not None
        assert asker.stdout.readline() == b"asks\n"
        for _ in range(20):
            with folder.locked():
                pass
    finally:
        asker.kill()
        asker.communicate()


def test_lock_file_deleted_before_locking_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = StateFolder(tmp_path).job("default", "a")
    deletions = iter([(folder.path / "lock").unlink])
    really = state._try_lock

    def as_another_deletes_it(file: TextIO, *, exclusive: bool) -> bool:
        for unlink in deletions:
            unlink()
        return really(file, exclusive=exclusive)

    monkeypatch.setattr(state, "_try_lock", as_another_deletes_it)
    with folder.locked():
        assert folder.runner() == os.getpid()
