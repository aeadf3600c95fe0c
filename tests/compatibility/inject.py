"""Makes rank 1 fail after a step of its optimizer, under any launcher; prepare.py installs it as a module beside torch.

COMPATIBILITY_FAULT=raise:3 raises an error in the third step, as a library that the program calls would do, and stop:3
stops the process as SIGSTOP does. COMPATIBILITY_SEED=NAME seeds torch when the program imports NAME: for programs that
set no seed, so that two runs have equal losses. Without the variables nothing happens.
"""

import importlib.abc
import importlib.util
import itertools
import os
import signal
import sys

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
    if next(_steps) != int(step) or os.environ.get("RANK") != str(RANK):
        return
    if action == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        raise ValueError(MESSAGE)


def _add_hook():
    sys.modules["torch.optim.optimizer"].register_optimizer_step_post_hook(_stepped)


def _seed():
    sys.modules["torch"].manual_seed(1)


if os.environ.get("COMPATIBILITY_FAULT"):
    sys.meta_path.insert(0, _AfterImport("torch.optim.optimizer", _add_hook))
if os.environ.get("COMPATIBILITY_SEED"):
    sys.meta_path.insert(0, _AfterImport(os.environ["COMPATIBILITY_SEED"], _seed))
