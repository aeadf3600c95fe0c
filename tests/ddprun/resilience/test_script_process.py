"""A script runs in the process of its rank as it does in an interpreter of its own."""

from __future__ import annotations

import os
import signal
import zipapp
from pathlib import Path

import pytest

from tests.ddprun.resilience.scripts import run, written
from tests.ddptrain.runs import ForkServer, wait_until

pytestmark = pytest.mark.together


def test_interpreter_ends_as_usual(ddptrain: ForkServer, tmp_path: Path) -> None:
    script = written(
        tmp_path,
        "import atexit, sys, threading, time\n"
        "atexit.register(print, 'handler ran')\n"
        "threading.Thread(target=lambda: (time.sleep(0.3), print('thread ended'))).start()\n"
        "sys.exit(0)\n",
    )
    slow = "import ddprun.launcher.node_reports as reports; reports._VOLUME = 0.0"  # a child of the launcher stays
    done = ddptrain.run("--log-dir", tmp_path / "logs", script, module="ddprun", first=slow)
    assert "thread ended\nhandler ran\n" in done.output()
    assert "Exception" not in done.output()


@pytest.mark.parametrize("how", ["auto", "spawn"])
def test_script_that_closes_its_stdout_succeeds(ddptrain: ForkServer, tmp_path: Path, how: str) -> None:
    script = written(tmp_path, "import sys\nprint('last line')\nsys.stdout.close()\n")
    done = run(ddptrain, "--start", how, "--nproc-per-node", 2, script)
    assert "[n0r1] last line\n" in done.output()
    assert "Traceback" not in done.output()


def test_script_that_closes_all_descriptors_ends_as_it_does_alone(ddptrain: ForkServer, tmp_path: Path) -> None:
    text = (
        "import os, sys\n"
        "os.closerange(3, 1024)\n"
        f"files = [open('{tmp_path}/results', 'w') for _ in range(100)]\n"
        "print('closed')\nsys.exit(len(sys.argv) > 1 and 'failed')\n"
    )
    script = written(tmp_path, text)
    assert run(ddptrain, script).output() == "closed\n"
    assert run(ddptrain, script, "fail", code=1).message()["message"].endswith("no report; its last line: failed")
    assert (tmp_path / "results").read_text() == ""


def test_classes_of_the_script_can_be_pickled_until_its_end(ddptrain: ForkServer, tmp_path: Path) -> None:
    text = (
        "import atexit, pickle, threading, time\n"
        "class Saved: pass\n"
        "def save(name): print(name, type(pickle.loads(pickle.dumps(Saved()))).__name__)\n"
        "atexit.register(save, 'handler')\n"
        "threading.Thread(target=lambda: (threading.main_thread().join(0.3), save('thread'))).start()\n"
    )
    assert "thread Saved\nhandler Saved\n" in run(ddptrain, written(tmp_path, text)).output()
    spawned = run(ddptrain, "--start", "spawn", "-m", "train", first=f"import os; os.chdir({str(tmp_path)!r})")
    assert "thread Saved\nhandler Saved\n" in spawned.output()


@pytest.mark.parametrize("how", ["spawn", "forkserver"])
def test_objects_of_the_scripts_classes_come_back_from_processes_with_interpreters_of_their_own(
    ddptrain: ForkServer, tmp_path: Path, how: str
) -> None:
    text = (
        "import dataclasses, multiprocessing, sys\n"
        "@dataclasses.dataclass\nclass Batch:\n    x: int\n"
        "def work(end): end.send(Batch(3))\n"
        "if __name__ == '__main__':\n"
        "    context = multiprocessing.get_context(sys.argv[1])\n"
        "    read, write = context.Pipe(duplex=False)\n"
        "    process = context.Process(target=work, args=(write,))\n"
        "    process.start()\n    print(read.recv())\n    process.join()\n"
    )
    assert run(ddptrain, written(tmp_path, text), how).output() == "Batch(x=3)\n"


def test_script_with_a_syntax_error_is_reported_at_its_line(ddptrain: ForkServer, tmp_path: Path) -> None:
    failed = run(ddptrain, written(tmp_path, "x = 1\ndef f(:\n"), code=1)
    assert failed.message()["where"] == "train.py:2"
    assert "/ddprun/" not in failed.output()


def test_hook_for_uncaught_exceptions_is_called(ddptrain: ForkServer, tmp_path: Path) -> None:
    text = "import sys\nsys.excepthook = lambda kind, error, trace: print('crashed:', error, trace.tb_lineno)\n1 / 0\n"
    failed = run(ddptrain, written(tmp_path, text), code=1)
    assert "crashed: division by zero 3\n" in failed.output()
    assert failed.message()["kind"] == "ZeroDivisionError"


def test_error_is_shown_also_if_the_hook_for_it_fails(ddptrain: ForkServer, tmp_path: Path) -> None:
    text = "import sys\nsys.excepthook = lambda kind, error, trace: error.absent\n1 / 0\n"
    output = run(ddptrain, written(tmp_path, text), code=1).output()
    assert "AttributeError: 'ZeroDivisionError' object has no attribute 'absent'\n" in output
    assert "ZeroDivisionError: division by zero\nroot cause: " in output


