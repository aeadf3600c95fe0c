"""How verbs and their flags are declared: every one with an example, every setting of ``Config`` with one spelling.

Used by ``cli`` and the modules of verbs that it adds; imports no torch. What flags beside the settings hold is checked
here too, a number by ``whole``, several values by ``worlds_of`` and ``chosen``: a mistake is refused before the first
run.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from ddptrain.config import Config, nearest
from ddptrain.errors import UsageError

_MOST = 10**12  # of anything that is counted: steps, runs


class Parser(argparse.ArgumentParser):
    """Refuses as everything here does: what is wrong, the likely meaning, what to do."""

    def parse_known_args(  # type: ignore[override]
        self, args: Any = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """As the base's, for this verb and the verbs below it; a flag that it does not know is refused here.

        Raises:
            UsageError: naming the nearest flag of the verb.
        """
        known, strangers = super().parse_known_args(args, namespace)
        for flag in (word.partition("=")[0] for word in strangers if word.startswith("-")):
            raise UsageError(
                f"{self.prog} knows no {flag}",
                hint=nearest(flag, list(self._option_string_actions)),
                next_step=f"`{self.prog} --help` lists its flags",
            )
        return known, strangers

    def error(self, message: str) -> NoReturn:
        """What the base class found: a missing or unknown word, a value of the wrong type."""
        raise UsageError(f"{self.prog}: {message}", next_step=f"`{self.prog} --help` shows how it is meant")


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


def whole(low: int, high: int = _MOST) -> Callable[[str], int]:
    """A flag's type: a whole number from ``low`` to ``high``, both included."""

    def number(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if not low <= value <= high:
            bounds = f"below {low}" if value < low else f"above {high}"
            raise argparse.ArgumentTypeError(f"{text} is {bounds}")
        return value

    return number


def worlds_of(text: str) -> tuple[int, ...]:
    """``1,2,4`` as numbers, sorted, 1 among them.

    Raises:
        UsageError: not a list of numbers of ranks.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and len(part) < 4 and 1 <= int(part) <= 64 for part in parts):
        raise UsageError(f"--worlds {text!r} is not a list of numbers of ranks", next_step="give --worlds 1,2,4")
    return tuple(sorted({1, *map(int, parts)}))


def chosen(flag: str, text: str, known: Sequence[str]) -> tuple[str, ...]:
    """A comma-separated choice of ``known``.

    Raises:
        UsageError: something else is among it.
    """
    parts = tuple(part.strip() for part in text.split(",") if part.strip())
    strangers = [part for part in parts if part not in known]
    if strangers or not parts:
        raise UsageError(f"{flag} {text!r}: known are {', '.join(known)}", next_step=f"correct {flag}")
    return parts


def add_config(
    parser: argparse.ArgumentParser, names: Sequence[str], *, defaults: Mapping[str, Any] | None = None
) -> None:
    """A flag per field. Values are checked by ``resolve``, so that flags and environment obey one rule.

    Args:
        defaults: those of this verb that differ, as ``resolve`` is given them.
    """
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
        default = (defaults or {}).get(field.name, field.default)
        shown = f" (default: {default})" if default != "" else ""
        group.add_argument(flag, metavar=choices or field.name.upper(), help=text + origin + shown)


def add_place(parser: argparse.ArgumentParser) -> None:
    """Which checkpoint, where it is not the newest valid one."""
    parser.add_argument(
        "--run", dest="only_run", type=whole(1), metavar="N", help="this run (default: the newest valid)"
    )
    parser.add_argument("--step", type=whole(0), metavar="N", help="this step")


def add_rank_by_hand(parser: argparse.ArgumentParser) -> None:
    """Which rank of how many this process is, and where they meet, as a person at a terminal says it."""
    group = parser.add_argument_group("one rank by hand", "each also as environment variable of the same name")
    group.add_argument("--init", metavar="URL", help="where ranks meet: env, tcp://HOST:PORT, file:///PATH (fresh)")
    group.add_argument("--rank", metavar="N", help="which of the ranks this is, from 0")
    group.add_argument("--world-size", metavar="N", help="how many ranks there are")
    group.add_argument("--local-rank", metavar="N", help="which GPU of this machine it takes, from 0")


def add_node(parser: argparse.ArgumentParser, *, lives: bool = True) -> None:
    """Which node of how many this is, and how its ranks are started.

    Args:
        lives: with the flags that only a training has use for.
    """
    group = parser.add_argument_group("ranks", "each also as environment variable of the same name; flags win")
    group.add_argument("--nnodes", metavar="N", help="number of nodes (default: 1)")
    group.add_argument("--node-rank", metavar="N", help="this node, from 0 (default: 0)")
    group.add_argument("--nproc-per-node", metavar="N", help="ranks on this node (default: 1)")
    group.add_argument("--master-addr", metavar="HOST", help="name or address of node 0")
    group.add_argument(
        "--master-port", metavar="PORT", help="of rank 0's store (default: 29500; a free one with a single node)"
    )
    group.add_argument("--log-dir", default="", metavar="DIR", help="also keep each rank's output there")
    if not lives:
        return
    group.add_argument(
        "--how", choices=("prefork", "spawn", "torchrun"), default="prefork",
        help="start ranks by fork after importing torch once, afresh, or by torchrun (default: prefork)",
    )  # fmt: skip
    group.add_argument(
        "--max-restarts", type=whole(0), default=0, metavar="N",
        help="start failed ranks again up to N times; only with a single node (default: 0)",
    )  # fmt: skip
