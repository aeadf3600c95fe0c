"""Probable mistakes of a spec that the API accepts, among them a command that starts too few processes.

With one process per node the operator sets RANK and WORLD_SIZE, so every program joins the group. With more, a
launcher must start the processes of the node and give each its rank; without one, each node trains alone. Mistakes are
events of the operator, and warnings of ``validate`` and ``run``.
"""

from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath
from typing import NamedTuple

from ddpjob.api.text import shorten
from ddpjob.engine.desired import Job, overridden_fields
from ddpjob.engine.injection import PROGRAM, PYTHON, launched, program_at, python_options

LAUNCHERS = frozenset(
    {"torchrun", "ddprun", "ddptrain", "accelerate", "deepspeed", "mpirun", "mpiexec", "horovodrun", "colossalai"}
)
"""Programs that start several processes."""
LAUNCHER_MODULES = frozenset(
    {
        *("torch.distributed.run", "torch.distributed.launch", "torch.distributed.launcher"),
        *("accelerate.commands.launch", "accelerate.commands.accelerate_cli", "deepspeed.launcher.runner"),
        *("ddprun", "ddptrain", "lightning.fabric", "lightning_fabric.cli", "colossalai.cli"),
    }
)
"""The same as modules of ``python -m``."""
SHELLS = frozenset({"sh", "bash", "dash", "ash", "zsh", "ksh", "busybox", "make"})
"""Programs that run a script, which may call a launcher; the command does not show it."""
_MAX_COMMAND = 200


class Mistake(NamedTuple):
    """What is probably wrong. reason: of the event. field: of the spec."""

    reason: str
    field: str
    message: str


def mistakes(job: Job) -> Iterator[Mistake]:
    """Yield each probable mistake of a job's spec."""
    if warning := launch_warning(job):
        yield Mistake("NoLauncher", "command", warning)
    if warning := injection_warning(job):
        yield Mistake("LauncherNotUsed", "command", warning)
    if fields := overridden_fields(job):
        text = f"the operator sets these fields itself, and ignores the values in {', '.join(fields)}"
        yield Mistake("TemplateOverridden", "template", text)
    if job.spec.network_policy is not None and job.template_spec.get("hostNetwork"):
        text = "spec.networkPolicy has no effect: network plugins apply it to no pod with hostNetwork"
        yield Mistake("NetworkPolicyIgnored", "networkPolicy", text)


def launch_warning(job: Job) -> str | None:
    """Return why the job's command may start fewer processes than ``nprocPerNode``; None if nothing indicates it.

    The entrypoint of an image, a shell script and a command that contains ``$(VAR)`` cannot be judged.
    """
    words = trainer_command(job)
    if job.nproc_per_node == 1 or not words or any("$(" in word for word in words) or not _is_unlaunched(words):
        return None
    command = shorten(" ".join(words[:3]), _MAX_COMMAND)
    return (
        f"nprocPerNode is {job.nproc_per_node}, but the command {command} is not a known launcher, so it may start one "
        "process per node, which trains alone: use ddprun or torchrun (command: [ddprun, train.py]), "
        "python -m torch.distributed.run, accelerate launch, deepspeed or ddptrain, or set nprocPerNode: 1; "
        "a program that starts its processes itself, as Lightning does, needs none"
    )


def injection_warning(job: Job) -> str | None:
    """Return why ``launcher: Injected`` does not change the job's command; None if it does, or is not asked for."""
    words = trainer_command(job)
    if job.spec.launcher is None or launched(words, PROGRAM) is not None or any(PROGRAM in word for word in words):
        return None
    what = f"the command {shorten(' '.join(words[:3]), _MAX_COMMAND)}" if words else "the entrypoint of the image"
    return (
        f"launcher is Injected, but {what} runs unchanged: only torchrun, ddprun and python -m torch.distributed.run "
        f"are replaced (command: [ddprun, train.py]); a script of your own can call python3 {PROGRAM} train.py"
    )


def trainer_command(job: Job) -> list[str]:
    """Return the trainer's command with its arguments; empty if the image's entrypoint runs."""
    spec, trainer = job.spec, next(iter(job.spec.trainers), None)
    command = spec.command if spec.command is not None else (trainer and trainer.command)
    args = spec.args if spec.args is not None else (trainer and trainer.args)
    return [*command, *(args or ())] if command else []


def _is_unlaunched(words: Sequence[str]) -> bool:
    """Return whether the program of a command is neither a launcher nor something that cannot be judged."""
    if (place := program_at(words)) is None:
        return False
    program, rest = PurePosixPath(words[place]).name, words[place + 1 :]
    if not PYTHON.fullmatch(program):
        return not (program in LAUNCHERS | SHELLS or program.endswith(".sh"))
    match rest[python_options(rest) :]:
        case ["-m", *module]:
            return not LAUNCHER_MODULES.issuperset(module[:1])
        case [] | ["-c" | "-", *_]:
            return False
        case [path, *_]:
            return PurePosixPath(path).name not in LAUNCHERS
    return False
