"""How ``ddprun`` starts the ranks of a script: flags, variables, and what is imported before a fork."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ddprun.cli import before_fork, node_of, parse, resolve, run_id
from ddprun.errors import UsageError
from ddprun.script import _SET_BEFORE_IMPORT, Script
from ddprun.settings import Settings
from tests.ddprun.resilience.scripts import run, two_nodes, written
from tests.ddptrain.runs import ForkServer

pytestmark = pytest.mark.together


def test_two_nodes_meet_by_torchruns_variables(ddptrain: ForkServer, tmp_path: Path) -> None:
    script = written(tmp_path)
    for node, started in enumerate(two_nodes(ddptrain, script)):
        assert started.wait() == 0, started.output()
        assert f"[n{node}r{node}] rank {node} of 2 " in started.output()


def test_ranks_of_a_module_and_of_an_executable(ddptrain: ForkServer, tmp_path: Path) -> None:
    package = tmp_path / "mine"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "main.py").write_text("import sys; print('module', __name__, sys.argv[1:])")
    done = run(ddptrain, "--nproc-per-node", 2, "-m", "mine.main", "-x", PYTHONPATH=tmp_path, code=1)
    assert "No module named 'mine'" in done.output()  # PYTHONPATH is read at the start of an interpreter, not of a fork
    spawned = run(ddptrain, "--start", "spawn", "--nproc-per-node", 2, "-m", "mine.main", "-x", PYTHONPATH=tmp_path)
    assert "[n0r1] module __main__ ['-x']" in spawned.output()
    shell = ("--nproc-per-node", 2, "--no-python", "sh", "-c")
    assert "[n0r1] 1 of 2" in run(ddptrain, *shell, "echo $RANK of $WORLD_SIZE").output()
    failed = run(ddptrain, *shell, "sleep $RANK; test $RANK = 0 && exit 4", code=4).message()
    assert (failed["rank"], failed["code"]) == (0, 4)


IMPORTS = """
import os, sys
class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print("imported by", "launcher" if os.getpid() == launcher else "rank", flush=True)
launcher = os.getpid()
sys.meta_path.insert(0, Watch())
forgotten = [sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "torch"]
"""


def test_a_single_rank_imports_torch_itself(ddptrain: ForkServer, tmp_path: Path) -> None:
    (tmp_path / "torch.py").touch()
    done = run(ddptrain, written(tmp_path, "import torch\n"), first=IMPORTS)
    assert done.output() == "imported by rank\n"


# In the launcher, the import of torch also does this.
IMPORTING = """
import importlib, os, socket, threading, time
real = importlib.import_module
def imported(name):
    module = real(name)
    %s
    return module