def at_a_terminal(text: str = "") -> str:
    """Return what makes the launcher the foreground process of a terminal, on which a person has written ``text``."""
    return (
        "import fcntl, os, pty, termios\n"
        "person, terminal = pty.openpty()\n"
        "fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)\n"
        "os.dup2(terminal, 0)\n"
        f"os.write(person, {text.encode()!r})\n"
    )


@pytest.mark.parametrize("ranks", [1, 2])
def test_rank_that_reads_from_a_terminal_fails_and_is_not_stopped(
    ddptrain: ForkServer, tmp_path: Path, ranks: int
) -> None:
    script = written(tmp_path, "import sys\nassert not sys.stdin.isatty()\ninput('continue? ')\n")
    failed = run(ddptrain, "--nproc-per-node", ranks, script, first=at_a_terminal("yes\n"), code=1)
    assert (failed.message()["kind"], failed.message()["where"]) == ("EOFError", "train.py:3")


def test_interrupt_at_a_terminal_reaches_each_rank_once(ddptrain: ForkServer, tmp_path: Path) -> None:
    text = (
        "import signal, time\n"
        "signal.signal(signal.SIGINT, lambda *_: print('interrupted', flush=True))\n"
        "signal.signal(signal.SIGTERM, lambda *_: exit(0))\nprint('ready', flush=True)\ntime.sleep(600)\n"
    )
    go = tmp_path / "go"
    person = (  # a process of its own: the launcher has no thread
        "import time\n"
        "if os.fork() == 0:\n    os.setpgid(0, 0)\n"
        f"    while not os.path.exists({str(go)!r}): time.sleep(0.01)\n"
        "    os.write(person, b'\\x03')\n    time.sleep(600)\n"
    )
    argv = ("--nproc-per-node", 2, written(tmp_path, text))
    started = ddptrain.start(*argv, module="ddprun", first=at_a_terminal() + person)
    wait_until(lambda: started.output().count("ready") == 2, "both ranks")
    go.touch()
    wait_until(lambda: started.output().count("interrupted") == 2, "the interrupt")
    started.stop()
    assert started.wait() == 75, started.output()
    assert started.output().count("interrupted") == 2


FORKS = """
import atexit, os, sys
atexit.register(lambda: print("handler of", "rank" if os.getpid() == rank else "child", flush=True))
rank = os.getpid()
if os.environ["RANK"] == "1":
    child = os.fork()
    if child == 0:
        exec(sys.argv[1])
    else:
        print("child ended with", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        exec(sys.argv[2])
"""


@pytest.mark.parametrize(
    ("child", "code"), [("pass", 0), ("sys.exit(3)", 3), ("sys.exit('text')", 1), ("raise ValueError('unwanted')", 1)]
)
def test_process_that_the_script_forks_ends_as_under_python_and_says_nothing_of_the_rank(
    ddptrain: ForkServer, tmp_path: Path, child: str, code: int
) -> None:
    argv = ("--nproc-per-node", 2, written(tmp_path, FORKS), child)
    done = run(ddptrain, *argv, "pass")
    assert f"[n0r1] child ended with {code}\n" in done.output()
    assert done.output().count("handler of child") == 1 and done.output().count("handler of rank") == 2
    assert done.output().count("ValueError: unwanted\n") == ("ValueError" in child)
    assert done.message()["outcome"] == "succeeded"
    failed = run(ddptrain, *argv, "raise KeyError('the real failure')", code=1).message()
    assert (failed["rank"], failed["kind"], failed["where"]) == (1, "KeyError", "train.py:11")


@pytest.mark.parametrize(
    ("writes", "output"),
    [
        ("for _ in range(5): sys.stdout.write('.')\nos._exit(3)", "[n0r1] .....\n"),
        ("sys.stdout.buffer.write(b'raw')\nos.kill(os.getpid(), 9)", "[n0r1] raw\n"),
        (
            "print('flushed', end=' ', flush=True)\nprint('begun', end='')\nos.kill(os.getpid(), 9)",
            "[n0r1] flushed begun\n",
        ),
        ("sys.stdout = None\nsys.stdout = sys.__stdout__\nprint('restored')\nos._exit(3)", "[n0r1] restored\n"),
    ],
    ids=["text", "bytes", "after a flush", "original stream"],
)
@pytest.mark.parametrize("how", ["auto", "spawn"])
def test_begun_line_of_a_rank_that_dies_is_printed(
    ddptrain: ForkServer, tmp_path: Path, how: str, writes: str, output: str
) -> None:
    text = f"import os, sys\nif os.environ['RANK'] == '0': sys.exit()\n{writes}\n"
    started = ddptrain.start("--start", how, "--nproc-per-node", 2, written(tmp_path, text), module="ddprun")
    assert started.wait() != 0
    assert output in started.output()


