"""The command line: verbs, flags, and the choice between training here and launching a node's ranks.

Nothing imported at the top imports torch: help, version, mistakes and ``data`` answer at once.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Sequence
from typing import Any

from ddptrain import __version__
from ddptrain.commands import add_data_verbs, add_model_verbs, add_run_verbs
from ddptrain.config import Config, resolve
from ddptrain.errors import TrainerError
from ddptrain.flags import Parser, add_config, add_node, add_place, add_rank_by_hand, add_verb
from ddptrain.reporting.console import escape_unencodable, ignore_write_errors, log_as_json
from ddptrain.resources import check_gpus
from ddptrain.signals import StopFlag

_RANK_FLAGS = ("nnodes", "node_rank", "nproc_per_node", "master_addr", "master_port")
_EXAMPLES = {
    "": "ddptrain train --data digits --epochs 2",
    "train": "ddptrain train --data digits --epochs 2 --checkpoint-dir /tmp/ddptrain-checkpoints",
    "launch": "ddptrain launch --nproc-per-node 2 --data digits --epochs 2",
    "preflight": "ddptrain preflight --nproc-per-node 2 --data digits --checkpoint-dir /tmp/ddptrain-checkpoints",
    "eval": "ddptrain eval --checkpoint-dir /tmp/ddptrain-checkpoints",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit code of trainer-interface's table."""
    escape_unencodable(sys.stdout, sys.stderr)
    try:
        arguments = vars(_parser().parse_args(argv))
        return int(arguments.pop("run")(arguments))
    except TrainerError as error:
        print(error.lines(), file=sys.stderr)
        _leave_message(error)
        return error.code


def _train(arguments: dict[str, Any]) -> int:
    from ddptrain.distributed import topology as ranks

    ignore_write_errors()
    given = {name: arguments.pop(name) for name in ("init", "rank", "world_size", "local_rank")}
    if not any(given.values()) and ranks.needs_launch(os.environ):
        return int(_launch(arguments)["code"])
    stop = StopFlag()
    stop.install()
    config = _resolved(arguments)
    place = ranks.from_flags(os.environ, **given)
    if config.log_format == "json":
        log_as_json(place.rank)
    check_gpus(config.backend, config.device, place.nproc_per_node)
    from ddptrain.resources import set_torch_defaults

    set_torch_defaults()
    from ddptrain.reporting.console import Console, terminal_or_none
    from ddptrain.worker import run_here

    return run_here(config, place, Console(place.rank, terminal_or_none(), as_json=config.log_format == "json"), stop)


def _preflight(arguments: dict[str, Any]) -> int:
    from ddptrain.commands import text

    as_json = arguments.pop("json")

    def tell(report: dict[str, Any]) -> None:
        if found := report.get("preflight"):
            print(text(found, as_json=as_json), flush=True)

    if "RANK" in os.environ:  # torchrun, or by hand
        from ddptrain.distributed import topology as ranks
        from ddptrain.resources import set_torch_defaults

        set_torch_defaults()
        from ddptrain.reporting.console import Console
        from ddptrain.worker import run_here

        for name in (*_RANK_FLAGS, "log_dir"):
            arguments.pop(name)
        stop, place = StopFlag(), ranks.from_rank_environment(os.environ)
        stop.install()
        console = Console(place.rank, None)
        on_report = tell if place.is_zero else lambda _: None
        return run_here(_resolved(arguments), place, console, stop, job="preflight", on_report=on_report)
    report = _launch(arguments, "preflight")
    if report.get("node") == 0:
        tell(report)
    return int(report["code"])


def _launch_here(arguments: dict[str, Any]) -> int:
    ignore_write_errors()
    return int(_launch(arguments)["code"])


def _launch(arguments: dict[str, Any], job: str = "train") -> dict[str, Any]:
    from ddptrain.distributed import topology as ranks
    from ddptrain.launcher import launcher as launch

    stop = StopFlag()
    stop.install()
    given = {name: arguments.pop(name, None) for name in _RANK_FLAGS}
    how, log_dir = arguments.pop("how", "prefork"), arguments.pop("log_dir", "")
    max_restarts = arguments.pop("max_restarts", 0)
    config = _resolved(arguments)
    if config.log_format == "json":
        log_as_json(None, ("stderr",))
    place = ranks.from_node_environment(os.environ, **given)
    check_gpus(config.backend, config.device, place.nproc_per_node)
    port = given["master_port"] or os.environ.get("MASTER_PORT")
    options = launch.LaunchOptions(how, job, log_dir, max_restarts, fixed_port=bool(port))
    if how == "torchrun":
        command = launch.torchrun_command(place, arguments, options)
        os.execv(command[0], command)  # noqa: S606 - torchrun replaces this process and gets its signals
    return launch.launch(config, place, stop, options)


def _resolved(arguments: dict[str, Any]) -> Config:
    config = resolve(os.environ, arguments)
    if config.chaos:
        from ddptrain.fault_injection import Plan

        Plan.parse(config.chaos)  # refused here rather than by every rank
    return config


def _evaluate(arguments: dict[str, Any]) -> int:
    from ddptrain.resources import set_torch_defaults

    set_torch_defaults()
    from ddptrain.inference import evaluate_checkpoint

    run, step = arguments.pop("only_run"), arguments.pop("step")
    return evaluate_checkpoint(resolve(os.environ, arguments), run=run, step=step)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="ddptrain",
        description="Train MNIST data-parallel with PyTorch, on one process or many nodes.",
        epilog=f"example:\n  {_EXAMPLES['']}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"ddptrain {__version__}")
    verbs = parser.add_subparsers(metavar="VERB", required=True)
    names = [f.name for f in dataclasses.fields(Config)]

    train = _verb(verbs, "train", "train here, or launch this node's ranks if NNODES × NPROC_PER_NODE > 1", _train)
    add_rank_by_hand(train)
    add_config(train, names)
    launch = _verb(verbs, "launch", "fork this node's ranks, watch them, report the root cause", _launch_here)
    add_node(launch)
    add_config(launch, names)
    preflight = _verb(
        verbs, "preflight", "check ranks, network, data and volume before a training; flags as of launch", _preflight
    )
    preflight.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    add_node(preflight, lives=False)
    add_config(preflight, names)
    evaluate = _verb(verbs, "eval", "accuracy of a checkpoint on the test set; only reads", _evaluate)
    add_place(evaluate)
    add_config(evaluate, ["checkpoint_dir", "data_dir", "device", "threads"])
    add_model_verbs(verbs, main)
    add_run_verbs(verbs)
    add_data_verbs(verbs)
    return parser


def _verb(verbs: Any, name: str, text: str, run: Any) -> argparse.ArgumentParser:
    return add_verb(verbs, name, text, run, example=_EXAMPLES[name])


def _leave_message(error: TrainerError) -> None:
    """A refused start leaves its reason where the operator reads it."""
    from ddptrain.reporting import termination

    termination.write(termination.failure(error, rank=None, progress={"phase": "start"}), termination.destination())
