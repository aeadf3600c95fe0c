"""What the end of a log says about a failure. For logs that torchrun writes: tests/ddprun/resilience."""

import asyncio
import json
import time
import traceback
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpjob.api.log_failure import MAX_TEXT, LogFailure, error_file, log_failure

MESSAGE = "sample 17 has 3 channels, expected 1"


def read(text: str) -> LogFailure:
    found = log_failure(text)
    assert found is not None
    return found


FRAMES = 'Traceback (most recent call last):\n  File "/work/train.py", line 7, in main\n    step()\n'
NCCL = (
    "torch.distributed.DistBackendError: NCCL error in: /torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:3384, "
    "unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL version 2.27.5\n"
    "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.\n"
    "Last error:\n"
)
BLOCK = (
    "============\ntrain.py FAILED\n------------\nFailures:\n{others}\n------------\n"
    "Root Cause (first observed failure):\n[0]:\n  rank      : 1 (local_rank: 1)\n  exitcode  : {code} (pid: 7) \n"
    "  error_file: <N/A>\n  traceback : Signal 9 (SIGKILL) received\n============\n"
)


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (
            "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:589] Connection closed by peer [10.0.0.1]:1",
            "peer",
        ),
        ("RuntimeError: [/g/gloo/transport/tcp/pair.cc:537] Read error [10.0.0.1]:1: Connection reset by peer", "peer"),
        ("RuntimeError: Broken pipe", "peer"),
        ("torch.distributed.DistNetworkError: failed to recv, got 0 bytes", "peer"),
        (f"{NCCL}socketProgressOpt: Call to recv from 10.0.0.1<1> failed : Connection reset by peer", "peer"),
        (f"{NCCL}socketPollConnect: connect to 10.0.0.1<1> returned Connection refused", "peer"),
        (
            f"{NCCL}Error while creating shared memory segment /dev/shm/nccl-x (size 9637888), error: No space left",
            "own",
        ),
        ("RuntimeError: [/g/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv", "unknown"),
        ("torch.distributed.DistBackendError: NCCL communicator was aborted on rank 0.", "unknown"),
        (f"{NCCL}Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 40000", "unknown"),
        (f"{NCCL.replace('system error', 'cuda error')}Cuda failure 2 'out of memory'", "own"),
        ("RuntimeError: the tracker says: connection reset by peer", "own"),
        ("ConnectionResetError: [Errno 104] Connection reset by peer", "own"),
        ("requests.exceptions.ConnectionError: ('Connection aborted.', RemoteDisconnected('…'))", "own"),
        ("ValueError: gloo: Connection closed by peer", "own"),
    ],
)
def test_only_errors_of_torch_distributed_show_a_lost_peer(error: str, cause: str) -> None:
    for prefix in ("", "[rank1]: "):
        lines = (FRAMES + error).split("\n")
        assert read("\n".join(prefix + line for line in lines)).cause == cause


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (f"{NCCL}Duplicate GPU detected", "unhandled system error (run with NCCL_DEBUG=INFO for details)"),
        ("RuntimeError: Error(s) in loading state_dict for Net:\n\tDuplicate GPU detected", "Error(s) in loading"),
    ],
)
def test_message_has_the_line_that_names_the_error(error: str, message: str) -> None:
    found = read(FRAMES + error).message
    assert message in found and found.endswith(": Duplicate GPU detected") and "::" not in found


def test_error_that_the_program_raises_for_a_lost_peer_is_the_peers() -> None:
    lost = f"{FRAMES}RuntimeError: [/g/gloo/transport/tcp/pair.cc:553] Connection closed by peer"
    for link in ("During handling of the above exception, another exception occurred:",
                 "The above exception was the direct cause of the following exception:"):  # fmt: skip
        assert read(f"{lost}\n\n{link}\n\n{FRAMES}TrainError: step 5 failed").cause == "peer"
    assert read(f"{lost}\nretrying\n{FRAMES}TrainError: step 5 failed").cause == "own"


def test_exception_in_a_worker_of_a_data_loader_is_named_with_its_own_line() -> None:
    found = read(
        f"{FRAMES}ValueError: Caught ValueError in DataLoader worker process 0.\n"
        "Original Traceback (most recent call last):\n"
        '  File "/usr/lib/python3.11/site-packages/torch/utils/data/_utils/worker.py", line 1, in loop\n    fetch()\n'
        f'  File "/work/data.py", line 9, in __getitem__\n    raise ValueError\nValueError: {MESSAGE}\n'
    )
    assert (found.message, found.where) == (MESSAGE, "/work/data.py:9")


@pytest.mark.parametrize("mark", ["Exception ignored in: <function Pool.__del__>", "Exception in thread Thread-1:"])
def test_exception_that_ended_no_process_is_not_the_cause(mark: str) -> None:
    found = read(f"{FRAMES}ValueError: {MESSAGE}\n{mark}\n{FRAMES}TypeError: 'NoneType' object is not callable\n")
    assert found.exception == "ValueError"


