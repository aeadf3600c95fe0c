"""What the report says of each way in which a script fails: the exception itself, and the line of the script."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.ddprun.resilience.scripts import run, written
from tests.ddptrain.runs import ForkServer

pytestmark = pytest.mark.together

FAIL = """
def fail():
    raise ValueError("sample 17 has 3 channels")
"""  # line 3


def report(server: ForkServer, folder: Path, text: str, code: int = 1) -> dict[str, Any]:
    """Run a script that fails, and return its report."""
    return run(server, written(folder, text), code=code).message()


COUNTED = """
import torch
optimizer = torch.optim.SGD(torch.nn.Linear(2, 2).parameters())
for step in range(4):
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param(COUNTED, (4, True), id="counted"),
        pytest.param("import ddprun\nfor n in range(1, 5):\n    ddprun.report(step=n)\n", (4, True), id="each"),
        pytest.param(
            "import ddprun\nfor n in range(90, 94):\n    ddprun.report(step=n)\n    ddprun.report(step=n, loss=1.0)\n",
            (93, True),
            id="each-twice",
        ),
        pytest.param(
            "import ddprun\nfor n in range(1, 350):\n    if n % 100 == 0:\n        ddprun.report(step=n)\n",
            (300, None),
            id="each-hundredth",
        ),
        pytest.param("import ddprun\nddprun.report(step=100, total_steps=1000)\n", (100, None), id="first"),
    ],
)
def test_report_says_whether_its_step_is_the_last_that_was_completed(
    ddptrain: ForkServer, tmp_path: Path, text: str, expected: tuple[int, bool | None]
) -> None:
    message = report(ddptrain, tmp_path, f"{FAIL}{text}fail()\n")
    assert (message["step"], message.get("exact")) == expected


