"""The command line: the verbs, and ``main``.

No module that imports torch is imported at the top, so help, version, usage errors and file verbs answer at once.
"""

import argparse
import functools
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn

from ddprun.checkpoint_files import all_manifests, read_newest, set_aside
from ddprun.distributed import topology
from ddprun.errors import TrainerError, UsageError, volume_errors
from ddprun.fault_injection import Fault, check_rank
from ddprun.files import dumps_json
from ddprun.flags import Parser, whole_number
from ddprun.launcher.launcher import launch
from ddprun.launcher.supervisor import LaunchOptions
from ddprun.reporting import termination
from ddprun.reporting.console import (
    Console,
    escape_unencodable,
    finish_output,
    never_fail_or_wait,
    terminal_or_none,
)
from ddprun.reporting.termination import Ending
from ddprun.resources import check_gpus, set_torch_defaults, uncollected_imports
from ddprun.signals import StopFlag
from ddptrain import __version__, flags
from ddptrain.config import Config
from ddptrain.flags import resolve_flags
from ddptrain.lesson import lesson_names, run_lesson
from ddptrain.program import Trainer

_CHECKPOINTS = "--checkpoint-dir /tmp/ddptrain-checkpoints"


def run() -> NoReturn:
    """Run one command as a program of its own, and end the process at once.

    With torch imported, the interpreter's ordinary end takes more than a second of CPU time. The pods of a failed
    attempt would hold their devices for that time, and the next attempt waits for these.
    """
    code = main()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):
        sys.exit(code)  # the interpreter reports it
    os._exit(code)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    escape_unencodable(sys.stdout, sys.stderr)
    set_torch_defaults()
    try:
        arguments = _parser().parse_args(argv)
        return int(arguments.handler(arguments))
    except TrainerError as error:
        print(error.lines(), file=sys.stderr)
        return _report_start(error)
    except Exception as error:  # such as a torch that cannot be imported
        traceback.print_exc()
        return _report_start(error)


def _report_start(error: Exception) -> int:
    """Write the report of a start that failed before a rank could report, and return its exit code."""
    report = termination.failure(error, rank=None, progress={"phase": "start"})
    termination.write(report, termination.destination())
    return int(report["code"])


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

    train = flags.add_verb(
        verbs, "train", "train here, or launch this node's ranks if NNODES × NPROC_PER_NODE > 1", _train,
        example=f"train --data digits --epochs 2 {_CHECKPOINTS}",
    )  # fmt: skip
    flags.add_rank(train)
    flags.add_settings(train)
    launch = flags.add_verb(
        verbs, "launch", "start this node's ranks, supervise them, report the root cause of a failure", _launch,
        example="launch --nproc-per-node 2 --data digits --epochs 2",
    )  # fmt: skip
    flags.add_node(launch)
    flags.add_settings(launch)
    preflight = flags.add_verb(
        verbs, "preflight", "check ranks, network, data and volume before a training, with the flags of launch",
        _preflight, example=f"preflight --nproc-per-node 2 --data digits {_CHECKPOINTS}",
    )  # fmt: skip
    preflight.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    flags.add_node(preflight, training=False)
    flags.add_settings(preflight)
    evaluate = flags.add_verb(
        verbs, "eval", "print the accuracy of a checkpoint on the test set", _evaluate, example=f"eval {_CHECKPOINTS}"
    )
    flags.add_checkpoint_choice(evaluate)
    flags.add_settings(evaluate, ["checkpoint_dir", "data_dir", "device", "threads"])
    _add_infer(verbs)
    _add_lessons(verbs)
    _add_file_verbs(verbs)
    return parser


def _add_infer(verbs: "argparse._SubParsersAction[Any]") -> None:
    infer = flags.add_verb(
        verbs, "infer", "write a checkpoint's prediction for every test sample as CSV; alone or under torchrun", _infer,
        example=f"infer {_CHECKPOINTS} --out /tmp/ddptrain-answers.csv",
    )  # fmt: skip
    infer.add_argument("--out", required=True, metavar="FILE", help="CSV: index,label,predicted,probability")
    flags.add_checkpoint_choice(infer)
    flags.add_settings(infer, ["checkpoint_dir", "data_dir", "device", "backend", "threads", "rendezvous_timeout"])


def _add_lessons(verbs: "argparse._SubParsersAction[Any]") -> None:
    lesson = flags.add_verb(
        verbs, "lesson", "run a small program that shows and checks one subject of torch.distributed", _lesson,
        example="lesson collectives --nproc-per-node 4",
    )  # fmt: skip
    lesson.add_argument("name", metavar="NAME", choices=lesson_names(), help=", ".join(lesson_names()))
    lesson.add_argument(
        "--nproc-per-node", type=whole_number(1, 64), metavar="N",
        help="ranks to start here (default: NPROC_PER_NODE, or 4)",
    )  # fmt: skip


