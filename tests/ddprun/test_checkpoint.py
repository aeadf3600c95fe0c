"""Checkpoints without a training: save, find the newest valid one, keep, claim, and clean up."""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from ddprun import checkpoint_files
from ddprun.checkpoint_files import (
    Checkpoints,
    checkpoint_file,
    manifests,
    newest_valid,
    reported_place,
    run_numbers,
    seal,
    verify,
)
from ddprun.errors import Mismatch, Superseded, VolumeError
from ddprun.files import write_atomically


def store(root: Path, *, keep: int = 3) -> Checkpoints:
    """Return a writer that has claimed a run."""
    writer = Checkpoints(root, keep=keep)
    writer.prepare()
    writer.resume(lambda _: None)
    writer.claim({"uid": "u"})
    return writer


def newest(root: Path) -> tuple[int, int, bytes] | None:
    found = newest_valid(root, lambda path, reason: None)
    return (found[0].run, found[0].step, found[1]) if found else None


def test_the_newest_is_the_highest_run_then_the_highest_step(tmp_path: Path) -> None:
    store(tmp_path, keep=9).save(90, b"first, far", {})
    second = store(tmp_path, keep=9)
    second.save(10, b"second", {})
    second.save(20, b"second, later", {})
    assert newest(tmp_path) == (2, 20, b"second, later")
    store(tmp_path)  # a third start that saved nothing yet
    assert newest(tmp_path) == (2, 20, b"second, later")


def test_invalid_checkpoints_are_set_aside_until_a_valid_one_is_found(tmp_path: Path) -> None:
    writer = store(tmp_path, keep=9)
    for step in (1, 2, 3, 4, 5):
        writer.save(step, b"content %d" % step, {"position": 32 * step})
    folder = tmp_path / "run-000001"
    manifest = folder / "step-000000005.json"
    manifest.write_text(manifest.read_text().replace('"position": 160', '"position": 161'))
    (folder / "step-000000004.pt").write_bytes(b"rubbish")
    (folder / "step-000000003.json").write_bytes(b"{")
    (folder / "step-000000002.pt").unlink()
    messages: list[str] = []
    found = Checkpoints(tmp_path, keep=9).resume(messages.append)
    assert found is not None
    assert found[1] == b"content 1"
    reasons = [
        "manifest does not match its own digest", "content does not match its digest", "manifest is not readable",
        "checkpoint file is absent",
    ]  # fmt: skip
    assert all(reason in line for reason, line in zip(reasons, messages, strict=True))
    assert sorted(path.name for path in folder.glob("*.corrupt")) == [
        "step-000000002.json.corrupt", "step-000000003.json.corrupt", "step-000000003.pt.corrupt",
        "step-000000004.json.corrupt", "step-000000004.pt.corrupt", "step-000000005.json.corrupt",
        "step-000000005.pt.corrupt",
    ]  # fmt: skip
    assert [step for step, _ in manifests(tmp_path, 1)] == [1]


def test_a_checkpoint_that_the_disk_cannot_read_is_skipped_but_not_set_aside(tmp_path: Path) -> None:
    writer = store(tmp_path, keep=9)
    for step in (1, 2):
        writer.save(step, b"content %d" % step, {})
    unreadable = tmp_path / "run-000001" / "step-000000002.pt"
    unreadable.unlink()
    unreadable.symlink_to("/proc/self/mem")  # a read of its first bytes gives EIO
    found = Checkpoints(tmp_path, keep=9).resume(print)
    assert found is not None
    assert found[1] == b"content 1"
    assert unreadable.is_symlink(), "a disk may recover"
    (tmp_path / "run-000001" / "step-000000001.json").unlink()
    with pytest.raises(VolumeError, match=r"cannot read .*Input/output error"):  # not a new training from step 0
        Checkpoints(tmp_path, keep=9).resume(print)


def test_checkpoints_that_their_writer_replaces_during_the_search_are_searched_again(tmp_path: Path) -> None:
    writer = store(tmp_path, keep=2)
    for step in (1, 2):
        writer.save(step, b"content %d" % step, {})
    (tmp_path / "run-000001" / "step-000000002.pt").write_bytes(b"rubbish")

    def replace(_path: Path, _reason: str) -> None:
        if writer.last and writer.last.step == 2:
            for step in (3, 4):
                writer.save(step, b"content %d" % step, {})

    found = newest_valid(tmp_path, replace)
    assert found is not None
    assert found[1] == b"content 4"


