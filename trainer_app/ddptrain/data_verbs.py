"""Verbs about the MNIST files: ``data fetch`` and ``data verify``. Neither imports torch.

``cli`` adds them to its own; ``fetch`` and ``verify`` do the work.
"""

from __future__ import annotations

import os
from typing import Any

from ddptrain.flags import add_verb
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
            verb.add_argument("--tries", type=int, metavar="N", help="how often to ask each mirror (default: 3)")


def _fetch(arguments: dict[str, Any]) -> int:
    from ddptrain import fetch

    stop = StopFlag()
    stop.install()
    with stop.interruptible("data"):
        tries = arguments["tries"] if arguments["tries"] is not None else fetch.TRIES
        fetch.fetch(arguments["data_dir"], mirrors=arguments["url"] or fetch.MIRRORS, tries=max(1, tries))
    return _verify(arguments)


def _verify(arguments: dict[str, Any]) -> int:
    from ddptrain.verify import verify

    return verify(arguments["data_dir"])
