"""The verbs ``fetch`` and ``rollback``, and the tables of ``preflight``: all that needs no torch."""

import argparse
import os
from collections.abc import Mapping
from typing import Any

from ddprun.checkpoint_files import all_manifests, read_newest, set_aside
from ddprun.errors import UsageError, volume_errors
from ddprun.files import dumps_json
from ddprun.signals import StopFlag
from ddptrain.flags import add_checkpoint_choice, add_settings, add_verb, resolve_flags

_CHECKPOINTS = "--checkpoint-dir /tmp/ddptrain-checkpoints"


def add_file_verbs(verbs: "argparse._SubParsersAction[Any]") -> None:
    """Declare the verbs of this module."""
    back = add_verb(
        verbs, "rollback", "set newer checkpoints aside, so that the next start resumes from an older one", _rollback,
        example=f"rollback --step 50 {_CHECKPOINTS}",
    )  # fmt: skip
    add_checkpoint_choice(back)
    add_settings(back, ["checkpoint_dir"])
    fetch = add_verb(
        verbs, "fetch", "download the MNIST files that are absent or damaged", _fetch, example="fetch --data-dir ./data"
    )
    default = os.environ.get("DDPJOB_DATA_DIR")
    fetch.add_argument(
        "--data-dir", default=default, required=not default, metavar="DIR",
        help="directory of the four files [DDPJOB_DATA_DIR]",
    )  # fmt: skip
    fetch.add_argument("--url", action="append", metavar="URL", help="base URL of a mirror; may be repeated")


def _fetch(arguments: argparse.Namespace) -> int:
    from ddptrain.data import download

    with StopFlag.installed().interruptible("data"):
        download.fetch(arguments.data_dir, mirrors=arguments.url or download.MIRRORS)
    print(f"{arguments.data_dir} has the files of MNIST")
    return 0


def _rollback(arguments: argparse.Namespace) -> int:
    """Set aside every checkpoint newer than the given one, so that the next start resumes from it."""
    root = resolve_flags(arguments).checkpoint_root()
    if arguments.step is None:
        raise UsageError(
            "rollback needs --step", next_step=f"take it from the name of a checkpoint: {root}/run-…/step-….pt"
        )
    found, _ = read_newest(root, run=arguments.run, step=arguments.step)
    for run, step, path in list(all_manifests(root)):
        if (run, step) > (found.run, found.step):
            with volume_errors(path):
                set_aside(path, "rolled-back")
            print(f"run {run}, step {step}: set aside as *.rolled-back")
    print(f"the next start resumes from run {found.run}, step {found.step}")
    return 0


def preflight_text(found: Mapping[str, Any], *, as_json: bool) -> str:
    """Return the result of ``preflight`` as one JSON object, or as two tables."""
    if as_json:
        return dumps_json(found)
    lines = [f"{check['verdict']:<8} {check['check']:<16} {check['detail']}" for check in found["checks"]]
    if found["bandwidth"]:
        lines.append(f"\n{'collective':<16}{'bytes':>12}{'ms':>10}{'algbw GB/s':>12}{'busbw GB/s':>12}")
    for row in found["bandwidth"]:
        milliseconds = row["seconds"] * 1000
        lines.append(
            f"{row['collective']:<16}{row['bytes']:>12,}{milliseconds:>10.2f}{row['algbw']:>12.3f}{row['busbw']:>12.3f}"
        )
    verdict = "ready to train" if found["code"] == 0 else f"not ready, exit code {found['code']}"
    return "\n".join([*lines, "", f"{found['worldSize']} rank(s): {verdict}"])
