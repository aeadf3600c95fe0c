"""The command line: the verbs, their flags, and ``main``. ``config`` checks the values of settings.

No module that imports torch is imported at the top, so help, version, usage errors and file verbs answer at once.
"""

import argparse
import os
import sys
from collections.abc import Callable, Collection, Sequence
from typing import Any, NoReturn

from ddprun.distributed import topology
from ddprun.fault_injection import check_rank
from ddprun.flags import Parser, add_node, declare_settings, whole_number
from ddprun.launcher.launcher import launch
from ddprun.launcher.supervisor import LaunchOptions
from ddprun.program import code_of, end_process
from ddprun.reporting.console import (
    escape_unencodable,
    finish_output,
    never_fail_or_wait,
)
from ddprun.resources import set_torch_defaults, uncollected_imports
from ddprun.signals import StopFlag
from ddptrain import __version__
from ddptrain.config import SETTINGS, Config, resolve
from ddptrain.lesson import lesson_names, run_lesson
from ddptrain.program import TrainerProgram

_CHECKPOINTS = "--checkpoint-dir /tmp/ddptrain-checkpoints"
Handler = Callable[[argparse.Namespace], int]


def run() -> NoReturn:
    """Run one command as a program of its own."""
    end_process(main())


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    escape_unencodable(sys.stdout, sys.stderr)
    set_torch_defaults()

    def command() -> int:
        arguments = _parser().parse_args(argv)
        return int(arguments.handler(arguments))

    return code_of(command)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="ddptrain",
        description="Train MNIST data-parallel with PyTorch, on one process or many nodes.",
        epilog="example:\n  ddptrain train --data digits --epochs 2",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"ddptrain {__version__}")
    # `python -m torch.distributed.launch -m ddptrain train …` puts it before the verb, and also sets LOCAL_RANK.
    parser.add_argument("--local-rank", "--local_rank", dest="_from_launch", help=argparse.SUPPRESS)
    verbs = parser.add_subparsers(metavar="VERB", required=True)

    train = _add_verb(
        verbs, "train", "train here, or launch this node's ranks if NNODES × NPROC_PER_NODE > 1", _train,
        example=f"train --data digits --epochs 2 {_CHECKPOINTS}",
    )  # fmt: skip
    _add_rank(train)
    _add_settings(train)
    launch = _add_verb(
        verbs, "launch", "start this node's ranks, supervise them, report the root cause of a failure", _launch,
        example="launch --nproc-per-node 2 --data digits --epochs 2",
    )  # fmt: skip
    add_node(launch.add_argument_group("ranks", "also environment variables of the same names; flags win"))
    _add_settings(launch)
    evaluate = _add_verb(
        verbs, "eval", "print the accuracy of a checkpoint on the test set", _evaluate, example=f"eval {_CHECKPOINTS}"
    )
    evaluate.add_argument("--run", type=whole_number(1), metavar="N", help="of this run (default: the newest valid)")
    evaluate.add_argument("--step", type=whole_number(0), metavar="N", help="of this step")
    evaluate.add_argument(
        "--out", default="", metavar="FILE", help="also write each prediction as CSV: index,label,predicted,probability"
    )
    _add_settings(evaluate, ["checkpoint_dir", "data_dir", "device", "threads"])
    _add_lessons(verbs)
    _add_fetch(verbs)
    return parser


def _add_lessons(verbs: "argparse._SubParsersAction[Any]") -> None:
    lesson = _add_verb(
        verbs, "lesson", "run a small program that shows and checks one subject of torch.distributed",
        lambda arguments: run_lesson(arguments.name, arguments.nproc_per_node),
        example="lesson collectives --nproc-per-node 4",
    )  # fmt: skip
    lesson.add_argument("name", metavar="NAME", choices=lesson_names(), help=", ".join(lesson_names()))
    lesson.add_argument(
        "--nproc-per-node", type=whole_number(1, 64), metavar="N",
        help="ranks to start here (default: NPROC_PER_NODE, or 4)",
    )  # fmt: skip


def _train(arguments: argparse.Namespace) -> int:
    rank = {name: getattr(arguments, name) for name in ("init", "rank", "world_size", "local_rank")}
    environment = topology.without_operator_rank(os.environ)
    if not any(rank.values()) and topology.needs_launch(environment):
        return _launch(arguments)
    never_fail_or_wait()
    stop, config = StopFlag.installed(), resolve_flags(arguments)
    ranks = topology.from_flags(environment, **rank)
    check_rank(config, ranks.world_size)
    with uncollected_imports():
        from ddptrain.worker import Worker

    worker = Worker(config, ranks, stop)
    code = worker.run.run_here(worker.train)
    finish_output(stopped=stop.requested)
    return code


def _launch(arguments: argparse.Namespace) -> int:
    never_fail_or_wait()
    stop, config, given = StopFlag.installed(), resolve_flags(arguments), vars(arguments)
    names = ("nnodes", "node_rank", "nproc_per_node", "master_addr", "master_port")
    ranks = topology.from_node_environment(os.environ, **{name: given.get(name) for name in names})
    check_rank(config, ranks.world_size)
    start, log_dir, restarts = (given.get(name) for name in ("start", "log_dir", "max_restarts"))
    options = LaunchOptions(TrainerProgram(config), start or "auto", log_dir or "", restarts or 0)
    report = launch(config, ranks, stop, options)
    finish_output(stopped=report.get("outcome") == "stopped")
    return int(report["code"])


def _evaluate(arguments: argparse.Namespace) -> int:
    from ddptrain.inference import evaluate_checkpoint

    return evaluate_checkpoint(resolve_flags(arguments), run=arguments.run, step=arguments.step, out=arguments.out)


def _add_fetch(verbs: "argparse._SubParsersAction[Any]") -> None:
    fetch = _add_verb(
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


def _add_verb(verbs: Any, name: str, text: str, handler: Handler, *, example: str) -> argparse.ArgumentParser:
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


def _add_settings(parser: argparse.ArgumentParser, names: Collection[str] = SETTINGS) -> None:
    """Add a flag for each named setting."""
    group = parser.add_argument_group("settings", "also environment variables DDPTRAIN_<NAME>; flags win")
    declared = {name: field for name, field in SETTINGS.items() if name in names}
    declare_settings(group, declared, {})


def resolve_flags(arguments: argparse.Namespace) -> Config:
    """Return the settings out of the verb's flags and the environment."""
    return resolve(os.environ, {name: value for name, value in vars(arguments).items() if name in SETTINGS})


def _add_rank(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a rank that is started by hand."""
    group = parser.add_argument_group("one rank by hand", "also environment variables of the same names; flags win")
    group.add_argument("--init", metavar="URL", help="rendezvous: env, tcp://HOST:PORT, file:///PATH (a new file)")
    group.add_argument("--rank", metavar="N", help="number of this rank, from 0")
    group.add_argument("--world-size", metavar="N", help="number of all ranks")
    group.add_argument(
        "--local-rank", "--local_rank", metavar="N", help="number of this rank's GPU on this machine, from 0"
    )