@pytest.mark.parametrize(
    "fields",
    [
        "[" * 100_000,
        {"run": "x"},
        {"step": None},
        {"sha256": 1},
        {"format": "1"},
    ],
)
def test_a_manifest_of_another_program_is_set_aside(tmp_path: Path, fields: dict[str, object] | str) -> None:
    writer = store(tmp_path, keep=9)
    for step in (1, 2):
        writer.save(step, b"content %d" % step, {})
    path = tmp_path / "run-000001" / "step-000000002.json"
    if isinstance(fields, dict):
        manifest = json.loads(path.read_text()) | fields
        manifest["seal"] = seal(manifest)
        path.write_text(json.dumps(manifest))
    else:
        path.write_text(fields)
    found = Checkpoints(tmp_path, keep=9).resume(print)
    assert found is not None
    assert found[1] == b"content 1"
    assert path.with_name(f"{path.name}.corrupt").exists()


def test_an_unknown_format_is_refused_and_not_set_aside(tmp_path: Path) -> None:
    store(tmp_path).save(1, b"good", {})
    path = tmp_path / "run-000001" / "step-000000001.json"
    manifest = json.loads(path.read_text()) | {"format": 2}
    manifest["seal"] = seal(manifest)
    path.write_text(json.dumps(manifest))
    with pytest.raises(Mismatch, match="format 2") as caught:
        Checkpoints(tmp_path, keep=1).resume(lambda _: None)
    assert caught.value.code == 78
    assert path.exists()


def test_the_parents_checkpoint_survives_the_first_save_of_the_next_run(tmp_path: Path) -> None:
    first = store(tmp_path, keep=2)
    for step in (1, 2, 3):
        first.save(step, b"x", {})
    assert _everything(tmp_path) == [(1, 3), (1, 2)]
    second = store(tmp_path, keep=2)
    assert _everything(tmp_path) == [(1, 3), (1, 2)]
    second.save(4, b"x", {})
    assert _everything(tmp_path) == [(2, 4), (1, 3)]
    second.save(5, b"x", {})
    assert _everything(tmp_path) == [(2, 5), (2, 4)]
    assert not list(tmp_path.glob("run-000001/step-*"))


def test_a_skipped_checkpoint_does_not_take_the_place_of_the_one_resumed_from(tmp_path: Path) -> None:
    first = store(tmp_path, keep=9)
    for step in (1, 2):
        first.save(step, b"content %d" % step, {})
    second = Checkpoints(tmp_path, keep=1)
    second.resume(print, lambda manifest, content: "of another program" if content == b"content 2" else "")
    second.claim({})
    second.save(3, b"content 3", {})  # not evaluated yet, so its weights may have diverged
    assert _everything(tmp_path) == [(2, 3), (1, 2), (1, 1)]
    second.save(4, b"content 4", {})
    assert _everything(tmp_path) == [(2, 4), (2, 3), (1, 2)]