importlib.import_module = imported
"""
JEMALLOC = "ctypes.CDLL(None).prctl(15, b'jemalloc_bg_thd'), named.set(), time.sleep(600)"


@pytest.mark.parametrize(
    ("work", "said"),
    [
        (
            "module.set_num_threads(2); module.ones(2**18).add_(1.0)",
            "after the import of torch a forked process hangs in its first operation on several threads",
        ),
        (
            "threading.Thread(target=time.sleep, args=(600,), daemon=True).start()",
            "the import of torch has started 1 thread(s), which a fork would not have",
        ),
        ("global opened; opened = socket.socket()", "the import of torch has opened socket, which a fork would share"),
    ],
)
def test_ranks_are_not_forked_after_an_import_that_forks_do_not_survive(
    ddptrain: ForkServer, tmp_path: Path, work: str, said: str
) -> None:
    done = run(ddptrain, "--nproc-per-node", 2, written(tmp_path, "print('ran')\n"), first=IMPORTING % work)
    assert done.output().splitlines()[0] == f"each rank starts in an interpreter of its own: {said}"
    assert done.output().count("] ran\n") == 2


def test_ranks_are_forked_beside_a_thread_whose_library_prepares_for_forks(
    ddptrain: ForkServer, tmp_path: Path
) -> None:
    work = (
        "import ctypes; named = threading.Event(); "
        f"threading.Thread(target=lambda: ({JEMALLOC}), daemon=True).start(); named.wait()"
    )
    done = run(ddptrain, "--nproc-per-node", 2, written(tmp_path, "print('ran')"), first=IMPORTING % work)
    assert sorted(done.output().splitlines()) == ["[n0r0] ran", "[n0r1] ran"]


def test_file_that_an_import_before_the_fork_has_opened_is_open_in_the_ranks(
    ddptrain: ForkServer, tmp_path: Path
) -> None:
    script = written(tmp_path, "import os\nprint(os.pread(int(os.environ['OPENED']), 9, 0))\n")
    work = f"os.environ['OPENED'] = str(os.open({str(script)!r}, os.O_RDONLY))"
    done = run(ddptrain, "--nproc-per-node", 2, script, first=IMPORTING % work)
    assert sorted(done.output().splitlines()) == ["[n0r0] b'import os'", "[n0r1] b'import os'"]


def test_ways_to_start_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (before_fork(1), before_fork(2)) == ((), ("torch",))
    monkeypatch.setenv("DDPJOB_INPLACE_RESTARTS", "3")
    assert before_fork(1) == before_fork(2) == ("torch", "torch._dynamo")
    assert [parse(["train.py"], {"DDPRUN_START": start}).start for start in ("", "spawn")] == ["auto", "spawn"]
    assert resolve(parse(["train.py"], {}), {"DDPRUN_START": "spawn"}) == resolve(parse(["train.py"], {}), {})
    with pytest.raises(UsageError, match="DDPRUN_START=span is not one of auto, spawn"):
        parse(["train.py"], {"DDPRUN_START": "span"})


def test_each_run_of_a_node_has_an_id_of_its_own_which_its_ranks_and_lives_share(
    ddptrain: ForkServer, tmp_path: Path
) -> None:
    script = written(tmp_path, "import os\nprint('id', os.environ['TORCHELASTIC_RUN_ID'], flush=True)\nos._exit(3)\n")

    def ids(*flags: object, **env: object) -> set[str]:
        done = run(ddptrain, "--nproc-per-node", 2, "--max-restarts", 1, *flags, script, code=3, **env)
        found = re.findall(r"id (.*)", done.output())
        assert len(found) >= 3, "of two ranks in two lives"
        return set(found)

    first, second = ids(), ids()
    assert (len(first), len(second), len(first | second)) == (1, 1, 2)
    assert ids(PET_RDZV_ID="theirs") == {"theirs"}
    assert ids("--rdzv-id", "mine", PET_RDZV_ID="theirs") == {"mine"}
    assert run_id(parse(["train.py"], {}), {}, 2) == "none", "several nodes know no other"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--rdzv-backend", "c10d"], "ddprun does not support --rdzv-backend"),
        (["--rdzv-endpoint=host:29400"], "ddprun does not support --rdzv-endpoint"),
        (["--logs-specs", "mine"], "ddprun does not support --logs-specs"),
        (["--event_log_handler", "mine"], "ddprun does not support --event_log_handler"),
        (["-t", "3"], "ddprun does not support -t"),
        (["--nnodes", "1:4"], "ddprun does not support --nnodes 1:4"),
        (["--nproc-per-nod", "2"], "ddprun has no flag --nproc-per-nod"),
        (["--nproc-per-node", "many"], "--nproc-per-node=many is not a whole number"),
    ],
)
def test_flag_that_is_not_supported_is_refused(flags: list[str], said: str) -> None:
    with pytest.raises(UsageError, match=said) as refused:
        node_of(parse([*flags, "train.py"], {}), {})
    assert refused.value.hint


def test_flags_of_torchrun_give_the_place_and_win_over_variables() -> None:
    env = {"PET_NNODES": "3", "PET_NODE_RANK": "1", "NPROC_PER_NODE": "4", "MASTER_ADDR": "a", "PET_STANDALONE": "0"}
    flags = ["--nnodes=2:2", "--nproc_per_node", "8", "--master-addr", "b", "--rdzv_backend=static", "--run-path"]
    ranks = node_of(parse([*flags, "train.py", "--nnodes", "9"], env), env)
    assert (ranks.nnodes, ranks.node_rank, ranks.nproc_per_node, ranks.master_addr) == (2, 1, 8, "b")
    alone = node_of(parse(["--standalone", "train.py"], {}), {"NNODES": "3", "NODE_RANK": "2", "MASTER_ADDR": "a"})
    assert (alone.nnodes, alone.node_rank, alone.master_addr) == (1, 0, "127.0.0.1")
    with pytest.raises(UsageError, match="max_restarts: 'many' is not a whole number"):
        parse(["--max-restarts", "many", "train.py"], {})
    with pytest.raises(UsageError, match="PET_RDZV_BACKEND=c10d"):
        parse(["train.py"], {"PET_RDZV_BACKEND": "c10d", "PET_NNODES": "2"})


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ('os.environ["OMP_NUM_THREADS"] = "4"', "OMP_NUM_THREADS"),
        ("os.environ.setdefault('PYTORCH_ALLOC_CONF', 'x')", "PYTORCH_ALLOC_CONF"),
        ('run = os.environ["TORCHELASTIC_RUN_ID"]', None),
        ('if os.environ["OMP_NUM_THREADS"] == "4":', None),
        ('os.environ["OMPI_RANK"] = "1"', None),
    ],
)
def test_script_that_sets_variables_for_the_import_of_torch_is_recognised(line: str, name: str | None) -> None:
    found = _SET_BEFORE_IMPORT.search(line.encode())
    assert (found and found[1].decode()) == name


def test_variables_are_searched_in_the_file_that_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "mine"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')\n")
    for name in ("__main__", "train"):
        (package / f"{name}.py").write_text(f"import os\nos.environ['OMP_{name}'] = '4'\n")
    monkeypatch.chdir(tmp_path)
    for name, found in (("mine", "OMP___main__"), ("mine.train", "OMP_train")):
        said = Script("module", name, (), Settings()).preload()
        assert said == f"{name} sets variables that torch reads when it is imported ({found})"