def test_exception_that_was_logged_is_not_the_cause_of_another_exit_code() -> None:
    retried = f"{FRAMES}OSError: stale file handle\nretry\n"
    assert read(retried + BLOCK.format(others="", code="3")) == LogFailure("unknown", 1, 3, last_line="")
    assert read(retried + BLOCK.format(others="", code="-9")).signal == 9
    assert read(retried + BLOCK.format(others="", code="1")).exception == "OSError"


def test_rank_that_torchrun_itself_stopped_is_not_the_first() -> None:
    other = "[1]:\n  rank      : 3 (local_rank: 3)\n  exitcode  : -11 (pid: 8)  (SIGSEGV)\n  error_file: <N/A>"
    found = read(BLOCK.format(others=other, code="-15"))
    assert (found.rank, found.signal) == (3, 11)


def test_cut_traceback_and_escape_sequences_are_read() -> None:
    found = read(
        "ain\n  File \"/work/train.py\", line 7, in main\n\x1b[31m    step()\x1b[0m\n\x1b[1mKeyError\x1b[0m: 'x'\n"
    )
    assert (found.exception, found.message, found.where) == ("KeyError", "'x'", "/work/train.py:7")


def test_message_is_one_short_line() -> None:
    found = read(f"{FRAMES}ValueError: {'x' * 9000}\nmore\n")
    assert len(found.message) == MAX_TEXT and "\n" not in found.message


def test_error_file_of_record_is_read_whole_and_cut() -> None:
    stack = f"{FRAMES}ValueError: {MESSAGE}\n"
    extra = {"py_callstack": stack, "timestamp": "1795419252"}
    document = json.dumps({"message": {"message": f"ValueError: {MESSAGE}", "extraInfo": extra, "errorCode": 1}})
    assert error_file(document) == stack
    cut = error_file(document[document.index("  File") :])
    assert cut is not None and read(cut).exception == "ValueError"
    assert error_file('{"schema": 2, "message": "m"}') is None


def test_error_file_of_record_gives_valid_unicode() -> None:
    text = error_file('"py_callstack": "ValueError: \\ud800", "timestamp": "1795419252"}}}')
    assert text == "ValueError: \\ud800"


async def _failing(*, nested: bool) -> None:
    async def fails(text: str) -> None:
        raise ValueError(text)

    async def in_a_group() -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(fails(MESSAGE))
            tasks.create_task(fails("the third"))

    async with asyncio.TaskGroup() as group:
        group.create_task(in_a_group() if nested else fails(MESSAGE))
        if not nested:
            group.create_task(fails("the second"))


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("prefix", ["", "[rank1]: "])
def test_exception_group_has_the_first_of_its_exceptions(prefix: str, nested: bool) -> None:
    """Seen: no exception, and the last line "+------------------------------------"."""
    try:
        asyncio.run(_failing(nested=nested))
    except BaseException:
        text = "".join(f"{prefix}{line}\n" for line in traceback.format_exc().splitlines())
    assert f"{prefix}  +-+---------------- 1 ----------------" in text
    found = read(f"epoch 1\n| Name | Type |\n{text}")
    assert (found.exception, found.message, found.cause) == ("ValueError", MESSAGE, "own")
    assert found.rank == (1 if prefix else None)
    assert (found.where or "").startswith(f"{__file__}:{fails_at()}"), found.where
    assert read(f"{text}KeyError: 3 was logged\nthe last line").exception == "ValueError"
    assert read("  | Name  | Type |\n  +----------------+").last_line == "+----------------+"


def fails_at() -> int:
    """Return the line of ``raise`` in ``_failing``."""
    return next(
        n
        for n, line in enumerate(Path(__file__).read_text().splitlines(), 1)
        if line.strip() == "raise ValueError(text)"
    )


@pytest.mark.parametrize(
    "log",
    [
        "Failures:\n" + "[1]:\n" * 12_000 + BLOCK.format(others="", code="-15"),
        f"{FRAMES}RuntimeError: gloo: Connection closed by peer\nDuring handling of the above exception\n" * 500,
        ("a." * 1990 + "!\n") * 16,
        "  + Exception Group Traceback (most recent call last):\n" * 600 + f"{' ' * 3000}+{'-' * 900} x\n" * 16,
    ],
    ids=["entries", "chain", "names", "group"],
)
def test_log_that_a_tenant_made_to_be_slow_takes_little_time(log: str) -> None:
    begin = time.process_time()
    log_failure(log)
    assert time.process_time() - begin < 1, "the first took 9 s"


@given(st.text(alphabet='[rank01]: Trceb(mosnlt)\nFile ".py",ixVuEoRCs-=WE', max_size=400), st.integers(0, 400))
def test_any_text_is_read(noise: str, at: int) -> None:
    log = f"[rank1]: {FRAMES}ValueError: {MESSAGE}\n" + BLOCK.format(others="", code="1")
    log_failure(noise)
    log_failure(log[:at] + noise + log[at:])
