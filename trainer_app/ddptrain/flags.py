"""How verbs and flags are declared and parsed. Used by ``cli``; imports no torch.

A flag of a setting is declared once, by its field in ``Config``; ``config.resolve`` checks its value.
"""

import argparse
import os
from collections.abc import Callable, Collection
from typing import Any

from ddprun.flags import declare_settings, whole_number
from ddptrain.config import SETTINGS, Config, resolve

Handler = Callable[[argparse.Namespace], int]


def add_verb(verbs: Any, name: str, text: str, handler: Handler, *, example: str) -> argparse.ArgumentParser:
    """Add a subcommand and return its parser."""
    parser: argparse.ArgumentParser = verbs.add_parser(
        name,
        help=text,
        description=text[0].upper() + text[1:] + ".",
        epilog=f"example:\n  ddptrain {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(handler=handler)
    return parser


def add_settings(parser: argparse.ArgumentParser, names: Collection[str] = SETTINGS) -> None:
    """Add a flag for each named setting."""
    group = parser.add_argument_group("settings", "also environment variables DDPTRAIN_<NAME>; flags win")
    declared = {name: field for name, field in SETTINGS.items() if name in names}
    declare_settings(group, declared, {})


def resolve_flags(arguments: argparse.Namespace) -> Config:
    """Return the settings out of the verb's flags and the environment."""
    return resolve(os.environ, {name: value for name, value in vars(arguments).items() if name in SETTINGS})


def add_checkpoint_choice(parser: argparse.ArgumentParser) -> None:
    """Add the flags that select a checkpoint."""
    parser.add_argument("--run", type=whole_number(1), metavar="N", help="of this run (default: the newest valid)")
    parser.add_argument("--step", type=whole_number(0), metavar="N", help="of this step")


def add_rank(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a rank that is started by hand."""
    group = parser.add_argument_group("one rank by hand", "also environment variables of the same names; flags win")
    group.add_argument("--init", metavar="URL", help="rendezvous: env, tcp://HOST:PORT, file:///PATH (a new file)")
    group.add_argument("--rank", metavar="N", help="number of this rank, from 0")
    group.add_argument("--world-size", metavar="N", help="number of all ranks")
    group.add_argument(
        "--local-rank", "--local_rank", metavar="N", help="number of this rank's GPU on this machine, from 0"
    )
