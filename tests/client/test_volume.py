"""What a volume holds, and copies of it. The program of a reader pod is a process here."""

from __future__ import annotations

import fcntl
import hashlib
import inspect
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import pytest

from ddpjob.api.backoff import Patience
from ddpjob.client.volume import reader
from ddpjob.client.volume.contents import RECORD, Pulled, Volume, VolumeContents, list_volume
from ddpjob.client.volume.receive import pull
from ddpjob.errors import DamagedFileError, DDPJobError, InvalidJobError, TransferError, UnavailableError
from ddprun.checkpoint_files import Checkpoints, all_manifests, seal, verify
from ddprun.errors import ConfigMismatch
from ddprun.reporting.metrics import RowsFile

PROGRAM = [sys.executable, "-I", "-S", "-c", inspect.getsource(reader)]
PIPES: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
MEGABYTE = 2**20


class ProcessReader:
    """Runs the program as a pod does."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.asked: list[list[str]] = []
        self.received: list[int] = []

    def output(self, command: str, *arguments: str) -> Generator[bytes, None, None]:
        self.asked.append([command, *arguments])
        self.received.append(0)
        with subprocess.Popen([*PROGRAM, command, str(self.root), *arguments], **PIPES) as process:
            assert process.stdout is not None
            try:
                while piece := process.stdout.read1(32 * 1024):  # type: ignore[attr-defined]
                    self.received[-1] += len(piece)
                    yield piece
            finally:
                process.kill()

    @property
    def offsets(self) -> list[int]:
        """Return where each transfer of the first file began."""
        return [json.loads(asked[1])[0][1] for asked in self.asked if asked[0] == "send"]


class Lines:
    """A reader whose output a test writes: the same each time, of ``list`` and of ``send``."""

    def __init__(self, *messages: object, sent: Sequence[object] = ()) -> None:
        self.lines = {"list": messages, "send": sent}
        self.outputs = 0

    def output(self, command: str, *arguments: str) -> Generator[bytes, None, None]:
        self.outputs += 1
        assert self.outputs < 20, "it asks for ever"
        yield from (json.dumps(message).encode() + b"\n" for message in self.lines[command])


@pytest.fixture
def volume(tmp_path: Path) -> Path:
    """A volume with two checkpoints, metrics, a log and a file of a script."""
    root = tmp_path / "volume"
    RowsFile(root, 1).append("train", {"step": 1, "loss": 2.5})
    store = Checkpoints(root, keep=3)
    store.claim({"uid": "u"})
    for step in (10, 20):
        store.save(step, os.urandom(3 * MEGABYTE + step), {"time": 1_700_000_000.5 + step, "worldSize": 2})
    (root / "logs").mkdir()
    (root / "logs" / "rank-0.log").write_text("a line\n")
    (root / "model.pt").write_bytes(b"of a script")
    (root / ".step-1.pt.host.1.ab.tmp").write_bytes(b"of a save that goes on")
    return root


def of(reader: ProcessReader | Lines) -> Volume:
    return Volume("mnist", "team", "claim", "/checkpoints", reader.output)


def contents_of(root: Path, *, verify: bool = True) -> VolumeContents:
    return list_volume(of(ProcessReader(root)), verify=verify)[0]


def listed(reader: Lines) -> VolumeContents:
    return list_volume(of(reader))[0]


def pulled(source: ProcessReader | Path, to: Path, **wanted: Any) -> Pulled:
    return pull(of(source if isinstance(source, ProcessReader) else ProcessReader(source)), to, **wanted)


def newest(root: Path) -> Path:
    return sorted(root.glob("run-*/step-*.pt"))[-1]


def flip_a_bit(file: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(bytes([content[0] ^ 1]) + content[1:])


def files_below(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file() and path.name != RECORD}


def test_contents_are_listed_by_kind_with_digests(volume: Path) -> None:
    found = contents_of(volume)
    content = newest(volume).read_bytes()
    run = found.checkpoints[0].run
    assert [(c.run, c.step, c.state, c.problem) for c in found.checkpoints] == [
        (run, 20, "Intact", None),
        (run, 10, "Intact", None),
    ]
    first = found.checkpoints[0]
    assert (first.bytes, first.sha256) == (len(content), hashlib.sha256(content).hexdigest())
    assert (first.saved, volume / first.path) == ("2023-11-14T22:13:40Z", newest(volume))
    assert [file.path for file in found.metrics] == ["metrics/run-000001.jsonl"]
    assert [file.path for file in found.others] == ["model.pt", f"run-{run:06d}/owner.json", "logs/rank-0.log"]
    assert found.unlisted == []
    assert {c.state for c in contents_of(volume, verify=False).checkpoints} == {"Unverified"}


@pytest.mark.parametrize(
    ("harm", "problem"),
    [
        (flip_a_bit, "its content does not match the digest"),
        (lambda file: file.unlink(), "its file is absent"),
        (lambda file: file.with_suffix(".json").write_text("{}"), "its manifest is not readable"),
        (lambda file: _edit(file.with_suffix(".json"), worldSize=3), "its manifest does not match its own digest"),
    ],
    ids=["content", "absent", "no-manifest", "manifest"],
)
def test_a_damaged_checkpoint_is_named_and_an_older_one_stays_intact(volume: Path, harm: object, problem: str) -> None:
    harm(newest(volume))  # type: ignore[operator]
    damaged, intact = contents_of(volume).checkpoints
    assert (damaged.step, damaged.state, intact.state) == (20, "Damaged", "Intact")
    assert problem in (damaged.problem or "")


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"format": True},
        {"format": 2},
        {"run": True},
        {"step": 20.0},
        {"step": 21},
        {"sha256": "0" * 64},
        {"sha256": 5},
        {"seal": ""},
        {"name": "step-0000000020.json"},
        {"name": "step-00000020.json"},
    ],
    ids=str,
)
def test_the_reader_and_the_trainer_agree_on_which_checkpoints_are_intact(volume: Path, change: dict[str, Any]) -> None:
    written = newest(volume).with_suffix(".json")
    manifest = written.with_name(change.get("name", written.name))
    _edit(written, **change)
    if "seal" not in change:
        _edit(written, seal=seal(json.loads(written.read_text())))
    for path in (written, written.with_suffix(".pt")):
        path.rename(manifest.with_suffix(path.suffix))
    try:
        is_valid = not verify(manifest)[0] and manifest in {path for _, _, path in all_manifests(volume)}
    except ConfigMismatch:
        is_valid = False
    intact = [found for found in contents_of(volume).checkpoints if found.state == "Intact"]
    assert is_valid == (Path(intact[0].path).stem == manifest.stem), intact


def _edit(manifest: Path, **values: object) -> None:
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | values))


def test_the_newest_checkpoint_arrives_with_its_manifest_and_is_resumed_from(volume: Path, tmp_path: Path) -> None:
    done = pulled(volume, tmp_path / "here")
    assert [path.suffix for path in done.paths] == [".pt", ".json"]
    saved = Checkpoints(tmp_path / "here", keep=3).resume(print)
    assert saved is not None
    assert saved[1] == newest(volume).read_bytes()
    again = ProcessReader(volume)
    assert pulled(again, tmp_path / "here") == done
    assert again.received[-1] < 1000, "nothing is sent again"


def part_of(root: Path, to: Path, content: bytes) -> Path:
    """Leave a part of the newest checkpoint, as a transfer that was killed."""
    part = to / newest(root).relative_to(root).with_name(f".{newest(root).name}.ddpjob-part")
    part.parent.mkdir(parents=True)
    part.write_bytes(content)
    return part


def test_a_pull_that_was_killed_is_continued_by_the_next(volume: Path, tmp_path: Path) -> None:
    part = part_of(volume, tmp_path / "here", newest(volume).read_bytes()[:MEGABYTE])
    with part.open() as another:
        fcntl.flock(another, fcntl.LOCK_EX)
        with pytest.raises(DDPJobError, match="another process copies"):
            pulled(volume, tmp_path / "here")
    source = ProcessReader(volume)
    (file, _) = pulled(source, tmp_path / "here").files
    assert source.offsets == [MEGABYTE]
    assert (tmp_path / "here" / file.path).read_bytes() == newest(volume).read_bytes()
    assert not part.exists()


def test_a_part_with_other_content_is_copied_again_from_its_beginning(volume: Path, tmp_path: Path) -> None:
    part_of(volume, tmp_path, b"another checkpoint" * 1000)
    source = ProcessReader(volume)
    (file, _) = pulled(source, tmp_path).files
    assert source.offsets == [18_000, 0]
    assert (tmp_path / file.path).read_bytes() == newest(volume).read_bytes()


def test_a_checkpoint_that_is_damaged_on_the_volume_is_refused(volume: Path, tmp_path: Path) -> None:
    file = newest(volume)
    flip_a_bit(file)
    with pytest.raises(DamagedFileError, match=r"step-000000020.pt .* does not match the digest") as raised:
        pulled(volume, tmp_path / "here")
    assert "--step N" in raised.value.next_step
    assert files_below(tmp_path / "here") == set()
    older = pulled(volume, tmp_path / "here", steps=[10])
    assert older.files[0].path.endswith("step-000000010.pt")


def test_everything_and_metrics_are_copied_without_links_and_temporary_files(volume: Path, tmp_path: Path) -> None:
    (volume / "secret").symlink_to("/etc/hostname")
    (volume / "empty.txt").touch()
    (volume / ("n" * 255)).write_text("the longest name")
    expected = files_below(volume) - {"secret", ".step-1.pt.host.1.ab.tmp"}
    done = pulled(volume, tmp_path / "all", everything=True)
    assert files_below(tmp_path / "all") == expected == {file.path for file in done.files}
    assert all((volume / path).read_bytes() == (tmp_path / "all" / path).read_bytes() for path in expected)
    assert int((tmp_path / "all" / "model.pt").stat().st_mtime) == int((volume / "model.pt").stat().st_mtime)
    metrics = pulled(volume, tmp_path / "metrics", metrics=True)
    assert [file.path for file in metrics.files] == ["metrics/run-000001.jsonl"]
    with (volume / "metrics" / "run-000001.jsonl").open("a") as stream:
        stream.write('{"event": "train"}\n')
    (path,) = pulled(volume, tmp_path / "metrics", metrics=True).paths
    assert path.read_text().endswith('{"event": "train"}\n')


def test_many_files_take_several_requests(tmp_path: Path) -> None:
    root = tmp_path / "volume"
    root.mkdir()
    for number in range(300):
        (root / f"sample-{number:04d}-of-the-generated-images.txt").write_text(str(number))
    source = ProcessReader(root)
    assert len(pulled(source, tmp_path / "here", everything=True).files) == 300
    requests = [asked[1] for asked in source.asked if asked[0] == "send"]
    assert len(requests) > 3
    assert max(map(len, requests)) < 4500
    assert files_below(tmp_path / "here") == files_below(root)


def test_a_data_set_on_the_volume_does_not_hide_the_checkpoints(volume: Path, tmp_path: Path) -> None:
    (volume / "data" / "train").mkdir(parents=True)
    for number in range(reader.MOST_OF_FOLDER + 1):
        (volume / "data" / "train" / str(number)).touch()
    found = contents_of(volume)
    assert (len(found.checkpoints), len(found.unlisted)) == (2, 1)
    assert len(found.others) < reader.MOST_OF_FOLDER + 10
    assert pulled(volume, tmp_path / "newest").complete, "it is all that was wanted"
    shutil.rmtree(volume / "data")
    assert pulled(volume, tmp_path / "all", everything=True).complete
    (volume / os.fsdecode(b"loss\xff.txt")).touch()
    assert not pulled(volume, tmp_path / "all", everything=True).complete, "a name that is not UTF-8"


def test_what_is_not_there_is_an_error_that_names_what_is(volume: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidJobError, match="no checkpoint of step 7") as raised:
        pulled(volume, tmp_path, steps=[7])
    assert "20, 10" in raised.value.hint
    empty = tmp_path / "empty"
    (empty / "sub").mkdir(parents=True)
    with pytest.raises(InvalidJobError, match="holds no checkpoint"):
        pulled(empty, tmp_path)
    (empty / "model.pt").touch()
    with pytest.raises(InvalidJobError, match="holds no checkpoint") as raised:
        pulled(empty, tmp_path)
    assert "--all copies the other files (1)" in raised.value.next_step


A_FILE = {"file": {"path": "a", "bytes": 1, "modified": 0}}
ALL = {"end": {}}


def a_file(**values: object) -> dict[str, Any]:
    return {"file": A_FILE["file"] | values}


@pytest.mark.parametrize(
    "message",
    [
        *[a_file(path=path) for path in ("/etc/cron.d/x", "../x", "a/../../x", "a//b", "", "a\0b", "./a", ".git/x")],
        a_file(path="\udc80"),
        a_file(path="a" * 5000),
        a_file(bytes=-1),
        a_file(modified="yesterday"),
        {"checkpoint": {"path": "a.pt", "saved": None, "run": 1, "step": 1, "state": "Perfect"}},
        {"data": -1},
        {"data": "1"},
        [],
    ],
    ids=lambda message: str(message)[:60],
)
def test_paths_that_lead_out_and_impossible_values_are_no_output_of_the_reader(message: object) -> None:
    with pytest.raises(UnavailableError, match="not the output of the reader"):
        listed(Lines(message, ALL))


def test_a_listing_with_more_names_than_the_reader_sends_is_refused() -> None:
    files = [a_file(path=f"d/{number}") for number in range(reader.MOST_FILES + 1)]
    assert len(listed(Lines(*files[1:], ALL)).others) == reader.MOST_FILES
    with pytest.raises(UnavailableError, match="not the output of the reader"):
        listed(Lines(*files, ALL))


@pytest.mark.parametrize("time", ["yesterday", -1, 1e300, None])
def test_an_impossible_time_of_a_manifest_is_left_out(time: object, volume: Path) -> None:
    store = Checkpoints(volume, keep=3)
    store.claim({"uid": "u"})
    store.save(30, b"content", {"time": time, "worldSize": 2})
    found = contents_of(volume).checkpoints[0]
    assert (found.step, found.state, found.saved) == (30, "Intact", None)


@pytest.mark.parametrize(
    "reader",
    [
        Lines({"working": "a"}, A_FILE),
        Lines(A_FILE, ALL, sent=[{"working": "a"}]),
        Lines(A_FILE, ALL, sent=[{"end": {}}]),
    ],
    ids=["list", "send", "nothing-sent"],
)
def test_a_reader_that_brings_nothing_new_is_given_up(
    reader: Lines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Patience, "SECONDS", 0.1)
    with pytest.raises(UnavailableError, match=r"could not be read for 0\.1 s"):
        pull(of(reader), tmp_path / "to", everything=True)


class Rotating(ProcessReader):
    """A volume whose training deletes its oldest checkpoint and saves another before each copy, for some copies."""

    def __init__(self, root: Path, rotations: int) -> None:
        super().__init__(root)
        self.rotations, self.store = rotations, Checkpoints(root, keep=2)
        self.store.claim({"uid": "again"})

    def output(self, command: str, *arguments: str) -> Generator[bytes, None, None]:
        if command == "send" and self.rotations > 0:
            self.rotations -= 1
            for step in (30 + len(self.asked) * 2, 31 + len(self.asked) * 2):
                self.store.save(step, os.urandom(1000 + step), {"time": 1_700_000_000.0 + step, "worldSize": 2})
        return super().output(command, *arguments)


@pytest.mark.parametrize("everything", [False, True])
def test_checkpoints_that_a_training_deletes_meanwhile_are_left_out(
    everything: bool, volume: Path, tmp_path: Path
) -> None:
    done = pulled(Rotating(volume, 2), tmp_path / "here", everything=everything)
    steps = sorted(path.name for path in volume.rglob("step-*.*"))
    assert done.complete
    assert {path.name for path in done.paths} >= set(steps if everything else steps[-2:])
    assert all((tmp_path / "here" / file.path).is_file() for file in done.files)


def test_a_training_that_is_faster_than_each_copy_is_named(volume: Path, tmp_path: Path) -> None:
    with pytest.raises(TransferError, match="was deleted or replaced on the volume of mnist while it was copied"):
        pulled(Rotating(volume, 100), tmp_path / "newest")
    assert not pulled(Rotating(volume, 100), tmp_path / "all", everything=True).complete


class Replacing(ProcessReader):
    """A volume whose script replaces a file by a larger one between the list and the copy, and writes one again."""

    def output(self, command: str, *arguments: str) -> Generator[bytes, None, None]:
        if command == "send" and not self.offsets:
            (self.root / "new.pt").write_bytes(b"the second, which is longer")
            (self.root / "new.pt").replace(self.root / "model.pt")
            (self.root / "rewritten.pt").write_bytes(b"half")
            with (self.root / "metrics.jsonl").open("a") as stream:
                stream.write("added\n")
        elif command == "list" and self.offsets:
            (self.root / "rewritten.pt").write_bytes(b"half, and now whole")
        return super().output(command, *arguments)


def test_a_file_that_is_replaced_or_written_again_is_copied_whole(tmp_path: Path) -> None:
    root = tmp_path / "volume"
    root.mkdir()
    (root / "rewritten.pt").write_bytes(b"whole before")
    (root / "model.pt").write_bytes(b"the first")
    (root / "metrics.jsonl").write_text("first\n")
    done = pulled(Replacing(root), tmp_path / "here", everything=True)
    assert done.complete
    assert (tmp_path / "here" / "model.pt").read_bytes() == b"the second, which is longer"
    assert (tmp_path / "here" / "metrics.jsonl").read_text() == "first\nadded\n"
    assert (tmp_path / "here" / "rewritten.pt").read_bytes() == b"half, and now whole"


def test_a_kill_before_a_file_is_replaced_lets_the_next_pull_replace_it(tmp_path: Path) -> None:
    (tmp_path / "volume").mkdir()
    (tmp_path / "volume" / "a").write_text("one")
    pulled(tmp_path / "volume", tmp_path / "here", everything=True)
    with (tmp_path / "here" / RECORD).open("a") as lines:
        lines.write(json.dumps({"path": "a", "sha256": hashlib.sha256(b"two").hexdigest()}) + "\n")
    (tmp_path / "volume" / "a").write_text("three")
    assert pulled(tmp_path / "volume", tmp_path / "here", everything=True).complete
    assert (tmp_path / "here" / "a").read_text() == "three"


@pytest.mark.parametrize("pulls", [(), ("one", "three")], ids=["never-written", "written"])
@pytest.mark.parametrize("content", ["my own longer text", "MINE"], ids=["longer", "same-size"])
def test_a_pull_replaces_only_files_that_it_wrote_and_that_are_unchanged(
    pulls: tuple[str, ...], content: str, tmp_path: Path
) -> None:
    root, here = tmp_path / "volume", tmp_path / "here"
    root.mkdir()
    here.mkdir()
    for text in pulls:
        (root / "a").write_text(text)
        pulled(root, here, everything=True)
        assert (here / "a").read_text() == text
    (here / "a").write_text(content)
    (root / "a").write_text("five")
    with pytest.raises(TransferError, match="a is here already"):
        pulled(root, here, everything=True)
    assert (here / "a").read_text() == content
    assert files_below(here) == {"a"}


def test_hidden_files_are_left_out_but_the_index_of_a_distributed_checkpoint(tmp_path: Path) -> None:
    """Seen: without ``.metadata``, ``torch.distributed.checkpoint`` loads none of the copied parts."""
    root = tmp_path / "volume"
    shown = ["dcp/.metadata", "dcp/__0_0.distcp", "model.pt"]
    for path in (".git/config", "run/.envrc", f"sub/{RECORD}", RECORD, ".x.ddpjob-part", *shown):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text("of the volume")
    store = Checkpoints(root / ".git", keep=3)
    store.claim({"uid": "u"})
    store.save(1, b"content", {"time": 1.0, "worldSize": 1})
    done = pulled(root, tmp_path / "here", everything=True)
    assert [file.path for file in done.files] == shown
    with pytest.raises(InvalidJobError, match="holds no checkpoint"):
        pulled(root, tmp_path / "here")


@pytest.mark.parametrize("link", ["run", ".x.ddpjob-part", "x", RECORD])
def test_no_link_in_the_directory_is_followed(link: str, tmp_path: Path) -> None:
    root, here, elsewhere = tmp_path / "volume", tmp_path / "here", tmp_path / "elsewhere"
    for folder in (root / "run", here, elsewhere):
        folder.mkdir(parents=True)
    (root / "run" / "y").write_text("of the volume")
    (root / "x").write_text("of the volume")
    (elsewhere / "victim").write_text("of the user, and longer")
    (here / link).symlink_to(elsewhere if link == "run" else elsewhere / "victim")
    with pytest.raises(TransferError, match=link):
        pulled(root, here, everything=True)
    assert files_below(elsewhere) == {"victim"}
    assert (elsewhere / "victim").read_text() == "of the user, and longer"


def test_a_directory_that_refuses_is_named(volume: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(TransferError, match=r"cannot write .*file"):
        pulled(volume, tmp_path / "file", everything=True)
