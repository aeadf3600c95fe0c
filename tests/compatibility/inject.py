"""Makes rank 1 fail after a step of its optimizer, under any launcher; prepare.py installs it as a module beside torch.

COMPATIBILITY_FAULT=raise:3 raises an error in the third step, as a library that the program calls would do, and stop:3
stops the process as SIGSTOP does. After a restart in place nothing is done: each rank writes when it was started, and
when it made its first step, into the folder COMPATIBILITY_TIMES. COMPATIBILITY_SEED=NAME seeds torch when the program
imports NAME: for programs that set no seed, so that two runs have equal losses. Without the variables nothing happens.
"""

import importlib.abc
import importlib.util
import itertools
import os
import signal
import sys
import time

MESSAGE = "sample 17 has 3 channels, expected 1"
RANK = 1


class _AfterImport(importlib.abc.MetaPathFinder):
    """Finds one module as Python does, and calls a function when it has been executed."""

    def __init__(self, name, work):
        self._name, self._work = name, work

    def find_spec(self, fullname, path, target=None):
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            self._work()

        spec.loader.exec_module = exec_module
        return spec


_steps = itertools.count(1)


def _stepped(_optimizer, _args, _kwargs):
    action, _, step = os.environ["COMPATIBILITY_FAULT"].partition(":")
    done, is_restarted = next(_steps), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    if is_restarted and done == 1:
        _write_times(os.environ["COMPATIBILITY_TIMES"])
    if is_restarted or done != int(step) or os.environ.get("RANK") != str(RANK):
        return
    if action == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        raise ValueError(MESSAGE)


def _write_times(folder):
    """Write when the rank, which may be the parent of this process, was started, and the time: seconds of uptime."""
    from pathlib import Path  # noqa: PLC0415 - this module is imported by every process of the environment

    multiprocessing = sys.modules["multiprocessing.process"]  # torch has imported it
    rank = os.getppid() if multiprocessing.parent_process() else os.getpid()
    started = int(Path(f"/proc/{rank}/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    path = Path(folder, os.environ["RANK"])
    path.with_suffix(".new").write_text(f"{started} {time.clock_gettime(time.CLOCK_BOOTTIME)}")
    path.with_suffix(".new").rename(path)


def _add_hook():
    sys.modules["torch.optim.optimizer"].register_optimizer_step_post_hook(_stepped)


def _seed():
    sys.modules["torch"].manual_seed(1)


if os.environ.get("COMPATIBILITY_FAULT"):
    sys.meta_path.insert(0, _AfterImport("torch.optim.optimizer", _add_hook))
if os.environ.get("COMPATIBILITY_SEED"):
    sys.meta_path.insert(0, _AfterImport(os.environ["COMPATIBILITY_SEED"], _seed))
