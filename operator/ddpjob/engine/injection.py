"""``launcher: Injected``: the launcher ``ddprun`` in any image that has Python and torch.

An init container of the operator's launcher image copies the package into a volume, and the trainer's command runs it
from there. The operator knows neither the image's PATH nor its PYTHONPATH, so it sets none of them: the copy sets both
for its ranks, and is called by its path.
"""

import re
from collections.abc import Sequence
from pathlib import PurePosixPath

from ddpjob.api import names
from ddpjob.api.objects import Json
from ddpjob.engine.merge import merge
from ddpjob.engine.template import render

PROGRAM = f"{names.LAUNCHER_PATH}/bin/ddprun"
REPLACED_MODULES = frozenset({"torch.distributed.run", "ddprun"})
"""Modules of ``python -m`` that ``ddprun`` replaces. Not torch.distributed.launch: it adds an argument --local-rank."""
REPLACED = frozenset({"torchrun", "ddprun"})
"""The same as programs."""
PYTHON = re.compile(r"(python|pypy)[0-9.]*")
PYTHON_OPTIONS_WITH_A_VALUE = frozenset({"-X", "-W", "--check-hash-based-pycs"})
WRAPPERS = frozenset(
    {
        *("env", "exec", "nice", "ionice", "chrt", "taskset", "numactl", "time", "timeout", "stdbuf", "setsid", "gosu"),
        *("tini", "dumb-init", "catchsegv", "nsys", "ncu", "py-spy", "strace", "uv", "poetry", "conda", "pixi"),
        *("run", "profile", "record"),
    }
)
"""Programs that start the program that follows their options, and words between the two."""
_TAKES_AN_OPERAND = "gosu"
"""The wrapper whose first word is no program: a user."""
_USER = 1000  # of the launcher's image


def with_launcher(pod: Json, image: str, pull_policy: str) -> Json:
    """Return the pod with the init container, the volume and the changed command of the trainer, its first container.

    image: of the init container; without an image the trainer finds ``ddprun`` on its PATH.
    """
    trainer, *others = pod["spec"]["containers"]
    words = [*(trainer.get("command") or ()), *(trainer.get("args") or ())]
    if trainer.get("command") and (command := launched(words, PROGRAM if image else None)) is not None:
        trainer = {key: value for key, value in trainer.items() if key != "args"} | {"command": command}
        pod = pod | {"spec": pod["spec"] | {"containers": [trainer, *others]}}
    if not image:
        return pod
    added = render(
        "launcher.yaml.j2",
        launcher=names.LAUNCHER,
        path=names.LAUNCHER_PATH,
        container=names.TRAINER_CONTAINER,
        image=image,
        pull_policy=pull_policy,
        # Any other user number of the pod is kept: the cluster may have chosen it.
        run_as_user=_USER if (pod["spec"].get("securityContext") or {}).get("runAsUser") == 0 else None,
    )
    # The launcher's init container comes first, so that it neither waits for others nor for a sidecar.
    return merge(added, pod)


def launched(words: Sequence[str], program: str | None) -> list[str] | None:
    """Return the command with ``ddprun`` in place of the launcher in it; None if it has no launcher to replace.

    Only commands are changed that do the same then: the program alone, below Python, or below ``WRAPPERS``.

    words: the command and its arguments. program: the path of ``ddprun``; without one it is found on PATH.
    """
    place = program_at(words)
    if place is None or not _is_known(words[place]):
        return None
    before, first, rest = list(words[:place]), words[place], list(words[place + 1 :])
    if not PYTHON.fullmatch(PurePosixPath(first).name):
        # The Python of the image's torchrun has torch; the copy reads it from that program.
        given = first if PurePosixPath(first).name == "torchrun" else "torchrun"
        return [*before, *(["python3", program, "--python-of", given] if program else ["ddprun"]), *rest]
    options = python_options(rest)
    match rest[options:]:
        case ["-m", module, *arguments] if module in REPLACED_MODULES:
            pass
        case [path, *arguments] if PurePosixPath(path).name in REPLACED:
            pass
        case _:
            return None
    return [*before, first, *rest[:options], *([program] if program else ["-m", "ddprun"]), *arguments]


def program_at(words: Sequence[str]) -> int | None:
    """Return the index of the program that a command runs, perhaps below ``WRAPPERS``; None if it names none.

    A word behind an option is its value, unless it is Python or a program that ``ddprun`` replaces.
    """
    for index, word in enumerate(words):
        behind = words[index - 1] if index else "--"
        is_value = behind.startswith("-") and behind != "--" and not _is_known(word)
        is_operand = PurePosixPath(behind).name == _TAKES_AN_OPERAND
        is_other = word.startswith("-") or "=" in word or word[:1].isdecimal() or is_value or is_operand
        if not is_other and PurePosixPath(word).name not in WRAPPERS:
            return index
    return None


def _is_known(word: str) -> bool:
    name = PurePosixPath(word).name
    return name in REPLACED or PYTHON.fullmatch(name) is not None


def python_options(words: Sequence[str]) -> int:
    """Return how many of the words after Python are its options, before a script or ``-m``."""
    count = 0
    while count < len(words) and words[count].startswith("-") and words[count] not in ("-m", "-c", "-"):
        count += 2 if words[count] in PYTHON_OPTIONS_WITH_A_VALUE else 1
    return count