QUOTED = r"own line\n\nTraceback (most recent call last):\n  File \"x.py\", line 3, in f\nOther: not the cause"
OWN = 'own line\n\nTraceback (most recent call last):\n  File "x.py", line 3, in f\nOther: not the cause'
HANDLED = f"{FAIL}import sys, traceback\ntry:\n    fail()\nexcept Exception as error:\n"
SAID = "sample 17 has 3 channels"
EXITS = {
    "number": (f"{HANDLED}    traceback.print_exc()\n    sys.exit(1)\n", 1,
               ("ValueError", f"{SAID}; rank 0 called sys.exit(1)", "train.py:3")),
    "text": (f"{HANDLED}    sys.exit(f'failed: {{error}}')\n", 1,
             ("ValueError", f"{SAID}; rank 0 called sys.exit('failed: {SAID}')", "train.py:3")),
    "exit-of-exit": (f"{HANDLED}    try:\n        sys.exit(4)\n    except SystemExit as leaving:\n"
                     "        sys.exit(leaving.code)\n", 4,
                     ("ValueError", f"{SAID}; rank 0 called sys.exit(4)", "train.py:3")),
    "later": (f"{HANDLED}    pass\nsys.exit(3)\n", 3, ("SystemExit", "rank 0 called sys.exit(3)", "train.py:9")),
    "from-none": (f"{HANDLED}    raise SystemExit('no such model') from None\n", 1,
                  ("SystemExit", "rank 0 called sys.exit('no such model')", "train.py:8")),
    "library": ("import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--lr', type=float)\n"
                "parser.parse_args(['--lr', 'x'])\n", 2,
                ("ArgumentError", "argument --lr: invalid float value: 'x'; rank 0 called sys.exit(2)", "train.py:4")),
}  # fmt: skip
LINES = {
    "raise MemoryError": ("MemoryError", "no message, raised by `raise MemoryError`"),
    "next(iter([]))": ("StopIteration", "no message, raised by `next(iter([]))`"),
    "assert 3 == 4": ("AssertionError", "no message, raised by `assert 3 == 4`"),
    "exec('raise MemoryError')": ("MemoryError", "no message, raised by `exec('raise MemoryError')`"),
    "{}['x']": ("KeyError", "'x'"),
    f'raise ValueError("{QUOTED}")': ("ValueError", OWN),
    "import ast; ast.literal_eval('a b')": ("SyntaxError", "invalid syntax (<unknown>, line 1)"),
    "for each in []": ("SyntaxError", "expected ':'"),
    "error = ValueError('bad'); error.__notes__ = ['sample 17']; raise error": ("ValueError", "bad\nsample 17"),
}
IN_WORKER = """
import concurrent.futures, multiprocessing, torch
class Samples:
    def __len__(self):
        return 8
    def __getitem__(self, index):
        %s
def work(index):
    Samples()[index]
if __name__ == "__main__":
    %s
"""
LOADER = "next(iter(torch.utils.data.DataLoader(Samples(), num_workers=1)))"
POOL = "with multiprocessing.Pool(1) as pool: pool.map(work, [0])"
EXECUTOR = "with concurrent.futures.ProcessPoolExecutor(1) as pool: pool.submit(work, 0).result()"
SPAWN = "torch.multiprocessing.spawn(work, nprocs=1)"
WORKERS = [
    (LOADER, "raise ValueError('sample 17')", "ValueError", "sample 17"),
    (LOADER, "{}['x']", "KeyError", "'x'"),
    (LOADER, "raise MemoryError", "MemoryError", "no message, raised by `raise MemoryError`"),
    (LOADER, f'raise ValueError("{QUOTED}")', "ValueError", OWN),
    (LOADER, "b'\\xff'.decode()", "RuntimeError",
     "UnicodeDecodeError: 'utf-8' codec can't decode byte 0xff in position 0: invalid start byte"),
    (POOL, "raise ValueError('sample 17')", "ValueError", "sample 17"),
    (EXECUTOR, "raise ValueError('sample 17')", "ValueError", "sample 17"),
    (SPAWN, "raise ValueError('sample 17')", "ProcessRaisedException", "ValueError: sample 17"),
]  # fmt: skip
SECOND = "try: {}['x']\n        except KeyError: raise ValueError('sample 17')"
GROUP = (
    "import asyncio\nasync def load(number):\n    raise ValueError(f'sample {number}')\n"
    "async def main():\n    async with asyncio.TaskGroup() as group:\n"
    "        for number in (17, 18, 19): group.create_task(load(number))\nasyncio.run(main())\n"
)
NESTED = "raise BaseExceptionGroup('outer', [ExceptionGroup('inner', [KeyError('x')]), SystemExit(3)])\n"
FROM = {
    "RuntimeError('step failed') from error": f"step failed; caused by ValueError: {SAID} (train.py:3)",
    "RuntimeError(f'step failed: {error}') from error": f"step failed: {SAID}",
    "RuntimeError('step failed')": "step failed",
}
RAISING = f"{FAIL}try:\n    fail()\nexcept ValueError as error:\n    raise "
FAILURES = [
    *(pytest.param(*row, id=name) for name, row in EXITS.items()),
    *((f"\n{line}\n", 1, (*found, "train.py:2")) for line, found in LINES.items()),
    *((IN_WORKER % (line, start), 1, (kind, said, "train.py:7")) for start, line, kind, said in WORKERS),
    (IN_WORKER % (SECOND, LOADER), 1, ("ValueError", "sample 17", "train.py:8")),
    *((f"{RAISING}{raised}\n", 1, ("RuntimeError", said, "train.py:7")) for raised, said in FROM.items()),
    (GROUP, 1, ("ValueError", "sample 17; and 2 more in the ExceptionGroup 'unhandled errors in a TaskGroup'",
                "train.py:3")),
    (NESTED, 1, ("KeyError", "'x'; and 1 more in the BaseExceptionGroup 'outer'", "train.py:1")),
]  # fmt: skip


