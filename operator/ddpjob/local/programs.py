"""The programs that a job runs, which in local mode are those of this machine, not of an image."""

import importlib.util
import shutil
import sys
from pathlib import PurePosixPath

from ddpjob.local import LocalError
from ddpjob.local.admission import AdmittedJob
from ddpjob.local.environment import inherited

_INSTALLED_BY = {
    "torchrun": ("PyTorch", "pip install torch"),
    "ddprun": (
        "this project",
        "in the repository's folder: pip install ./trainer_app/ddprun; or run the script with --launcher torchrun",
    ),
}


def require_programs(admitted: AdmittedJob) -> None:
    """Raise ``LocalError`` if a program that the job runs is not installed; the job would only fail and restart."""
    if runs_ddptrain(admitted):
        missing = [name for name in ("torch", "numpy") if importlib.util.find_spec(name) is None]
        if shutil.which("ddptrain", path=inherited()["PATH"]) is None:
            missing.insert(0, "ddptrain")
        if missing:
            raise LocalError(
                f"the job runs ddptrain, which needs {missing[0]}, and {missing[0]} is not installed in {sys.prefix}",
                "local mode uses the programs of this machine, not images",
                "in the repository's folder: pip install ./trainer_app/ddp*",
            )
    elif (program := admitted.command[0]) in _INSTALLED_BY and shutil.which(program, path=inherited()["PATH"]) is None:
        owner, install = _INSTALLED_BY[program]
        raise LocalError(
            f"the job runs {program}, which is not installed here",
            f"{program} is part of {owner}; local mode uses the programs of this machine, not images",
            install,
        )


def runs_ddptrain(admitted: AdmittedJob) -> bool:
    """Return whether the job runs this repository's trainer, by name or as the entrypoint of its image."""
    command = admitted.command
    return not command or (len(command) == 1 and PurePosixPath(command[0]).name == "ddptrain")