def _lesson(arguments: argparse.Namespace) -> int:
    return run_lesson(arguments.name, arguments.nproc_per_node)


def _train(arguments: argparse.Namespace) -> int:
    rank = {name: getattr(arguments, name) for name in ("init", "rank", "world_size", "local_rank")}
    environment = topology.without_operator_rank(os.environ)
    if not any(rank.values()) and topology.needs_launch(environment):
        return _launch(arguments)
    never_fail_or_wait()
    stop, config = StopFlag.installed(), _training_config(arguments)
    ranks = topology.from_flags(environment, **rank)
    check_rank(config, ranks.world_size)
    check_gpus(config.backend, config.device, ranks.nproc_per_node)
    with uncollected_imports():
        from ddptrain.worker import Worker

    ending = Worker(config, ranks, Console(ranks.rank, terminal_or_none()), stop, "train").run_here()
    finish_output(stopped=stop.requested)
    return ending.code


def _launch(arguments: argparse.Namespace) -> int:
    never_fail_or_wait()
    ending = _run_launcher(arguments, "train")
    finish_output(stopped=ending.report.get("outcome") == "stopped")
    return ending.code


def _preflight(arguments: argparse.Namespace) -> int:
    if "RANK" in topology.without_operator_rank(os.environ):
        stop, ranks = StopFlag.installed(), topology.from_rank_environment(os.environ)
        from ddptrain.worker import Worker

        config, console = _training_config(arguments), Console(ranks.rank, None)
        ending = Worker(config, ranks, console, stop, "preflight").run_here()
    else:
        ending = _run_launcher(arguments, "preflight")
    if ending.result:  # only rank 0 has it
        print(_preflight_text(ending.result, as_json=arguments.json), flush=True)
    return ending.code


def _run_launcher(arguments: argparse.Namespace, job: Literal["train", "preflight"]) -> Ending:
    stop, config, given = StopFlag.installed(), _training_config(arguments), vars(arguments)
    names = ("nnodes", "node_rank", "nproc_per_node", "master_addr", "master_port")
    ranks = topology.from_node_environment(os.environ, **{name: given.get(name) for name in names})
    check_rank(config, ranks.world_size)
    check_gpus(config.backend, config.device, ranks.nproc_per_node)
    options = LaunchOptions(
        Trainer(config, job),
        given.get("how", "prefork"),
        given.get("log_dir", ""),
        given.get("max_restarts", 0),
    )
    return launch(config, ranks, stop, options)


def _training_config(arguments: argparse.Namespace) -> Config:
    config = resolve_flags(arguments)
    if config.chaos:
        Fault.parse(config.chaos)  # refused once, here, instead of by every rank
    return config


def _evaluate(arguments: argparse.Namespace) -> int:
    from ddptrain.inference import evaluate_checkpoint

    return evaluate_checkpoint(resolve_flags(arguments), run=arguments.run, step=arguments.step)


def _infer(arguments: argparse.Namespace) -> int:
    stop = StopFlag.installed()
    if topology.needs_launch(os.environ):
        raise UsageError(
            "infer runs one rank, but NNODES × NPROC_PER_NODE is more than 1 and RANK is not set",
            hint="without RANK, every pod would process all samples and write the same file",
            next_step="torchrun --nnodes N --nproc-per-node M … -m ddptrain infer …",
        )
    from ddptrain.inference import infer
    from ddptrain.worker import Worker

    config, ranks = resolve_flags(arguments), topology.from_rank_environment(os.environ)
    job = functools.partial(infer, config, out=Path(arguments.out), run=arguments.run, step=arguments.step)
    return Worker(config, ranks, Console(ranks.rank, None), stop, job).run_here().code


def _add_file_verbs(verbs: "argparse._SubParsersAction[Any]") -> None:
    """Declare the verbs that need no torch."""
    back = flags.add_verb(
        verbs, "rollback", "set newer checkpoints aside, so that the next start resumes from an older one", _rollback,
        example=f"rollback --step 50 {_CHECKPOINTS}",
    )  # fmt: skip
    flags.add_checkpoint_choice(back)
    flags.add_settings(back, ["checkpoint_dir"])
    fetch = flags.add_verb(
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


def _preflight_text(found: Mapping[str, Any], *, as_json: bool) -> str:
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