@pytest.mark.parametrize(("text", "code", "expected"), FAILURES)
def test_failure_is_reported_with_its_exception_message_and_line(
    ddptrain: ForkServer, tmp_path: Path, text: str, code: int, expected: tuple[str, str, str]
) -> None:
    if "ExceptionGroup" in text + expected[1] and sys.version_info < (3, 11):
        pytest.skip("exception groups")
    message = report(ddptrain, tmp_path, text, code)
    assert (message["exception"], message["message"], message["where"]) == expected
    assert (message["code"], message["cause"]) == (code, "own")


def test_error_of_torch_in_a_worker_is_reported_at_the_line_that_took_the_batch(
    ddptrain: ForkServer, tmp_path: Path
) -> None:
    text = (
        "import torch\nfrom torch.utils.data import DataLoader\n"
        "next(iter(DataLoader([torch.ones(2), torch.ones(3)], batch_size=2, num_workers=1)))\n"
    )
    message = report(ddptrain, tmp_path, text)
    assert message["message"].startswith("stack expects each tensor to be equal size")
    assert message["where"] == "train.py:3"


@pytest.mark.parametrize("line", ["sys.exit(3)", "raise ValueError('step failed') from error", "{}['clean up']"])
def test_rank_whose_handler_of_a_lost_peer_fails_is_not_the_cause(
    ddptrain: ForkServer, tmp_path: Path, line: str
) -> None:
    text = (
        "import os, sys\nimport torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "if dist.get_rank() == 1:\n    os._exit(0)\n"
        f"try:\n    dist.barrier()\nexcept RuntimeError as error:\n    print('lost:', error)\n    {line}\n"
    )
    failed = run(ddptrain, "--nproc-per-node", 2, written(tmp_path, text), code=1)
    assert (failed.message()["rank"], failed.message()["kind"]) == (1, "ExitedEarly"), failed.output()


CRASH = "import ctypes\nctypes.string_at(0)\n"


@pytest.mark.parametrize(
    ("text", "where"),
    [
        (CRASH, "train.py:2"),
        (f"import faulthandler\nfaulthandler.enable()\n{CRASH}", "train.py:4"),
        ("import ctypes, threading\ndef work():\n    ctypes.string_at(0)\n"
         "thread = threading.Thread(target=work)\nthread.start()\nthread.join()\n", "train.py:3"),
        ("import ctypes\ndef down(depth):\n    if depth == 0:\n        ctypes.string_at(0)\n"
         "    down(depth - 1)\ndown(80)\n", "train.py:4"),
        (f"import os\nif os.fork() == 0:\n    os.abort()\nos.wait()\n{CRASH}", "train.py:6"),
    ],
    ids=["alone", "own-faulthandler", "thread", "deep", "after-a-child"],
)  # fmt: skip
def test_segmentation_fault_is_reported_at_its_line(
    ddptrain: ForkServer, tmp_path: Path, text: str, where: str
) -> None:
    failed = run(ddptrain, "--nproc-per-node", 2, written(tmp_path, text), code=139)
    message = failed.message()
    assert (message["kind"], message["signal"], message["where"]) == ("Killed", 11, where), failed.output()
    assert message["next"] == f"the stack of rank {message['rank']} is in the output above"
    assert "Fatal Python error: Segmentation fault\n" in failed.output()


def test_abort_is_reported_with_its_line_and_what_the_library_printed(ddptrain: ForkServer, tmp_path: Path) -> None:
    text = "import os\nos.write(2, b'free(): invalid pointer\\n')\nos.abort()\n"
    message = report(ddptrain, tmp_path, text, 134)
    assert message["message"] == "rank 0 was killed by SIGABRT; its last line: free(): invalid pointer"
    assert (message["signal"], message["where"]) == (6, "train.py:3")


