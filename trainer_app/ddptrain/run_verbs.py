"""Verbs about runs: what is configured, what was saved, what went wrong. None of them imports torch.

``config``, ``ckpt`` and ``why``; ``cli`` adds them to its own.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

from ddptrain.config import Config, resolve, resolve_with_origins
from ddptrain.errors import UsageError
from ddptrain.finite import dumps
from ddptrain.flags import add_config, add_verb, whole

_PLACE = "--checkpoint-dir /tmp/ddptrain-checkpoints"


def add_to(verbs: Any) -> None:
    """Declare the verbs."""
    config = add_verb(verbs, "config", "what a run would be told", None, example="ddptrain config print --origin")
    config_verbs = config.add_subparsers(metavar="VERB", required=True)
    shown = add_verb(
        config_verbs, "print", "every setting after file, environment and flags", _print_config,
        example="ddptrain config print --origin --epochs 3",
    )  # fmt: skip
    shown.add_argument("--origin", action="store_true", help="say of each value where it came from")
    add_config(shown, [f.name for f in dataclasses.fields(Config)])
    _add_ckpt(verbs)
    why = add_verb(
        verbs, "why", "who is to blame for the last failure, out of the reports that all nodes left", _why,
        example="ddptrain why /tmp/ddptrain-checkpoints",
    )  # fmt: skip
    why.add_argument("directory", metavar="DIR", help="checkpoint or log directory of the run")
    why.add_argument("--json", action="store_true", help="one JSON object")


def _add_ckpt(verbs: Any) -> None:
    ckpt = add_verb(verbs, "ckpt", "list, verify or roll back checkpoints", None, example=f"ddptrain ckpt ls {_PLACE}")
    ckpt_verbs = ckpt.add_subparsers(metavar="VERB", required=True)
    for name, text, run in (
        ("ls", "what is saved, newest first", _list),
        ("verify", "read every checkpoint and compare its digest; 66 if one is damaged", _verify),
    ):
        verb = add_verb(ckpt_verbs, name, text, run, example=f"ddptrain ckpt {name} {_PLACE}")
        verb.add_argument("--json", action="store_true", help="one JSON array")
        add_config(verb, ["checkpoint_dir"])
    back = add_verb(
        ckpt_verbs, "rollback", "set newer checkpoints aside, so that the next start resumes from an older one",
        _rollback, example=f"ddptrain ckpt rollback --step 50 {_PLACE}",
    )  # fmt: skip
    back.add_argument("--run", dest="only_run", type=whole(1), metavar="N", help="of this run (default: the newest)")
    back.add_argument("--step", type=whole(0), metavar="N", help="this step")
    add_config(back, ["checkpoint_dir"])


def _print_config(arguments: dict[str, Any]) -> int:
    origin = arguments.pop("origin")
    config, origins = resolve_with_origins(os.environ, arguments)
    for name, value in dataclasses.asdict(config).items():
        text = dumps(value)
        print(f"{name + ': ' + text:<40} # {origins.get(name, 'default')}" if origin else f"{name}: {text}")
    return 0


def _directory(arguments: dict[str, Any]) -> Path:
    config = resolve(os.environ, arguments)
    if not config.checkpoint_dir:
        raise UsageError("no --checkpoint-dir (or DDPJOB_CHECKPOINT_DIR)", next_step="name the directory")
    return Path(config.checkpoint_dir)


def _list(arguments: dict[str, Any], *, verify: bool = False) -> int:
    from ddptrain.ckpt import show

    as_json = arguments.pop("json")
    return show(_directory(arguments), verify=verify, as_json=as_json)


def _verify(arguments: dict[str, Any]) -> int:
    return _list(arguments, verify=True)


def _rollback(arguments: dict[str, Any]) -> int:
    from ddptrain.ckpt import rollback

    run, step = arguments.pop("only_run"), arguments.pop("step")
    return rollback(_directory(arguments), run=run, step=step)


def _why(arguments: dict[str, Any]) -> int:
    from ddptrain.why import explain

    return explain(Path(arguments["directory"]), as_json=arguments["json"])
