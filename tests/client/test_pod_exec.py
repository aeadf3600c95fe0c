"""A program in a pod over a WebSocket on loopback: its output, cuts, refusals and errors."""

from __future__ import annotations

import json
from collections.abc import Generator
from pathlib import Path

import pytest

from ddpjob.client.connection import ApiConnection
from ddpjob.client.volume.contents import CutError, Volume
from ddpjob.client.volume.pod_exec import output_of
from ddpjob.client.volume.reader_pod import command
from ddpjob.client.volume.receive import pull
from ddpjob.errors import NotAllowedError, UnavailableError
from tests.client.exec_server import ExecServer

SIZE = 5_000_000


class ExecReader:
    """Runs the program over the WebSocket."""

    def __init__(self, server: ExecServer, folder: Path) -> None:
        file = folder / "kubeconfig"
        file.write_text(json.dumps(server.kubeconfig))
        self._connection = ApiConnection(None, file, 20)

    def output(self, name: str, *arguments: str) -> Generator[bytes, None, None]:
        return output_of(self._connection, "team", "pod-1", "trainer", command(name, "/checkpoints", *arguments))


@pytest.fixture
def volume(tmp_path: Path) -> Path:
    root = tmp_path / "volume"
    root.mkdir()
    (root / "data.bin").write_bytes(bytes(range(256)) * (SIZE // 256 + 1))
    return root


def test_a_transfer_over_connections_that_are_cut_and_refused_is_complete(volume: Path, tmp_path: Path) -> None:
    # The list is refused twice, and is shorter than its cut; the file is cut twice.
    with ExecServer(volume, cuts=(10**6, 10**6, 2 * 10**6), refusals=(401, 503)) as server:
        volume_of_pod = Volume("mnist", "team", "claim", "/checkpoints", ExecReader(server, tmp_path).output)
        pull(volume_of_pod, tmp_path / "here", everything=True)
    assert (tmp_path / "here" / "data.bin").read_bytes() == (volume / "data.bin").read_bytes()
    assert set(server.paths) == {"/api/v1/namespaces/team/pods/pod-1/exec"}
    sent = [json.loads(words[-1])[0][1] for words in server.commands if "send" in words]
    assert len(sent) == 3
    assert 0 == sent[0] < sent[1] <= 10**6 < sent[2] <= 3 * 10**6
    assert max(len(" ".join(words)) for words in server.commands) < 1000


def test_forbidden_exec_names_the_right_that_is_missing(volume: Path, tmp_path: Path) -> None:
    with (
        ExecServer(volume, refusals=(403,)) as server,
        pytest.raises(NotAllowedError, match="refused with 403") as error,
    ):
        list(ExecReader(server, tmp_path).output("list"))
    assert "role edit" in error.value.hint


def test_a_program_that_fails_is_an_error_with_its_last_line(volume: Path, tmp_path: Path) -> None:
    with ExecServer(volume) as server:
        reader = ExecReader(server, tmp_path)
        with pytest.raises(UnavailableError, match="JSONDecodeError"):
            list(reader.output("send", "{"))
        assert json.loads(b"".join(reader.output("list")).splitlines()[-1])["end"] == {"unlisted": []}


def test_a_server_that_does_not_answer_is_a_cut(volume: Path, tmp_path: Path) -> None:
    with ExecServer(volume) as server:
        reader = ExecReader(server, tmp_path)
    with pytest.raises(CutError, match="refused"):
        list(reader.output("list"))
