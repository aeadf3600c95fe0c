"""How flags are declared and parsed: of the launcher, and of a trainer with further settings. No torch."""

import argparse
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from ddprun.errors import UsageError, nearest

STARTS = ("auto", "spawn")
_MAX_COUNT = 10**12  # of steps, runs and the like


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises UsageError, with the nearest flag for one that it does not know."""

    def parse_known_args(  # type: ignore[override]
        self, args: Any = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse as the base class does, but refuse unknown flags of this verb.

        Raises:
            UsageError: with the nearest flag of the verb.
        """
        known, unknown = super().parse_known_args(args, namespace)
        for flag in (text.partition("=")[0] for text in unknown if text.startswith("-")):
            raise UsageError(
                f"{self.prog} has no flag {flag}",
                hint=nearest(flag, self._option_string_actions),
                next_step=f"`{self.prog} --help` lists its flags",
            )
        return known, unknown

    def error(self, message: str) -> NoReturn:
        """Raise UsageError for a mistake that the base class found."""
        raise UsageError(f"{self.prog}: {message}", next_step=f"`{self.prog} --help` lists verbs and flags")


def declare_settings(
    group: "argparse._ArgumentGroup", fields: Mapping[str, dataclasses.Field[Any]], defaults: Mapping[str, Any]
) -> None:
    """Add a flag for each setting; its value stays text, and ``settings.checked`` reads it.

    Args:
        defaults: where they differ from those of the fields.
    """
    for name, field in fields.items():
        flag, text = "--" + name.replace("_", "-"), field.metadata["help"]
        if isinstance(field.default, bool):
            group.add_argument(flag, action=argparse.BooleanOptionalAction, default=None, help=text)
            continue
        choices = "|".join(field.metadata["choices"])
        variable = f" [{field.metadata['env']}]" if field.metadata["env"] else ""
        default = defaults.get(name, field.default)
        shown = f" (default: {default})" if default != "" else ""
        group.add_argument(flag, metavar=choices or name.upper(), help=text + variable + shown)


def spellings(name: str) -> list[str]:
    """Return a flag in the spellings that torchrun takes, such as ``--node-rank`` and ``--node_rank``."""
    return list(dict.fromkeys(("--" + name.replace("_", "-"), "--" + name)))


def add_node(group: "argparse._ArgumentGroup") -> None:
    """Add the flags of a node and its launcher; they have the names of torchrun's, and are None if not given."""
    for name, metavar, text in (
        ("nnodes", "N", "number of nodes (default: 1)"),
        ("nproc_per_node", "N", "ranks on this node; for ddprun also cpu, gpu or auto (default: 1)"),
        ("node_rank", "N", "number of this node, from 0 (default: 0)"),
        ("master_addr", "HOST", "name or address of node 0"),
        ("master_port", "PORT", "port of rank 0's store (default: 29500; a free one with a single node)"),
        ("log_dir", "DIR", "also write each rank's output to a file there"),
    ):
        group.add_argument(*spellings(name), metavar=metavar, help=text)
    group.add_argument(
        *spellings("max_restarts"), type=whole_number(0), metavar="N",
        help="restart failed ranks up to N times; only with a single node (default: 0)",
    )  # fmt: skip
    group.add_argument(
        "--start", choices=STARTS,
        help="fork several ranks after one import of torch where that is safe, or always start an interpreter for each "
        "(default: auto)",
    )  # fmt: skip


def whole_number(low: int, high: int = _MAX_COUNT) -> Callable[[str], int]:
    """Return a flag type: a whole number from ``low`` to ``high``, both included."""

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
