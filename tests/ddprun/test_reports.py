"""Termination reports, the choice of the root cause, and progress reports."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ddprun
from ddprun import errors
from ddprun.diagnostics import Diagnostics
from ddprun.errors import (
    DeviceError,
    GPUOutOfMemory,
    Hang,
    PeerLost,
    RanksError,
    Stopped,
    TrainerError,
    UsageError,
    classify,
)
from ddprun.heartbeat import HeartbeatRecord
from ddprun.launcher.processes import WorkerProcess, failed_silently, report_of, root_cause, split_lines
from ddprun.reporting import termination
from ddprun.reporting.http_port import ProgressPort
from ddprun.reporting.progress import ProgressRecord, StepRate, shared_snapshot
from ddprun.shared_text import SIZE, SharedText, read
from ddptrain import errors as trainer_errors
from ddptrain.data.mnist import MNIST_FILES, read_content
from tests.ddptrain.builders import PROGRESS
from tests.processes import free_port

FAILURE = {
    "schema", "outcome", "code", "kind", "cause", "rank", "step", "phase", "signal", "exception", "message", "hint",
    "next", "where", "checkpoint",
}  # fmt: skip

ENDS: dict[str, dict[str, object]] = {
    "own": {"outcome": "failed", "code": 1, "cause": "own"},
    "peer": {"outcome": "failed", "code": 77, "cause": "peer"},
    "stopped": {"outcome": "stopped", "code": 75, "cause": "own"},
    "success": {"outcome": "succeeded", "code": 0},
}


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


def test_error_without_a_text_and_with_a_huge_one_is_reported() -> None:
    class WithoutText(Exception):  # noqa: N818 - as of a user
        def __str__(self) -> str:
            raise RuntimeError("not this one")

    report = termination.failure(WithoutText(), rank=3, progress={})
    assert (report["kind"], report["message"]) == ("WithoutText", "<exception str() failed>")
    report = termination.failure(KeyError("weights", "x" * 10**7, "the end"), rank=3, progress={})
    assert report["message"].startswith("('weights'") and report["message"].endswith("'the end')")
    assert len(json.dumps(report)) < 200_000  # the launcher parses it whenever a part of it has come


def test_a_failure_report_has_every_field() -> None:
    progress = {"step": 300, "phase": "train", "checkpoint": {"run": 3, "step": 250}}
    report = termination.failure(raised(ValueError("boom")), rank=3, progress=progress)
    assert set(report) == FAILURE | {"traceback"}
    assert (report["outcome"], report["code"], report["cause"]) == ("failed", 1, "own")
    assert (report["schema"], report["kind"], report["exception"]) == (3, "ValueError", "ValueError")
    assert (report["hint"], report["next"]) == (None, None)
    assert (report["step"], report["checkpoint"]) == (300, {"run": 3, "step": 250})
    assert report["where"].startswith("test_reports.py:")


KINDS = {
    (errors.UsageError, "UsageError", 2),
    (errors.DataMissing, "DataMissing", 66),
    (errors.DataCorrupt, "DataCorrupt", 66),
    (trainer_errors.DownloadFailed, "DownloadFailed", 66),
    (errors.RendezvousError, "RendezvousFailed", 69),
    (errors.RanksError, "RanksImpossible", 71),
    (errors.VolumeError, "VolumeUnwritable", 73),
    (errors.Hang, "Hang", 76),
    (errors.PeerLost, "PeerLost", 77),
    (errors.ConfigMismatch, "ConfigMismatch", 78),
    (trainer_errors.DataMismatch, "DataMismatch", 78),
    (trainer_errors.WeightsDiffer, "WeightsDiffer", 78),
    (trainer_errors.NotFinite, "NotFinite", 79),
    (errors.DeviceError, "DeviceFailed", 1),
    (errors.GPUOutOfMemory, "GPUOutOfMemory", 1),
    (errors.Superseded, "Superseded", 80),
    (errors.ExitedEarly, "ExitedEarly", 1),
}


@pytest.mark.parametrize(("error", "kind", "code"), sorted(KINDS, key=lambda row: row[1]))
def test_every_error_has_a_stable_kind_and_code(error: type[TrainerError], kind: str, code: int) -> None:
    report = termination.failure(error("x"), rank=0, progress={})
    assert (report["kind"], report["code"]) == (kind, code)


def test_docs_list_every_kind() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "reports.md").read_text()
    for kind in {kind for _, kind, _ in KINDS} | {"Stopped", "Killed"}:
        assert f"- `{kind}` (" in page


def test_launcher_has_no_word_of_what_is_trained() -> None:
    words = "accuracy|best_accuracy|keep_best|data_?digest|init_?from|evaluation|cursor|mnist"
    texts = {path.name: path.read_text() for path in Path(ddprun.__file__).parent.rglob("*.py")}
    assert [name for name, text in texts.items() if re.search(words, text, re.IGNORECASE)] == []


def test_absent_data_and_damaged_data_have_different_kinds(tmp_path: Path) -> None:
    with pytest.raises(errors.DataMissing):
        read_content(tmp_path, MNIST_FILES[0])
    (tmp_path / f"{MNIST_FILES[0].name}.gz").write_bytes(b"no gzip stream")
    with pytest.raises(errors.DataCorrupt):
        read_content(tmp_path, MNIST_FILES[0])


def test_a_long_report_keeps_kind_hint_and_next() -> None:
    error = UsageError("x" * 5000, hint="it is negative", next_step="correct --lr")
    report = termination.failure(raised(error), rank=0, progress={}) | {"traceback": "t" * 5000}
    decoded = json.loads(termination.encode(report))
    assert [decoded[key] for key in ("kind", "hint", "next")] == ["UsageError", "it is negative", "correct --lr"]
    assert decoded["message"].startswith("x" * 2000)
    long = report | {"hint": "h" * 5000, "next": "n" * 5000}
    decoded = json.loads(termination.encode(long))
    assert all(decoded[key].startswith(key[0] * 200) for key in ("hint", "next"))
    assert decoded["message"].startswith("x" * 2000)


@given(st.text(max_size=6000), st.text(max_size=9000))
@settings(max_examples=60, deadline=None)
def test_a_report_is_at_most_4096_bytes_of_json_for_any_text(message: str, trace: str) -> None:
    report = termination.failure(UsageError(message), rank=0, progress={}) | {"traceback": trace}
    encoded = termination.encode(report)
    assert len(encoded) <= 4096
    decoded = json.loads(encoded)
    assert set(decoded) == FAILURE | {"traceback"}
    if len(json.dumps(trace)) > 4096 and decoded["traceback"]:
        assert trace.endswith(decoded["traceback"].removeprefix("...")), "the end of a traceback must stay"


def test_the_report_is_written_in_place_because_the_file_is_a_mount(tmp_path: Path) -> None:
    path = tmp_path / "termination-log"
    path.write_text("x" * 5000)
    inode = path.stat().st_ino
    termination.write({"schema": 1, "code": 0}, path)
    assert json.loads(path.read_text()) == {"schema": 1, "code": 0}
    assert path.stat().st_ino == inode


@pytest.mark.parametrize(
    ("first", "second", "kept"),
    [
        ("own", "peer", 0), ("peer", "own", 1), ("own", "own", 0), ("peer", "peer", 0),
        ("success", "own", 1), ("success", "peer", 1), ("success", "success", 0), ("own", "success", 0),
        ("stopped", "peer", 0), ("peer", "stopped", 0), ("own", "stopped", 0), ("stopped", "own", 1),
        ("nothing", "success", 1), ("rubbish", "peer", 1),
    ],
)  # fmt: skip
def test_shared_termination_file_keeps_first_most_severe_report(
    tmp_path: Path, first: str, second: str, kept: int
) -> None:
    path = tmp_path / "termination-log"
    path.write_text("{half" if first == "rubbish" else "")
    for rank, end in enumerate((first, second)):
        if end in ENDS:
            termination.write(ENDS[end] | {"rank": rank}, path, shared=True, env={})
    assert json.loads(path.read_text())["rank"] == kept


@pytest.mark.parametrize(("first", "second"), [("own", "success"), ("success", "own"), ("own", "peer")])
def test_the_report_of_a_restart_replaces_earlier_ones(tmp_path: Path, first: str, second: str) -> None:
    path = tmp_path / "termination-log"
    for restart, end in ((0, first), (1, second), (0, first)):  # a late report of the first start changes nothing
        env = {"TORCHELASTIC_RESTART_COUNT": str(restart)}
        termination.write(ENDS[end] | {"rank": restart}, path, shared=True, env=env)
    assert json.loads(path.read_text())["rank"] == 1


@pytest.mark.parametrize("field", ["where", "progress", "exception", "checkpoint"])
def test_a_report_stays_json_if_any_other_field_is_too_long(field: str) -> None:
    report = termination.failure(UsageError("boom"), rank=0, progress={}) | {field: {"text": "x" * 9000}}
    encoded = termination.encode(report)
    assert len(encoded) <= 4096
    assert json.loads(encoded)["code"] == 2
    assert json.loads(encoded)["kind"] == "UsageError"


def test_an_unwritable_termination_file_is_only_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    termination.write({"schema": 1}, tmp_path / "absent" / "file")
    assert "cannot write the termination message" in capsys.readouterr().out


NCCL_SYSTEM = (
    "NCCL error in: ProcessGroupNCCL.cpp:77, unhandled system error (run with NCCL_DEBUG=INFO for details)\n"
    "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.\n"
)
DUPLICATE = "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1000"


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("[../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1234", PeerLost),
        ("writev [127.0.0.1]:33862: Connection reset by peer", PeerLost),
        ("Broken pipe", PeerLost),
        ("Timed out waiting 300000ms for recv operation to complete", Hang),
        ("mat1 and mat2 shapes cannot be multiplied", RuntimeError),
        ("CUDA error: an illegal memory access was encountered", DeviceError),
        ("CUDA error: the launch timed out and was terminated", DeviceError),
        ("CUDA error: uncorrectable ECC error encountered", DeviceError),
        ("CUDA error: out of memory", GPUOutOfMemory),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", GPUOutOfMemory),
        ("CUDA driver version is insufficient for CUDA runtime version", DeviceError),
        ("Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU", DeviceError),
        ("CUDA error: invalid device ordinal", DeviceError),
        ("No CUDA GPUs are available", DeviceError),
        (NCCL_SYSTEM + "Last error:\nsocketProgress: Connection closed by remote peer node-1<4>", PeerLost),
        (NCCL_SYSTEM + "Last error:\nError while creating shared memory segment /dev/shm/nccl-x", DeviceError),
        ("NCCL error in: a.cpp:1, remote process exited or there was a network error, NCCL version 2.27", PeerLost),
        ("NCCL error in: a.cpp:1, unhandled cuda error (run with NCCL_DEBUG=INFO for details)", DeviceError),
        ("NCCL error in: a.cpp:1, invalid usage\nncclInvalidUsage: bug.\nLast error:\n" + DUPLICATE, RanksError),
        ("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes", RuntimeError),
    ],
)
def test_errors_of_gloo_are_classified(text: str, kind: type[BaseException]) -> None:
    assert type(classify(RuntimeError(text))) is kind


def test_a_full_gpu_has_a_kind_and_advice() -> None:
    text = "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 79.11 GiB."
    report = termination.failure(raised(torch.OutOfMemoryError(text)), rank=1, progress={"step": 3, "phase": "step"})
    assert (report["kind"], report["code"], report["cause"], report["step"]) == ("GPUOutOfMemory", 1, "own", 3)
    assert report["message"] == text
    assert "another process" in report["hint"]
    for advice in ("smaller batch", "micro-batches", "bfloat16", "PYTORCH_ALLOC_CONF=expandable_segments:True"):
        assert advice in report["next"]


@pytest.mark.parametrize("text", ["CUDA error: invalid device ordinal", "No CUDA GPUs are available"])
def test_a_missing_gpu_is_not_taken_for_a_broken_one(text: str) -> None:
    error = classify(RuntimeError(text))
    assert isinstance(error, DeviceError)
    assert "fewer GPUs than ranks" in error.hint
    assert "LOCAL_RANK" in error.next_step


@pytest.mark.parametrize(("code", "kind"), [(None, "ExitedEarly"), (0, "ExitedEarly"), (3, "SystemExit")])
def test_sys_exit_before_the_end_is_a_failure(code: int | None, kind: str) -> None:
    report = termination.failure(raised(SystemExit(code)), rank=0, progress={})
    assert (report["kind"], report["code"], report["cause"]) == (kind, 1, "own")


def test_an_os_error_of_user_code_is_not_a_lost_peer() -> None:
    assert type(classify(OSError("Connection reset by peer"))) is OSError


def ended(
    rank: int = 0,
    code: int = 0,
    *,
    at: float = 1.0,
    cause: str = "own",
    by: int = 0,
    reported: bool = True,
    said: bytes = b"",
    killed_by_us: bool = False,
) -> WorkerProcess:
    """Return an ended rank as the launcher has it after waitpid; ``by`` is the signal that ended it."""
    report = {"schema": 1, "code": code, "cause": cause, "rank": rank, "checkpoint": None}
    text = json.dumps(report).encode() if reported and not by else b""
    worker = WorkerProcess(rank, 0, -1, -1, Diagnostics.create(rank), ending=text, status=by or code << 8, ended=at)
    worker.tail.extend(said.split(b"\n") if said else ())
    worker.killed_by_us = killed_by_us
    return worker


LOST = {"code": 77, "cause": "peer"}
PG = b"[PG ID 0 Rank 0] Process group watchdog thread terminated with exception: "
NCCL = (
    b"[rank1]:[E1121 10:00:00 ProcessGroupNCCL.cpp:2068] [PG ID 0 PG GUID 0(default_pg) Rank 1] Process group watchdog "
    b"thread terminated with exception: NCCL error: remote process exited or there was a network error",
    b"[rank1]: ProcessGroupNCCL.cpp:2068 NCCL error: unhandled system error, ncclSystemError: socketProgress",
    b"[E1121 ProcessGroupNCCL.cpp:688] [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9)",
)
OWN_GPU = (
    b"CUDA error: an illegal memory access was encountered", b"CUDA error: uncorrectable ECC error encountered",
    b"CUDA error: the launch timed out and was terminated",
    b"NCCL error: unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
)  # fmt: skip
SHM_FULL = PG + b"NCCL error\nLast error: Error while creating shared memory segment /dev/shm/nccl-1 (size 9637888)"
DUMPED = NCCL[0] + b"\nFatal Python error: Aborted\n\nThread 0x00007f (most recent call first):"
KILLED = {"code": 137, "signal": 9, "cause": "own", "kind": "Killed", "exception": None}


@pytest.mark.parametrize(
    ("node", "cause", "says"),
    [
        # A rank's own failure before a lost peer, although the peer ended first; then the earliest.
        ([LOST, {"rank": 1, "by": 9, "at": 1.01}], KILLED | {"rank": 1, "message": "rank 1 was killed by SIGKILL"},
         "out-of-memory killer"),
        ([{"code": 79, "at": 2.0}, {"rank": 1, "code": 66}], {"code": 66}, ""),
        ([LOST | {"rank": 2}, LOST | {"rank": 3, "at": 1.1}], LOST | {"rank": 2}, ""),
        ([{"by": 9, "at": 3.0, "killed_by_us": True}, LOST | {"rank": 1}], {"rank": 1}, ""),
        ([{"by": 35}], {"code": 163, "signal": 35, "message": "rank 0 was killed by signal 35"}, ""),
        ([{"code": 3, "reported": False}], {"code": 3, "kind": "Error", "exception": None},
         "rank 0 exited with code 3 and no report"),
        # What NCCL's watchdog has printed before it aborted the rank.
        *(([{"by": 6, "said": line}], {"code": 134, "signal": 6, "cause": "peer"}, "") for line in NCCL),
        ([{"by": 6, "said": NCCL[0]}, {"rank": 1, "by": 9, "at": 1.5}], {"rank": 1}, ""),
        ([{"by": 11, "said": DUMPED}], {"cause": "peer"}, ""),
        *(([{"rank": 1, "by": 6, "said": NCCL[0]}, {"by": 6, "at": 2.0, "said": PG + reason}],
           {"rank": 0, "code": 134, "cause": "own", "kind": "DeviceFailed", "signal": 6}, reason.decode())
          for reason in OWN_GPU),
        ([{"by": 6, "said": SHM_FULL}], {"code": 134, "signal": 6, "cause": "own"}, "/dev/shm larger"),
        ([{"by": 6, "said": b"what():  CUDA error: out of memory"}],
         {"kind": "GPUOutOfMemory", "signal": 6, "cause": "own"}, "a smaller batch"),
        ([{"by": 9, "said": b"caught CUDA error: out of memory, trying a batch of 16"}], KILLED, "out of memory"),
        ([{"by": 6, "said": b"terminate called after throwing an instance of 'std::bad_alloc'"}], {"cause": "own"}, ""),
    ],
)  # fmt: skip
def test_root_cause_of_a_node(node: list[dict[str, Any]], cause: dict[str, Any], says: str) -> None:
    found = root_cause([ended(**rank) for rank in node])
    assert found.items() >= cause.items()
    assert says in f"{found.get('message')} {found.get('hint')} {found.get('next')}"


def test_ranks_killed_after_sigterm_are_stopped_and_unsaved() -> None:
    stuck = ended(by=9, killed_by_us=True)
    cause = root_cause([stuck], stop_signal=15)
    assert (cause["outcome"], cause["code"], cause["saved"]) == ("stopped", 75, False)
    assert (cause["kind"], cause["hint"]) == ("Stopped", None)
    assert not failed_silently(cause, [stuck]), "the rest of the pod's grace is for the report"


def test_only_a_failure_without_a_report_is_announced_for_the_rank() -> None:
    workers = [ended(0, by=9), ended(1, reported=False), ended(2, 1)]
    silent = [failed_silently(report_of(worker) | {"outcome": "failed"}, workers) for worker in workers]
    assert silent == [True, True, False]


def test_a_stop_is_printed_without_error_and_a_lost_peer_in_one_line() -> None:
    assert Stopped("stopped by a signal after step 5, and saved", saved=True).lines().startswith("stopped by")
    assert PeerLost("gone", hint="h", next_step="n").lines() == "error: gone"


def test_a_progress_bar_costs_what_it_shows_and_not_what_it_has_drawn() -> None:
    lines, begun = [b""][:0], b""
    for number in range(50_000):
        whole, begun = split_lines(begun, b"\r%5d of 50000 drawn with a long text to make it slow" % number)
        lines += whole
        assert len(begun) < 100
    whole, begun = split_lines(begun, b"\nnext")
    assert [*lines, *whole] == [b"49999 of 50000 drawn with a long text to make it slow"]
    assert begun == b"next"


def test_a_progress_bar_that_moves_for_long_is_printed_every_ten_seconds() -> None:
    worker = ended()
    printed = [(now, line) for now in range(100, 131) for line in worker.take(b"\r%3d%%" % now, float(now))]
    assert printed == [(110, b"110%"), (120, b"120%"), (130, b"130%")]
    assert worker.take(b"\r131%\n\r  1%", 131.0) == [b"130%\r131%"]
    assert worker.take(b"\r  2%", 140.0) == [], "the next bar has just begun"
    assert worker.take(b"\n", 150.0) == [b"  2%"]
    assert worker.take(b"not a bar", 200.0) + worker.take(b", without an end", 300.0) == []


def test_an_endless_line_is_divided_and_nothing_is_lost() -> None:
    lines, begun = [b""][:0], b""
    for _ in range(100):
        whole, begun = split_lines(begun, b"x" * 10_000)
        lines += whole
        assert len(begun) <= 65536
    assert sum(map(len, lines)) + len(begun) == 1_000_000
    assert split_lines(b"a", b"b\r\nc\r") == ([b"ab\r"], b"c\r")


def test_progress_is_served_and_changes_only_with_completed_work() -> None:
    progress = ProgressRecord(4)
    port = free_port()
    progress.serve(port)

    def get(path: str) -> dict[str, object]:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60) as answer:
            return dict(json.load(answer))

    first, second = get("/progress"), get("/progress")
    assert set(first) == PROGRESS - {"accuracy", "data"}, "which are the trainer's own"
    assert first["seq"] == second["seq"]
    assert second["ageSeconds"] >= first["ageSeconds"]  # type: ignore[operator]
    progress.update(phase="train", step=1, loss=float("nan"), samplesPerSecond=float("inf"))
    third = get("/progress")
    assert third["seq"] == int(str(first["seq"])) + 1
    assert (third["step"], third["loss"], third["samplesPerSecond"]) == (1, "NaN", None)
    assert get("/healthz") == {"ok": True}
    with pytest.raises(urllib.error.HTTPError, match="404"):
        get("/elsewhere")


def test_a_loss_that_later_reports_keep_has_its_own_step() -> None:
    progress = ProgressRecord(1)
    progress.update(phase="train", step=100, loss=float("nan"))
    for step in (101, 102):
        progress.update(step=step)
        found = progress.snapshot()
        assert (found["step"], found["loss"], found["lossStep"]) == (step, "NaN", 100)
    progress.update(step=103, loss=float("nan"))
    assert progress.snapshot()["lossStep"] == 103


def test_time_of_saves_adds_up_also_of_those_that_fail() -> None:
    memory = memoryview(bytearray(SIZE))
    progress = ProgressRecord(1, SharedText(memory))
    with progress.saving():
        began = time.monotonic()
        while time.monotonic() - began < 0.01:
            pass
    first = progress.snapshot()["savingSeconds"]
    with pytest.raises(OSError, match="full"), progress.saving():
        began = time.monotonic()
        while time.monotonic() - began < 0.01:
            pass
        raise OSError("full")
    second = progress.snapshot()["savingSeconds"]
    assert 0.01 <= first < second - 0.009
    progress.update(step=7)
    shown = shared_snapshot(read(memory), HeartbeatRecord())
    assert shown is not None
    assert shown["savingSeconds"] == second, "the next report has it"


def test_steps_per_second_are_of_the_last_10_to_20_seconds() -> None:
    rate = StepRate()
    assert rate.after(100, 50.0) is None  # resumed: the steps before are not of this process
    assert rate.after(101, 50.5) == 2.0
    assert [rate.after(101 + 4 * second, 50.5 + second) for second in range(1, 40)][-1] == 4.0
    assert rate.after(1, 91.0) is None  # another training of the script
    assert rate.after(2, 91.0) is None  # a clock that has not advanced
    assert [rate.after(2 + n, 91.0 + 60 * n) for n in (1, 2)] == pytest.approx([2 / 60, 1 / 60], rel=0.01)


def test_slow_connections_to_the_progress_port_are_bounded() -> None:
    progress = ProgressRecord(1)
    port = free_port()
    progress.serve(port)
    opened_by_us, before = 200, len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - names only
    with contextlib.ExitStack() as opened:
        for _ in range(opened_by_us):
            slow = opened.enter_context(socket.create_connection(("127.0.0.1", port)))
            slow.sendall(b"GET /prog")
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=60) as answer:
            assert json.load(answer) == {"ok": True}
        assert len(os.listdir("/proc/self/fd")) < before + opened_by_us + 30  # noqa: PTH208


def test_progress_port_is_free_when_its_owner_has_ended_although_a_child_lives_on() -> None:
    number = free_port()
    port = ProgressPort(number, dict)
    (read, write), (begun, begins) = os.pipe(), os.pipe()
    if (child := os.fork()) == 0:
        os.write(begins, b"1")
        os.close(write)
        os.read(read, 1)  # until the parent closes it
        os._exit(0)
    try:
        assert os.read(begun, 1) == b"1"
        port.close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", number), timeout=60)
        ProgressPort(number, dict).close()
    finally:
        for descriptor in (read, write, begun, begins):
            os.close(descriptor)
        os.waitpid(child, 0)