def test_a_full_volume_at_the_last_save_leaves_the_checkpoint_resumed_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = store(tmp_path, keep=9)
    for step in (1, 2):
        first.save(step, b"content %d" % step, {})
    second = Checkpoints(tmp_path, keep=1)
    second.resume(print, lambda manifest, content: "of another program" if content == b"content 2" else "")
    second.claim({})

    def full(path: Path, content: bytes, **options: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(checkpoint_files, "write_atomically", full)
    with pytest.raises(VolumeError, match="No space left"):
        second.save(3, b"content 3", {}, required=True)
    assert _everything(tmp_path) == [(1, 2), (1, 1)]


def _everything(root: Path) -> list[tuple[int, int]]:
    return [(run, step) for run in run_numbers(root) for step, _ in manifests(root, run)]


def test_the_first_save_removes_the_empty_folders_of_earlier_runs(tmp_path: Path) -> None:
    store(tmp_path).save(1, b"x", {})
    for _ in range(5):
        store(tmp_path)  # starts that saved nothing
    (tmp_path / "run-000004" / "not-finite-000000002.json").touch()
    assert run_numbers(tmp_path) == [6, 5, 4, 3, 2, 1]
    ghost, newest_run = store(tmp_path), store(tmp_path)
    newest_run.save(2, b"x", {})
    assert run_numbers(tmp_path) == [8, 4, 1]
    with pytest.raises(Superseded):
        ghost.save(2, b"x", {})
    assert store(tmp_path).run == 9


def test_the_first_save_is_read_back_from_the_volume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dropped: list[str] = []

    def record(descriptor: int, offset: int, length: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_DONTNEED
        dropped.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)

    monkeypatch.setattr(os, "posix_fadvise", record)
    writer = store(tmp_path)
    for step in (1, 2):
        writer.save(step, b"x", {})
    assert dropped == ["step-000000001.pt", "step-000000001.json"]


def test_starts_that_saw_the_same_runs_claim_different_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    earlier: list[int] = []

    def numbers_before_another_start(root: Path) -> list[int]:
        found = run_numbers(root)
        if len(earlier) < 2:
            earlier.append(0)
            earlier[-1] = Checkpoints(root, keep=3).claim({})  # between this start's look and its claim
        return found

    monkeypatch.setattr(checkpoint_files, "run_numbers", numbers_before_another_start)
    assert Checkpoints(tmp_path, keep=3).claim({}) not in earlier
    assert sorted(run_numbers(tmp_path)) == [1, 2, 3]


def test_the_next_start_deletes_leftovers_of_a_killed_writer(tmp_path: Path) -> None:
    old = store(tmp_path)
    old.save(40, b"whole", {})
    run = tmp_path / "run-000001"
    leftovers = [
        run / ".step-000000050.pt.host.17.0badcafe.tmp",
        run / "step-000000050.pt",  # renamed, but its manifest was never written
    ]
    for leftover in leftovers:
        leftover.write_bytes(b"half")
    store(tmp_path)
    assert not [leftover for leftover in leftovers if leftover.exists()]
    assert newest(tmp_path) == (1, 40, b"whole")
    with pytest.raises(Superseded):
        old.save(50, b"whole", {})


def test_a_failed_claim_leaves_no_empty_run(tmp_path: Path) -> None:
    writer = Checkpoints(tmp_path, keep=1)
    with pytest.raises(TypeError):
        writer.claim({"uid": object()})
    assert not list(tmp_path.iterdir())


def test_a_manifest_with_the_name_of_another_is_invalid(tmp_path: Path) -> None:
    store(tmp_path).save(1, b"good", {})
    folder = tmp_path / "run-000001"
    for suffix in (".json", ".pt"):
        (folder / f"step-000000009{suffix}").write_bytes((folder / f"step-000000001{suffix}").read_bytes())
    assert verify(folder / "step-000000009.json")[0] == "manifest is that of run 1, step 1"
    assert newest(tmp_path) == (1, 1, b"good")


@pytest.mark.parametrize("refusal", [errno.EINVAL, errno.EBADF, errno.ENOTSUP])
def test_a_file_system_without_directory_sync_and_modes_is_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: int
) -> None:
    fsync = os.fsync

    def refuse_directories(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(refusal, os.strerror(refusal))
        fsync(descriptor)

    def refuse_modes(path: Path, mode: int) -> None:
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

    monkeypatch.setattr(os, "fsync", refuse_directories)  # as SMB and FUSE mounts do
    monkeypatch.setattr(Path, "chmod", refuse_modes)
    store(tmp_path).save(1, b"x", {})
    assert newest(tmp_path) == (1, 1, b"x")


def test_an_impossible_directory_is_a_volume_error_with_a_next_step(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(VolumeError, match="cannot write") as caught:
        Checkpoints(tmp_path / "file" / "checkpoints", keep=1).prepare()
    assert caught.value.code == 73
    assert "check every part of that path" in caught.value.next_step


def test_files_are_group_writable_with_any_umask(tmp_path: Path) -> None:
    store(tmp_path).save(1, b"x", {})
    folder = tmp_path / "run-000001"
    assert folder.stat().st_mode & 0o7777 == 0o2775
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o664}


def test_a_failed_write_leaves_no_temporary_file(tmp_path: Path) -> None:
    target = tmp_path / "directory"
    target.mkdir()
    with pytest.raises(OSError, match="irectory"):
        write_atomically(target, b"content")
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize(
    ("directory", "path"),
    [
        ("", "run-000003/step-000000250.pt"),
        ("/ckpt/exp", "run-000003/step-000000250.pt"),
        ("/ckpt", "exp/run-000003/step-000000250.pt"),
        ("/ckpt/other", None),  # the operator could not find it
    ],
)
def test_reported_path_is_relative_to_the_jobs_directory(directory: str, path: str | None) -> None:
    file = checkpoint_file(Path("/ckpt/exp"), 3, 250)
    place = reported_place(file, 3, 250, {"DDPJOB_CHECKPOINT_DIR": directory})
    assert place == {"run": 3, "step": 250} | ({"path": path} if path else {})
