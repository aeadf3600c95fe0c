"""Checkpoints after a power cut at any moment, a flipped bit anywhere, and on a full or read-only disk."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddprun.checkpoint_files import Checkpoints, all_manifests, newest_valid, verify
from ddprun.errors import VolumeError
from ddprun.reporting.metrics import read_rows
from tests.ddptrain.builders import SAVING, command, place
from tests.ddptrain.runs import ForkServer, Whole, assert_same_end, losses
from tests.ddptrain.volume import LoggedVolume, crashes, put


def content_of(run: int, step: int) -> bytes:
    return f"run {run}, step {step}".encode() * 20


def start(root: Path, *, keep: int = 2) -> Checkpoints:
    writer = Checkpoints(root, keep=keep)
    writer.prepare()
    writer.resume(lambda _: None)
    writer.claim({"uid": "u"})
    return writer


def test_power_cut_after_any_file_operation_keeps_the_last_finished_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    finished: list[tuple[int, tuple[int, int]]] = []  # (operations, (run, step)) as each save returned
    with monkeypatch.context() as patch:
        volume = LoggedVolume(disk, patch)
        for run in (1, 2):
            writer = start(disk / "checkpoints")
            for step in range(4):
                at = 10 * run + step
                writer.save(at, content_of(run, at), {})
                finished.append((len(volume.log), (run, at)))
    assert len(volume.log) > 60
    for done, kind, left in crashes(volume.log, random.Random(0)):
        put(left, tmp_path / "left")
        found = newest_valid(tmp_path / "left" / "checkpoints", lambda path, reason: None)
        wanted = max((place for at, place in finished if at <= done), default=(0, 0))
        place = (found[0].run, found[0].step) if found else (0, 0)
        assert place >= wanted, f"after {done} operations ({kind}), the last of them {volume.log[done - 1][:2]}"
        if found:
            assert found[1] == content_of(*place)
        if kind == "names without data":  # all operations so far, as after a kill
            manifests = [path for _, _, path in all_manifests(tmp_path / "left" / "checkpoints")]
            assert all(path.with_suffix(".pt").exists() for path in manifests), "a manifest without its checkpoint"
        shutil.rmtree(tmp_path / "left")


def test_each_of_a_thousand_bit_flips_and_truncations_is_detected(tmp_path: Path) -> None:
    writer = start(tmp_path)
    writer.save(7, random.Random(0).randbytes(3000), {"evaluation": {"correct": 0, "samples": 259}})
    manifest = tmp_path / "run-000001" / "step-000000007.json"
    whole = {path: path.read_bytes() for path in (manifest, manifest.with_suffix(".pt"))}
    meaning, dice, caught = json.loads(whole[manifest]), random.Random(1), 0
    while caught < 1000:
        victim = dice.choice(list(whole))
        damaged = bytearray(whole[victim])
        if dice.random() < 0.2:
            damaged = damaged[: dice.randrange(len(damaged))]
        else:
            damaged[dice.randrange(len(damaged))] ^= 1 << dice.randrange(8)
        if victim == manifest and _parsed(damaged) == meaning:
            continue  # only the indentation changed
        victim.write_bytes(damaged)
        assert verify(manifest)[0], f"{victim.name} damage not detected in round {caught}"
        victim.write_bytes(whole[victim])
        caught += 1
    assert not verify(manifest)[0]


def _parsed(content: bytes) -> object:
    with contextlib.suppress(ValueError):
        return json.loads(content)
    return None


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of 6 MB, which holds four checkpoints of the small network."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(folder)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a tmpfs here: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def fill(folder: Path, *, leave: int) -> Path:
    """Fill the file system except for about ``leave`` bytes."""
    filler = folder / "filler"
    status = os.statvfs(folder)
    filler.write_bytes(b"\0" * max(0, status.f_bavail * status.f_frsize - leave))
    return filler


@pytest.mark.parametrize("pages_less", [1, 0], ids=["the content", "the manifest"])
def test_failed_save_on_a_full_volume_leaves_older_checkpoints_alone(small_disk: Path, pages_less: int) -> None:
    writer = start(small_disk, keep=5)
    writer.save(1, b"x", {})
    page = os.statvfs(small_disk).f_frsize
    filler = fill(small_disk, leave=(20 - pages_less) * page)
    with pytest.raises(VolumeError, match="No space left"):
        writer.save(2, b"y" * (20 * page), {})
    names = sorted(path.name for path in (small_disk / "run-000001").iterdir())
    assert names == ["owner.json", "step-000000001.json", "step-000000001.pt"]
    filler.unlink()
    assert writer.save(3, b"z" * 300_000, {}).step == 3


def test_last_save_on_a_full_volume_replaces_older_checkpoints(small_disk: Path) -> None:
    writer = start(small_disk, keep=5)
    for step in (1, 2):
        writer.save(step, b"x" * 300_000, {})
    fill(small_disk, leave=100_000)
    assert writer.save(3, b"y" * 300_000, {}, required=True).step == 3
    kept = sorted(path.name for path in (small_disk / "run-000001").glob("*.pt"))
    assert kept == ["step-000000002.pt", "step-000000003.pt"]


def test_volume_that_fills_up_during_a_run_costs_checkpoints_but_not_the_run(
    ddptrain: ForkServer, idx: Path, small_disk: Path, whole: Whole
) -> None:
    run = ddptrain.start(*command(2, idx, small_disk, "--model", "mlp", "--keep", 2, "--step-delay", 0.1))
    run.at_step(5)
    filler = fill(small_disk, leave=30_000)
    seen = run.at_step(13)
    assert "No space left" in seen["checkpointProblem"]
    assert seen["checkpoint"]["step"] in (4, 8), "the last before the volume was full"
    filler.unlink()
    assert run.wait() == 0, run.output()
    message = run.message()
    assert message["progress"]["checkpointProblem"] is None
    assert message["checkpoint"] == place(1, 27)
    assert "training continues without saving" in run.output()
    assert_same_end(whole(2, *SAVING, "--model", "mlp").folder, small_disk)
    assert len(losses(small_disk)) == 27, "no row was lost or written twice"
    rows = read_rows(small_disk)
    assert [row["event"] for row in rows].count("refused") == 1


def test_stop_with_a_refused_save_writes_the_row_of_the_refusal(
    ddptrain: ForkServer, idx: Path, tmp_path: Path
) -> None:
    flags = ("--model", "mlp", "--chaos", "diskfull:0:4", "--checkpoint-every", 4, "--stop-after", 4)
    run = ddptrain.run(*command(1, idx, tmp_path, *flags), code=75)
    assert run.message()["saved"] is False
    rows = read_rows(tmp_path)
    assert [(row["event"], row["step"]) for row in rows[-2:]] == [("refused", 4), ("stopped", 4)]


def test_volume_that_stays_full_exits_with_73_only_at_the_last_save(
    ddptrain: ForkServer, idx: Path, tmp_path: Path
) -> None:
    run = ddptrain.run(*command(1, idx, tmp_path, "--model", "mlp", "--chaos", "diskfull:0:6"), code=73)
    message = run.message()
    assert (message["step"], message["checkpoint"]) == (27, place(1, 4))
    assert "No space left" in message["message"]


@pytest.fixture
def breaking_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount an ext4 file system that can be made to fail as with a disk error: it becomes read-only while in use."""
    image, folder = tmp_path / "image", tmp_path / "disk"
    image.write_bytes(b"")
    os.truncate(image, 32 * 2**20)
    folder.mkdir()
    for argv in (["mkfs.ext4", "-q", image], ["mount", "-o", "loop,errors=remount-ro", image, folder]):
        done = subprocess.run([str(word) for word in argv], capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"cannot make an ext4 here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_run_continues_and_warns_when_its_volume_becomes_read_only(
    ddptrain: ForkServer, idx: Path, breaking_disk: Path
) -> None:
    run = ddptrain.start(*command(2, idx, breaking_disk, "--model", "mlp", "--step-delay", 0.1))
    run.at_step(5)
    subprocess.run(["mount", "-o", "remount,abort", str(breaking_disk)], check=True)
    report = run.at_step(9)
    while report["checkpointProblem"] is None:  # a save came before the volume broke; the next one is 4 steps later
        report = run.at_step(report["step"] + 4)
    assert "Read-only" in report["checkpointProblem"]
    run.stop()
    assert run.wait() == 75, run.output()
    message = run.message()
    assert (message["saved"], message["checkpoint"]) == (False, report["checkpoint"])
    assert "not saved: the volume refused" in message["message"]


def test_damaged_checkpoint_on_a_read_only_volume_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = start(tmp_path)
    for step in (1, 2):
        writer.save(step, content_of(1, step), {})
    (tmp_path / "run-000001" / "step-000000002.pt").write_bytes(b"rubbish")

    def refuse(path: Path, target: Path) -> Path:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(Path, "rename", refuse)  # root can write in a read-only directory
    printed: list[str] = []
    found = Checkpoints(tmp_path, keep=2).resume(printed.append)
    assert found is not None
    assert found[0].step == 1
    assert "cannot be renamed: Read-only file system" in printed[0]
