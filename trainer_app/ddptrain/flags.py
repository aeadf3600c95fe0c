"""How verbs and their flags are declared: every one with an example, every setting of ``Config`` with one spelling.

Used by ``cli`` and ``model_verbs``; imports no torch.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from typing import Any

from ddptrain.config import Config


def add_verb(verbs: Any, name: str, text: str, run: Any, *, example: str) -> argparse.ArgumentParser:
    """A subcommand; ``run`` takes its arguments as a dict, None where it has subcommands of its own."""
    parser: argparse.ArgumentParser = verbs.add_parser(
        name,
        help=text,
        description=text[0].upper() + text[1:] + ".",
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    if run is not None:
        parser.set_defaults(run=run)
    return parser


def add_config(parser: argparse.ArgumentParser, names: Sequence[str]) -> None:
    """A flag per field. Values are checked by ``resolve``, so that flags and environment obey one rule."""
    group = parser.add_argument_group("settings", "each also as environment variable DDPTRAIN_<NAME>; flags win")
    group.add_argument("--config", metavar="FILE", help="YAML file of settings; the environment and flags win")
    for field in dataclasses.fields(Config):
        if field.name not in names:
            continue
        flag, text = "--" + field.name.replace("_", "-"), field.metadata["help"]
        if isinstance(field.default, bool):
            group.add_argument(flag, action=argparse.BooleanOptionalAction, default=None, help=text)
            continue
        choices = "|".join(field.metadata["choices"])
        origin = f" [{field.metadata['env']}]" if field.metadata["env"] else ""
        shown = f" (default: {field.default})" if field.default != "" else ""
        group.add_argument(flag, metavar=choices or field.name.upper(), help=text + origin + shown)


def add_place(parser: argparse.ArgumentParser) -> None:
    """Which checkpoint, where it is not the newest valid one."""
    parser.add_argument("--run", dest="only_run", type=int, metavar="N", help="this run (default: the newest valid)")
    parser.add_argument("--step", type=int, metavar="N", help="this step")
