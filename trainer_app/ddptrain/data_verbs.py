"""Verbs about the MNIST files: ``data fetch`` and ``data verify``. Neither imports torch.

``cli`` adds them to its own; ``fetch`` downloads, ``mnist`` knows what the files must be.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

from ddptrain.errors import DataError
from ddptrain.flags import add_verb, whole
from ddptrain.stop import StopFlag


def add_to(verbs: Any) -> None:
    """Declare the verbs."""
    data = add_verb(
        verbs, "data", "fetch or verify the MNIST files", None, example="ddptrain data verify --data-dir ./data"
    )
    data_verbs = data.add_subparsers(metavar="VERB", required=True)
    default = os.environ.get("DDPJOB_DATA_DIR")
    for name, text, run in (("fetch", "download what is missing", _fetch), ("verify", "check the files", _verify)):
        verb = add_verb(data_verbs, name, text, run, example=f"ddptrain data {name} --data-dir ./data")
        verb.add_argument(
            "--data-dir", default=default, required=not default, metavar="DIR",
            help="of the four files [DDPJOB_DATA_DIR]",
        )  # fmt: skip
        if name == "fetch":
            verb.add_argument("--url", action="append", metavar="URL", help="base URL of a mirror; may be repeated")
            verb.add_argument(
                "--tries", type=whole(1, 10), metavar="N", help="how often to ask each mirror (default: 3)"
            )


def _fetch(arguments: dict[str, Any]) -> int:
    from ddptrain import fetch

    stop = StopFlag()
    stop.install()
    with stop.interruptible("data"):
        mirrors, tries = arguments["url"] or fetch.MIRRORS, arguments["tries"] or fetch.TRIES
        fetch.fetch(arguments["data_dir"], mirrors=mirrors, tries=tries)
    return _verify(arguments)


def _verify(arguments: dict[str, Any]) -> int:
    """Print one line per file; returns 0, or 66 if any is absent or not MNIST's."""
    from ddptrain.mnist import MNIST_FILES, find, read_content  # late: NumPy would delay every help

    data_dir = arguments["data_dir"]
    good = True
    print(f"{'file':<26}{'bytes':>12}  {'sha256 of content':<18}verdict")
    for file in MNIST_FILES:
        try:
            content = read_content(Path(data_dir), file)
            digest = hashlib.sha256(content).hexdigest()
            size, verdict = f"{len(content):,}", "ok" if digest == file.sha256 else "not MNIST's content"
        except DataError as error:
            absent = find(Path(data_dir), file) is None
            size, digest, verdict = "-", "-", "absent" if absent else str(error)
        good &= verdict == "ok"
        print(f"{file.name:<26}{size:>12}  {digest[:16]:<18}{verdict}")
    if not good:
        print(f"next:  ddptrain data fetch --data-dir {data_dir}")
    return 0 if good else DataError.code
