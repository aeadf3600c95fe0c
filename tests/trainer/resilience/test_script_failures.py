"""What the report says of each way in which a script fails: the exception itself, and the line of the script."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.trainer.resilience.scripts import run, written
from tests.trainer.runs import ForkServer

pytestmark = pytest.mark.together

FAIL = """
def fail():
    raise ValueError("sample 17 has 3 channels")
"""  # line 3


def report(server: ForkServer, folder: Path, text: str, code: int = 1) -> dict[str, Any]:
    """Run a script that fails, and return its report."""
    return run(server, written(folder, text), code=code).message()


def summary(message: dict[str, Any]) -> tuple[str, str, str]:
    return message["exception"], message["message"], message["where"]


@pytest.mark.parametrize(
    ("text", "code", "expected"),
    [
        pytest.param(
            "    traceback.print_exc()\n    sys.exit(1)",
            1,
            ("ValueError", "sample 17 has 3 channels; rank 0 called sys.exit(1)", "train.py:3"),
            id="number",
        ),
        pytest.param(
            "    sys.exit(f'failed: {error}')",
            1,
            (
                "ValueError",
                "sample 17 has 3 channels; rank 0 called sys.exit('failed: sample 17 has 3 channels')",
                "train.py:3",
            ),
            id="text",
        ),
        pytest.param(
            "    try:\n        sys.exit(4)\n    except SystemExit as leaving:\n        sys.exit(leaving.code)",
            4,
            ("ValueError", "sample 17 has 3 channels; rank 0 called sys.exit(4)", "train.py:3"),
            id="exit-of-exit",
        ),
        pytest.param("    pass\nsys.exit(3)", 3, ("SystemExit", "rank 0 called sys.exit(3)", "train.py:9"), id="later"),
        pytest.param(
            "    raise SystemExit('no such model') from None",
            1,
            ("SystemExit", "rank 0 called sys.exit('no such model')", "train.py:8"),
            id="from-none",
        ),
    ],
)
def test_exception_whose_handler_calls_sys_exit_is_reported(
    ddptrain: ForkServer, tmp_path: Path, text: str, code: int, expected: tuple[str, str, str]
) -> None:
    body = f"import sys, traceback\ntry:\n    fail()\nexcept Exception as error:\n{text}\n"
    message = report(ddptrain, tmp_path, FAIL + body, code)
    assert summary(message) == expected
    assert (message["code"], message["cause"]) == (code, "own")


def test_exception_that_a_library_turns_into_sys_exit_is_reported_at_the_line_of_the_script(
    ddptrain: ForkServer, tmp_path: Path
) -> None:
    text = (
        "import argparse\n"
        "parser = argparse.ArgumentParser()\nparser.add_argument('--lr', type=float)\n"
        "parser.parse_args(['--lr', 'x'])\n"
    )
    said = "argument --lr: invalid float value: 'x'; rank 0 called sys.exit(2)"
    assert summary(report(ddptrain, tmp_path, text, 2)) == ("ArgumentError", said, "train.py:4")


def test_rank_whose_handler_of_a_lost_peer_calls_sys_exit_is_not_the_cause(
    ddptrain: ForkServer, tmp_path: Path
) -> None:
    text = (
        "import os, sys\nimport torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "if dist.get_rank() == 1:\n    os._exit(0)\n"
        "try:\n    dist.barrier()\nexcept RuntimeError as error:\n    print('lost:', error)\n    sys.exit(3)\n"
    )
    failed = run(ddptrain, "--nproc-per-node", 2, written(tmp_path, text), code=1)
    assert (failed.message()["rank"], failed.message()["kind"]) == (1, "ExitedEarly"), failed.output()