def test_only_a_single_rank_reads_what_is_redirected(ddptrain: ForkServer, tmp_path: Path) -> None:
    redirected = "import os\nread, write = os.pipe()\nos.write(write, b'lr: 3')\nos.close(write)\nos.dup2(read, 0)\n"
    script = written(tmp_path, "import sys\nprint('read', sys.stdin.read())\n")
    assert run(ddptrain, script, first=redirected).output() == "read lr: 3\n"
    assert run(ddptrain, "--nproc-per-node", 2, script, first=redirected).output().count("read \n") == 2


def test_interrupt_while_threads_are_awaited_ends_the_script_as_python_does(
    ddptrain: ForkServer, tmp_path: Path
) -> None:
    text = (
        "import atexit, sys, threading, time, traceback\n"
        "atexit.register(print, 'handler ran')\n"
        "def functions():\n"
        "    frame = sys._current_frames()[threading.main_thread().ident]\n"
        "    return [each.f_code.co_name for each, _ in traceback.walk_stack(frame)]\n"
        "def work():\n"
        "    while '_shutdown' not in functions(): time.sleep(0.01)\n"
        "    print('ready')\n    time.sleep(600)\n"
        "threading.Thread(target=work).start()\n"
    )
    started = ddptrain.start(written(tmp_path, text), module="ddprun")
    wait_until(lambda: "ready" in started.output(), "the end of the script")
    os.kill(started.pid, signal.SIGINT)
    assert started.wait() == 75, started.output()
    assert "handler ran" in started.output()


def test_script_in_a_folder_with_spaces_imports_its_neighbours_after_chdir(
    ddptrain: ForkServer, tmp_path: Path
) -> None:
    folder = tmp_path / "my scripts"
    folder.mkdir()
    (folder / "neighbour.py").write_text("def fail():\n    raise ValueError('in the neighbour')\n")
    (folder / "train it.py").write_text("import os\nos.chdir('/')\nimport neighbour\nneighbour.fail()\n")
    first = f"import os; os.chdir({str(tmp_path)!r})"
    for how in ("auto", "spawn"):
        failed = run(ddptrain, "--start", how, "my scripts/train it.py", first=first, code=1)
        assert (failed.message()["message"], failed.message()["where"]) == ("in the neighbour", "neighbour.py:2")
        assert f'File "{folder}/train it.py", line 4, in <module>\n    neighbour.fail()\n' in failed.output()


def test_archive_runs_and_its_failure_has_a_place(ddptrain: ForkServer, tmp_path: Path) -> None:
    folder = tmp_path / "app"
    folder.mkdir()
    (folder / "inner.py").write_text("def fail():\n    raise ValueError(f'of {__name__}')\n")
    (folder / "__main__.py").write_text("import sys, inner\nprint(sys.argv[1:])\ninner.fail()\n")
    zipapp.create_archive(folder, tmp_path / "app.pyz")
    failed = run(ddptrain, "--nproc-per-node", 2, tmp_path / "app.pyz", "--lr", 3, code=1)
    assert "[n0r1] ['--lr', '3']\n" in failed.output()
    assert (failed.message()["message"], failed.message()["where"]) == ("of inner", "inner.py:2")


def test_destroyed_process_groups_are_kept_up_to_a_limit(ddptrain: ForkServer, tmp_path: Path) -> None:
    """A reducer with the last reference to its group waits for gloo's threads with the GIL, and some need the GIL."""
    text = (
        "import threading, time\n"
        "from pathlib import Path\n"
        "import torch.distributed as dist\n"
        "def groups(): return sum('gloo_tcp' in file.read_text() for file in Path('/proc/self/task').glob('*/comm'))\n"
        "dist.init_process_group('gloo')\n"
        "for _ in range(40): dist.destroy_process_group(dist.new_group())\n"
        "dist.barrier()\n"
        "dist.destroy_process_group()\n"
        "print('groups', groups(), flush=True)\n"
    )
    script = written(tmp_path, text)  # with this grant torch._dynamo is imported before the fork
    done = run(ddptrain, "--nproc-per-node", 2, script, DDPJOB_INPLACE_RESTARTS=1)
    left = [int(line.rpartition(" ")[2]) for line in done.output().splitlines() if "groups" in line]
    assert len(left) == 2
    assert all(3 <= count <= 20 for count in left)


@pytest.mark.parametrize("kind", ["env", "file"])
def test_default_group_can_be_destroyed_and_made_again(ddptrain: ForkServer, tmp_path: Path, kind: str) -> None:
    """The store of a kept group has its keys still: the next group found the addresses of the one before."""
    place = "" if kind == "env" else f", init_method='file://{tmp_path}/met', rank=int(environ['RANK']), world_size=2"
    text = (
        "from datetime import timedelta\n"
        "from os import environ\n"
        "import torch\n"
        "import torch.distributed as dist\n"
        "for _ in range(5):\n"
        f"    dist.init_process_group('gloo', timeout=timedelta(seconds=60){place})\n"
        "    number = torch.ones(1)\n"
        "    dist.all_reduce(number)\n"
        "    assert number == 2\n"
        "    dist.destroy_process_group()\n"
        "print('made all', flush=True)\n"
    )
    done = run(ddptrain, "--nproc-per-node", 2, written(tmp_path, text))
    assert done.output().count("made all") == 2
    assert not (tmp_path / "met").exists()  # else the next run would meet in it
