"""The verbs ``config``, ``rollback`` and ``data``, and the tables of ``preflight``: all that needs no torch."""

import argparse
import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ddprun import exit_codes
from ddprun.checkpoint_files import all_manifests, read_newest, set_aside
from ddprun.errors import DataError, UsageError, volume_errors
from ddprun.files import dumps_json
from ddprun.flags import whole_number
from ddprun.signals import StopFlag
from ddptrain.config_sources import given_settings
from ddptrain.flags import (
    add_checkpoint_choice,
    add_group,
    add_settings,
    add_verb,
    resolve_flags,
    setting_flags,
)

_CHECKPOINTS = "--checkpoint-dir /tmp/ddptrain-checkpoints"


def add_file_verbs(verbs: "argparse._SubParsersAction[Any]") -> None:
    """Declare the verbs of this module."""
    config = add_group(verbs, "config", "show the settings of a run", example="config print --origin")
    print_config = add_verb(
        config, "print", "print every setting after file, environment and flags", _print_config,
        example="config print --origin --epochs 3",
    )  # fmt: skip
    print_config.add_argument("--origin", action="store_true", help="also print where each value came from")
    add_settings(print_config)
    back = add_verb(
        verbs, "rollback", "set newer checkpoints aside, so that the next start resumes from an older one", _rollback,
        example=f"rollback --step 50 {_CHECKPOINTS}",
    )  # fmt: skip
    add_checkpoint_choice(back)
    add_settings(back, ["checkpoint_dir"])
    data = add_group(verbs, "data", "fetch or verify the MNIST files", example="data verify --data-dir ./data")
    default = os.environ.get("DDPJOB_DATA_DIR")
    for name, text, fetch in (("fetch", "download missing files", True), ("verify", "check the files", False)):
        verb = add_verb(data, name, text, _fetch if fetch else _verify_data, example=f"data {name} --data-dir ./data")
        verb.add_argument(
            "--data-dir", default=default, required=not default, metavar="DIR",
            help="directory of the four files [DDPJOB_DATA_DIR]",
        )  # fmt: skip
        if fetch:
            verb.add_argument("--url", action="append", metavar="URL", help="base URL of a mirror; may be repeated")
            verb.add_argument("--tries", type=whole_number(1, 10), metavar="N", help="tries per mirror (default: 3)")


def _print_config(arguments: argparse.Namespace) -> int:
    config = resolve_flags(arguments)
    origins = {name: origin for name, _, origin in given_settings(os.environ, setting_flags(arguments))}
    for name, value in config.settings().items():
        line = f"{name}: {dumps_json(value)}"
        print(f"{line:<40} # {origins.get(name, 'default')}" if arguments.origin else line)
    return 0


def _fetch(arguments: argparse.Namespace) -> int:
    from ddptrain.data import download

    stop = StopFlag.installed()
    mirrors, tries = arguments.url or download.MIRRORS, arguments.tries or download.TRIES
    with stop.interruptible("data"):
        download.fetch(arguments.data_dir, mirrors=mirrors, tries=tries)
    return _verify_data(arguments)


def _verify_data(arguments: argparse.Namespace) -> int:
    """Print one line per MNIST file. Return 0, or 66 if any is absent or has other content."""
    from ddptrain.data.mnist import MNIST_FILES, find, read_content  # NumPy would delay every --help

    data_dir, whole = Path(arguments.data_dir), True
    print(f"{'file':<26}{'bytes':>12}  {'sha256 of content':<18}verdict")
    for file in MNIST_FILES:
        try:
            content = read_content(data_dir, file)
            digest = hashlib.sha256(content).hexdigest()
            size, verdict = f"{len(content):,}", "ok" if digest == file.sha256 else "not MNIST's content"
        except DataError as error:
            size, digest, verdict = "-", "-", "absent" if find(data_dir, file) is None else str(error)
        whole &= verdict == "ok"
        print(f"{file.name:<26}{size:>12}  {digest[:16]:<18}{verdict}")
    if whole:
        return 0
    print(f"next:  ddptrain data fetch --data-dir {data_dir}")
    return exit_codes.DATA


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
