"""What a shell completes: jobs, namespaces and contexts, here and on a cluster.

A completion writes nothing but its candidates, because all else appears in the line that the user types. A cluster that
does not answer in time is left out.
"""

import contextlib
import io
import os
import shlex
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from time import monotonic
from typing import TYPE_CHECKING, Any, get_type_hints

import typer
from typer.models import ArgumentInfo

from ddpjob.cli.place import Where, kubeconfigs
from ddpjob.errors import InvalidJobError

if TYPE_CHECKING:
    from ddpjob.client.job import DDPJob

VARIABLE = "_DDPJOB_COMPLETE"
"""How the script in a shell asks for candidates: Typer's protocol."""
_SECONDS = 1.2


def attach(app: typer.Typer) -> None:
    """Let the parameters of all commands be completed that have the names of ``_COMPLETERS``."""
    for command in app.registered_commands:
        for name, hint in get_type_hints(command.callback, include_extras=True).items():
            for info in getattr(hint, "__metadata__", ()):
                if name != "name" or isinstance(info, ArgumentInfo):  # an option --name is for a new job
                    info.autocompletion = _COMPLETERS.get(name)


def answer(complete: Callable[[], object]) -> int:
    """Write the candidates that Typer writes, as the shell needs them. Return the exit code, which fish reads."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, sys.stderr.fileno())
    os.close(silent)
    known = _join_words() if os.environ[VARIABLE] == "complete_bash" else 0
    code: object = 0
    with contextlib.redirect_stdout(io.StringIO()) as written:
        try:
            complete()
        except SystemExit as end:
            code = end.code
    sys.stdout.write("".join(f"{line[known:]}\n" for line in written.getvalue().splitlines() if line))
    return code if isinstance(code, int) else 0


def for_kubectl(words: Sequence[str], complete: Callable[[], object]) -> int:
    """Write the candidates for the last word, as kubectl asks its plugins: those of cobra's ``__complete``."""
    *before, last = words or ("",)
    line = f"{shlex.join(['ddpjob', *before])} {last and shlex.quote(last)}"
    os.environ |= {VARIABLE: "complete_fish", "_TYPER_COMPLETE_FISH_ACTION": "get-args", "_TYPER_COMPLETE_ARGS": line}
    answer(complete)
    print(":0")  # without candidates kubectl completes files
    return 0


def job_names(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the jobs that the command can act on."""
    return _matching(incomplete, _of_jobs(ctx, lambda job: job.name))


def namespaces(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the namespaces of jobs and of the kubeconfig's contexts."""
    known = [str((entry.get("context") or {}).get("namespace") or "") for entry in _contexts()]
    return _matching(incomplete, [*known, *_of_jobs(ctx, lambda job: job.namespace or "", all_namespaces=True)])


def contexts(incomplete: str) -> list[str]:
    """Return the contexts of the kubeconfig."""
    return _matching(incomplete, (str(entry.get("name") or "") for entry in _contexts()))


def _of_jobs(ctx: typer.Context, of: "Callable[[DDPJob], str]", *, all_namespaces: bool = False) -> list[str]:
    """Return what a function says of each job in the places that the options of the line allow."""
    given: dict[str, Any] = {one.name: ctx.params.get(one.name) for one in fields(Where)}
    where = Where(**given | ({"namespace": None} if all_namespaces else {}))

    def here() -> list[str]:
        return list(map(of, where.machine().list(on_error=lambda error: None)))

    def there() -> list[str]:
        with where.cluster(_SECONDS) as client:
            return list(map(of, client.list(all_namespaces=all_namespaces)))

    remote = None
    with contextlib.suppress(InvalidJobError):  # options that contradict each other
        remote = _Answer(there) if where.may_be_on_cluster else None
    found: list[str] = []
    if where.context is None:
        with contextlib.suppress(Exception):
            found = here()
    return [*found, *(remote.in_time() if remote is not None else ())]


class _Answer:
    """What a function returns within ``_SECONDS``; nothing if it fails or takes longer."""

    def __init__(self, read: Callable[[], list[str]]) -> None:
        self._read = read
        self._found: list[str] = []
        self._end = monotonic() + _SECONDS
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def in_time(self) -> list[str]:
        self._thread.join(max(0.0, self._end - monotonic()))
        return list(self._found)

    def _run(self) -> None:
        with contextlib.suppress(Exception):
            self._found = self._read()


def _contexts() -> list[dict[str, Any]]:
    """Return the contexts of the kubeconfig as they are written; those of a file that cannot be read are left out."""
    import yaml

    found: list[dict[str, Any]] = []
    for path in kubeconfigs():
        with contextlib.suppress(Exception):
            found += yaml.safe_load(path.read_text(encoding="utf-8"))["contexts"]
    return [entry for entry in found if isinstance(entry, dict)]


def _matching(incomplete: str, candidates: Iterable[str]) -> list[str]:
    return sorted(
        {text for text in candidates if text and text.startswith(incomplete)}, key=lambda text: (len(text), text)
    )


def _join_words() -> int:
    """Join the words that bash has split at ``:`` and ``=``, such as the name of a context of EKS.

    Return how many characters of the last word bash does not replace by a candidate.
    """
    words, last = os.environ.get("COMP_WORDS", "").split("\n"), int(os.environ.get("COMP_CWORD") or 0)
    joined, is_joined = words[:1], False
    for word in words[1 : last + 1]:
        is_joined = len(joined) > 1 and (set(word) in ({":"}, {"="}) or joined[-1].endswith((":", "=")))
        if is_joined:
            joined[-1] += word
        else:
            joined.append(word)
    os.environ |= {"COMP_WORDS": "\n".join(joined), "COMP_CWORD": str(len(joined) - 1)}
    value = joined[-1].rpartition("=")[2]
    return value.rfind(":") + 1 if is_joined else 0


_COMPLETERS: Mapping[str, Callable[..., Any]] = {
    "name": job_names,
    "namespace": namespaces,
    "context": contexts,
}
"""The candidates by the name of a command's parameter."""
