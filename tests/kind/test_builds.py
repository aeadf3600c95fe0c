"""Programs built from the Go modules below go/. These tests run in the layer `install`, which needs Go anyway."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.prepared import program

REPOSITORY = Path(__file__).resolve().parents[2]


def test_two_processes_at_once_build_a_binary_once(tmp_path: Path) -> None:
    program("pause")  # compiles the standard library into Go's own cache, so that the builds below take seconds
    command = [sys.executable, "-m", "tests.kind", "binary", "pause"]
    environment = {**os.environ, "DDPJOB_CACHE": str(tmp_path)}
    started = [
        subprocess.Popen(
            command, cwd=REPOSITORY, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    outputs = [process.communicate(timeout=300) for process in started]
    assert [process.returncode for process in started] == [0, 0], outputs
    (path,) = {stdout.strip() for stdout, _ in outputs}
    assert Path(path).is_relative_to(tmp_path)
    assert os.access(path, os.X_OK)
    assert sum("▸ building pause" in stderr for _, stderr in outputs) == 1
    assert [entry.name for entry in Path(path).parent.iterdir()] == ["pause"]


def test_pause_exits_with_0_on_sigterm() -> None:
    process = subprocess.Popen([program("pause")])
    try:
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=0.5)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()
        process.wait()


def test_runc_reduced_removes_one_capability_and_nothing_else(tmp_path: Path) -> None:
    capabilities = {"bounding": ["CAP_CHOWN", "CAP_SYS_RESOURCE", "CAP_KILL"], "effective": ["CAP_SYS_RESOURCE"]}
    config: dict[str, Any] = {
        "process": {"capabilities": capabilities, "args": ["<sh>"]},
        "linux": {"resources": {"memory": {"limit": 9223372036854771712}}},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    # runc itself may be missing or fail: the file is changed before it starts.
    subprocess.run(
        [program("runc-reduced"), "--version", "--bundle", tmp_path], capture_output=True, timeout=60, check=False
    )
    changed = json.loads((tmp_path / "config.json").read_text())
    assert changed["process"].pop("capabilities") == {"bounding": ["CAP_CHOWN", "CAP_KILL"], "effective": []}
    config["process"].pop("capabilities")
    assert changed == config