def test_killed_rank_has_no_place_of_an_earlier_crash(ddptrain: ForkServer, tmp_path: Path) -> None:
    text = "import os\nif os.fork() == 0:\n    os.abort()\nos.wait()\nos.kill(os.getpid(), 9)\n"
    assert report(ddptrain, tmp_path, text, 137)["where"] is None


def test_executable_that_crashes_has_no_place_and_the_advice_for_the_next_run(ddptrain: ForkServer) -> None:
    message = run(ddptrain, "--no-python", "sh", "-c", "kill -SEGV $$", code=139).message()
    assert (message["where"], message["next"]) == (None, "set PYTHONFAULTHANDLER=1 to print the stack of the next one")


KILLED_WORKER = """
import os, signal, torch
from torch.utils.data import DataLoader, dataloader
class Samples:
    def __len__(self):
        return 8
    def __getitem__(self, index):
        if index == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.ones(3)
batches = iter(DataLoader(Samples(), batch_size=2, num_workers=1))
%s
list(batches)
"""
OWN_HANDLER = "signal.signal(signal.SIGCHLD, lambda *_: None)"
# The connection to a worker breaks before the worker has ended, which torch sees only on a busy machine.
BROKEN = """
def broken(self, *_):
    raise ConnectionResetError(104, "Connection reset by peer")
os.kill(batches._workers[0].pid, signal.SIGKILL)
type(batches)._try_get_data = broken
"""


@pytest.mark.parametrize("text", ["", OWN_HANDLER, BROKEN, OWN_HANDLER + BROKEN])
def test_killed_worker_of_a_data_loader_is_named_with_its_signal(
    ddptrain: ForkServer, tmp_path: Path, text: str
) -> None:
    message = report(ddptrain, tmp_path, KILLED_WORKER % text)
    assert re.search(r"worker .*\(pid \d+\) (was killed by SIGKILL|is killed by signal: Killed)", message["message"])
    assert message["where"].startswith("train.py:")
    assert "out-of-memory killer" in message["hint"]


def test_error_of_the_program_beside_workers_that_live_stays_as_it_is(ddptrain: ForkServer, tmp_path: Path) -> None:
    text = KILLED_WORKER.replace("if index == 4", "if False") % "next(batches)\nraise ValueError('sample 17')"
    message = report(ddptrain, tmp_path, text)
    assert (message["message"], message["where"]) == ("sample 17", "train.py:13")


@pytest.mark.parametrize(
    ("content", "mode", "said", "hint", "advice"),
    [
        (b"echo hello\n", 0o755, "Exec format error", "its first line names no interpreter", "begin it with #!/bin/sh"),
        (b"\x7fELF\x02\x01\x01".ljust(18, b"\0") + b"\xff\xff".ljust(46, b"\0"), 0o755, "Exec format error",
         "it is built for another processor", "use a build for"),
        (b"#!/opt/absent/python3\r\nprint()\n", 0o755, "No such file or directory",
         r"its first line names an interpreter that does not exist: '/opt/absent/python3\r'", "correct the first line"),
        (b"#!/bin/sh\n", 0o644, "Permission denied", "it is not executable", "chmod +x"),
        (None, 0, "No such file or directory", None, "name a file or a program on PATH"),
    ],
    ids=["no-interpreter", "processor", "interpreter-absent", "mode", "absent"],
)  # fmt: skip
def test_executable_that_cannot_start_is_explained(
    ddptrain: ForkServer, tmp_path: Path, *, content: bytes | None, mode: int, said: str, hint: str | None, advice: str
) -> None:
    program = tmp_path / "train"
    if content is not None:
        program.write_bytes(content)
        program.chmod(mode)
    failed = run(ddptrain, "--nproc-per-node", 2, "--no-python", program, code=2)
    message = failed.message()
    assert (message["kind"], message["message"]) == ("UsageError", f"cannot start {program}: {said}")
    assert str(message["hint"]).startswith(str(hint)) and message["next"].startswith(advice), message
    assert message["where"] is None
    assert "Traceback" not in failed.output()
