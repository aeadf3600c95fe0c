"""Ranks whose script has returned, and whose processes do not end as they should: nothing is trained again."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddprun import exit_codes
from tests.ddprun.resilience.scripts import run, written
from tests.ddprun.resilience.test_in_place import TwoNodes
from tests.ddptrain.runs import ForkServer, wait_until

pytestmark = pytest.mark.together

# A thread that is no daemon keeps the process of rank 1.
LINGERS = (
    "import ddprun, os, threading\n"
    "ddprun.report(step=1)\n"
    "def upload(): threading.Event().wait()\n"
    "if os.environ['RANK'] == '1': threading.Thread(target=upload).start()\n"
    "print('returned', flush=True)\n"
)


NAMED = "warning: rank 1 (node 0) has ended its script, and its process has not ended after"
SOON = "import ddprun.launcher.hang_detector as detector; detector.LINGERING = 2.0"


def test_stop_in_an_exit_handler_is_a_success(ddptrain: ForkServer, tmp_path: Path) -> None:
    handler = "import atexit, time\natexit.register(lambda: (print('returned', flush=True), time.sleep(1000)))\n"
    started = ddptrain.start("--nproc-per-node", 2, written(tmp_path, handler), module="ddprun")
    wait_until(lambda: started.output().count("returned") == 2, "both ranks to call their exit handlers")
    started.stop()
    assert started.wait() == 0
    message = started.message()
    assert message["outcome"] == "succeeded"
    assert "beforeStop" not in message, "the script may have noticed the deletion of its pod"


@pytest.mark.parametrize("trains_in", ["threading.Thread", "multiprocessing.get_context('fork').Process"])
def test_stop_is_no_success_while_a_thread_or_process_of_the_script_works(
    ddptrain: ForkServer, tmp_path: Path, trains_in: str
) -> None:
    """Python waits for both at its end; they may be the training, before its first step."""
    text = (
        "import multiprocessing, threading, time\n"
        "def work():\n"
        "    print('works', flush=True)\n"
        "    while True: sum(range(10000))\n"
        f"{trains_in}(target=work).start()\n"
    )
    started = ddptrain.start("--nproc-per-node", 2, written(tmp_path, text), module="ddprun", first=SOON)
    wait_until(lambda: started.output().count("works") == 2, "both ranks to work")
    started.stop()
    assert started.wait() == 75, started.output()


def test_rank_that_ends_because_of_a_stop_has_not_returned(ddptrain: ForkServer, tmp_path: Path) -> None:
    """The signal came to this rank alone, or to another node; its exit handlers may save a checkpoint."""
    text = (
        "import atexit, ddprun, os, signal, time\n"
        "ddprun.should_stop()\n"
        "atexit.register(lambda: (print('saves', flush=True), [time.sleep(0.1) for _ in iter(int, 1)]))\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
        "while not ddprun.should_stop(): pass\n"
    )
    started = ddptrain.start("--stop-grace", 1, written(tmp_path, text), module="ddprun")
    wait_until(lambda: "saves" in started.output(), "the exit handler")
    started.stop()
    assert started.wait() == exit_codes.STOPPED
    assert started.message()["phase"] == "stop"


def test_rank_that_lingers_after_its_script_is_named_with_its_thread(ddptrain: ForkServer, tmp_path: Path) -> None:
    flags = ("--nproc-per-node", 2, "--stop-grace", 0.2)
    started = ddptrain.start(*flags, written(tmp_path, LINGERS), module="ddprun", first=SOON)
    wait_until(lambda: NAMED in started.output(), "the launcher to name rank 1")
    now = started.progress()
    assert now is not None and now["phase"] == "close"
    assert {name: now["stall"][name] for name in ("rank", "phase", "where")} == {
        "rank": 1, "phase": "close", "where": "train.py:3"
    }  # fmt: skip
    started.stop()
    assert started.wait() == 0
    assert started.message()["beforeStop"] is True


def test_node_whose_ranks_linger_succeeds_before_the_operator_takes_it_for_hung(
    ddptrain: ForkServer, tmp_path: Path
) -> None:
    nodes = TwoNodes(ddptrain, tmp_path, script=LINGERS, env={"DDPJOB_COMPLETION_GRACE": 4})
    assert [node.wait() for node in nodes.runs] == [0, 0], nodes.output()
    assert "warning: rank 1 ended the script" in nodes.runs[1].output()
    assert [node.message()["outcome"] for node in nodes.runs] == ["succeeded", "succeeded"]


@pytest.mark.parametrize(("end", "code"), [("os.kill(os.getpid(), 11)", 0), ("os._exit(3)", 3)])
def test_crash_in_an_exit_handler_is_no_failure_but_an_exit_code_is(
    ddptrain: ForkServer, tmp_path: Path, end: str, code: int
) -> None:
    script = written(tmp_path, f"import atexit, os\natexit.register(lambda: {end})\n")
    assert run(ddptrain, "--nproc-per-node", 2, script, code=code).message()["code"] == code
