"""The command ``ddprun``: torchrun's flags and PET_* variables, for a script, a module or an executable."""

import argparse
import dataclasses
import os
import secrets
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from ddprun import __version__, fault_injection
from ddprun.distributed import topology
from ddprun.errors import UsageError, volume_errors
from ddprun.flags import STARTS, Parser, add_node, declare_settings, spellings
from ddprun.launcher.agreement import MOST_RESTARTS, granted
from ddprun.launcher.launcher import launch
from ddprun.launcher.node_reports import explain
from ddprun.launcher.supervisor import LaunchOptions
from ddprun.preload import is_path_safe
from ddprun.program import code_of, end_process
from ddprun.reporting.console import escape_unencodable, finish_output, never_fail_or_wait
from ddprun.resources import available_cpus, visible_gpus
from ddprun.script import Kind, Script
from ddprun.settings import Settings, fields_of, given_settings
from ddprun.signals import StopFlag

_PREFIX = "DDPRUN_"
_SETTINGS = (
    "checkpoint_dir", "hang_timeout", "stall_report", "volume_timeout", "stop_grace", "on_divergence",
    "chaos",
)  # fmt: skip
# A script may work for long without a step of its optimizer: only the user knows for how long.
_DEFAULTS = {"hang_timeout": 0.0}
_FROM_ENVIRONMENT = (
    "nnodes", "nproc_per_node", "node_rank", "master_addr", "master_port", "max_restarts", "log_dir", "rdzv_id",
)  # fmt: skip
_SWITCHES = ("standalone", "module", "no_python")
# Flags of torchrun that change nothing here, and with a reason those that ddprun cannot do.
_NO_EFFECT = ("run_path", "monitor_interval", "start_method", "role", "rdzv_conf")
_REFUSED = {
    "rdzv_backend": "the nodes meet at --master-addr, and each has its --node-rank",
    "rdzv_endpoint": "the nodes meet at --master-addr and --master-port, and each has its --node-rank",
    "event_log_handler": "the termination report says how the ranks ended",
    "redirects": "--log-dir writes the output of each rank to a file, too",
    "tee": "--log-dir writes the output of each rank to a file, too",
    "local_ranks_filter": "the output of each rank has its number before each line",
    "logs_specs": "--log-dir writes the output of each rank to a file",
    "numa_binding": "start each rank under numactl with --no-python",
    "virtual_local_rank": "LOCAL_RANK is the number of the rank's GPU",
    "local_addr": "the address of node 0 is --master-addr",
    "signals_to_handle": "SIGTERM, SIGINT and SIGHUP are passed on to all ranks",
    "shutdown_timeout": "--stop-grace is the time from SIGTERM to SIGKILL",
    "duplicate_stdout_filters": "the output of each rank has its number before each line",
    "duplicate_stderr_filters": "the output of each rank has its number before each line",
}


def run() -> NoReturn:
    """Run ``ddprun`` as a program of its own."""
    if not is_path_safe():  # the folder of this program, or with ``python -m`` the working directory: not of the ranks
        del sys.path[0]
    end_process(main())


def main(argv: Sequence[str] | None = None) -> int:
    """Launch this node's ranks and return the node's exit code."""
    escape_unencodable(sys.stdout, sys.stderr)

    def command() -> int:
        arguments = parse(argv, os.environ)
        if arguments.why:
            return explain(Path(arguments.why))
        if arguments.copy_to:
            return _copy(Path(arguments.copy_to))
        never_fail_or_wait()
        return _launch(arguments)

    return code_of(command)


def _copy(directory: Path) -> int:
    """Copy program (bin/ddprun, see ``injected``) and package (lib/ddprun); a second copy overwrites the first.

    ``__pycache__`` is copied, too: a Python of the same version uses it, also where the directory is read-only.
    """
    package, program = Path(__file__).resolve().parent, directory / "bin" / "ddprun"
    with volume_errors(directory):
        shutil.copytree(package, directory / "lib" / package.name, dirs_exist_ok=True)
        program.parent.mkdir(exist_ok=True)
        shutil.copyfile(package / "injected.py", program)
        program.chmod(0o755)
    print(f"copied ddprun {__version__} to {directory}: run {program}")
    return 0


def parse(argv: Sequence[str] | None, env: Mapping[str, str]) -> argparse.Namespace:
    """Return the flags; those that are not given, from torchrun's PET_* variables.

    Raises:
        UsageError: a flag or value that ddprun does not support.
    """
    arguments = _parser().parse_args(argv)
    for name in _FROM_ENVIRONMENT:
        if getattr(arguments, name) is None:
            setattr(arguments, name, env.get("PET_" + name.upper()) or None)
    for name in _SWITCHES:
        if env.get("PET_" + name.upper(), "").lower() in ("1", "true", "yes", "on"):
            setattr(arguments, name, True)
    arguments.start = arguments.start or env.get(f"{_PREFIX}START") or "auto"
    if not (arguments.program or arguments.why or arguments.copy_to):
        raise UsageError("ddprun needs a script", next_step="for example `ddprun --nproc-per-node 2 train.py`")
    if arguments.start not in STARTS:
        raise UsageError(f"{_PREFIX}START={arguments.start} is not one of {', '.join(STARTS)}")
    backend = env.get("PET_RDZV_BACKEND", "static")
    if backend != "static" and (arguments.nnodes or "1") not in ("1", "1:1"):
        _refuse("rdzv_backend", f"PET_RDZV_BACKEND={backend}")
    return arguments


class _Refuse(argparse.Action):
    def __call__(self, parser: object, namespace: object, values: object, option_string: str | None = None) -> None:
        if values != "static":  # torchrun's default of --rdzv-backend
            _refuse(self.dest, str(option_string))


def _refuse(name: str, given: str) -> NoReturn:
    raise UsageError(f"ddprun does not support {given}", hint=_REFUSED[name], next_step="leave it out, or use torchrun")


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="ddprun",
        description="Start this node's ranks of a program, supervise them, and report the root cause of a failure.",
        epilog="example:\n  ddprun --nproc-per-node 2 train.py --lr 0.1",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"ddprun {__version__}")
    group = parser.add_argument_group(
        "ranks, as of torchrun", "also PET_* variables and NNODES, NODE_RANK, …; flags win"
    )
    add_node(group)
    group.add_argument(
        *spellings("rdzv_id"), metavar="ID", help="TORCHELASTIC_RUN_ID of the ranks (default: a random one)"
    )
    group.add_argument("--standalone", action="store_true", help="a single node; its port is free")
    group.add_argument("-m", "--module", action="store_true", help="the program is a module, as of python -m")
    group.add_argument(*spellings("no_python"), action="store_true", help="the program is an executable")
    for name in _NO_EFFECT:
        switch = {"action": "store_true"} if name == "run_path" else {}
        group.add_argument(*spellings(name), help=argparse.SUPPRESS, **switch)  # type: ignore[arg-type]
    for name in _REFUSED:
        short = {"redirects": ["-r"], "tee": ["-t"]}.get(name, [])
        group.add_argument(*short, *spellings(name), action=_Refuse, nargs="?", help=argparse.SUPPRESS)
    own = parser.add_argument_group("supervision", "also environment variables DDPRUN_<NAME>; flags win")
    fields = fields_of(Settings)
    declare_settings(own, {name: fields[name] for name in _SETTINGS}, _DEFAULTS)
    own.add_argument("--why", metavar="DIR", help="print the cause of the last failure, from the reports in DIR")
    own.add_argument(
        "--copy-to", metavar="DIR", help="copy ddprun to DIR, for a Python that lacks it: DIR/bin/ddprun runs the copy"
    )
    parser.add_argument("program", nargs="?", metavar="script", help="the script, module or executable")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="…", help="its arguments")
    return parser


def _launch(arguments: argparse.Namespace) -> int:
    stop, settings = StopFlag.installed(), resolve(arguments, os.environ)
    environment = topology.without_operator_rank(os.environ)
    if "RANK" in environment and "WORLD_SIZE" in environment:
        raise UsageError(
            "RANK and WORLD_SIZE are set, but ddprun gives each process its rank itself",
            hint="another launcher has started this command",
            next_step="start ddprun once per node, or unset both",
        )
    ranks = node_of(arguments, os.environ)
    fault_injection.check_rank(settings, ranks.world_size)
    kind: Kind = "executable" if arguments.no_python else "module" if arguments.module else "script"
    if kind == "script" and not Path(arguments.program).is_file():
        raise UsageError(f"there is no script {arguments.program}", next_step="check the path; -m runs a module")
    if ranks.nproc_per_node > 1:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does; torch reads it when it is imported
    preloaded = before_fork(ranks.nproc_per_node)
    program = Script(kind, arguments.program, tuple(arguments.arguments), settings, preloaded)
    restarts = topology.number_of({}, "MAX_RESTARTS", 0, 0, MOST_RESTARTS, flag=arguments.max_restarts)
    options = LaunchOptions(program, arguments.start, arguments.log_dir or "", restarts)
    os.environ["TORCHELASTIC_RUN_ID"] = run_id(arguments, os.environ, ranks.nnodes)
    os.environ["TORCHELASTIC_MAX_RESTARTS"] = str(restarts or granted())
    report = launch(settings, ranks, stop, options)
    finish_output(stopped=report.get("outcome") == "stopped")
    return int(report["code"])


def run_id(arguments: argparse.Namespace, env: Mapping[str, str], nnodes: int) -> str:
    """Return the id of this run: the user's, the operator's, or else as of torchrun a random one, if it is one node's.

    Several nodes need the same id, and know no other.
    """
    return arguments.rdzv_id or env.get("DDPJOB_UID") or ("none" if nnodes > 1 else secrets.token_hex(16))


def before_fork(ranks: int) -> tuple[str, ...]:
    """Return what to import before a fork of so many ranks.

    A single rank that is not restarted is forked before the import of torch, which it does as early itself, and with
    its own threads. The first optimizer of a process imports torch._dynamo, which takes a second of CPU: in each life
    of each rank.
    """
    if granted():
        return "torch", "torch._dynamo"
    return ("torch",) if ranks > 1 else ()


def resolve(arguments: argparse.Namespace, env: Mapping[str, str]) -> Settings:
    """Return the settings from defaults, variables and flags.

    Raises:
        UsageError: an unknown DDPRUN_* variable, or an invalid value.
    """
    fields = {name: field for name, field in fields_of(Settings).items() if name in _SETTINGS}
    values = given_settings(fields, _PREFIX, env, vars(arguments), further=["start"])
    return dataclasses.replace(Settings(), **{**_DEFAULTS, **values})


def node_of(arguments: argparse.Namespace, env: Mapping[str, str]) -> topology.Ranks:
    """Return this node's place.

    Raises:
        UsageError: an impossible or an elastic number of nodes, or ranks on GPUs that are not there.
    """
    place = {name: getattr(arguments, name) for name in ("nnodes", "node_rank", "master_addr", "master_port")}
    if place["nnodes"] and ":" in place["nnodes"]:
        low, _, high = place["nnodes"].partition(":")
        if low != high:
            raise UsageError(
                f"ddprun does not support --nnodes {place['nnodes']}",
                hint="the number of nodes is fixed; the operator restarts all of them",
                next_step=f"give one number, such as --nnodes {high}",
            )
        place["nnodes"] = low
    if arguments.standalone:
        place |= {"nnodes": "1", "node_rank": "0", "master_addr": "127.0.0.1", "master_port": None}
        env = {key: value for key, value in env.items() if key not in ("NNODES", "NODE_RANK", "MASTER_PORT")}
    return topology.from_node_environment(env, **place, nproc_per_node=_ranks_here(arguments.nproc_per_node))


def _ranks_here(given: str | None) -> str | None:
    """Return the number of ranks for torchrun's words ``gpu``, ``cpu`` and ``auto``; another value unchanged."""
    if given not in ("gpu", "cpu", "auto"):
        return given
    gpus = visible_gpus()
    if given == "gpu" and not gpus:
        raise UsageError("--nproc-per-node gpu, but there is no GPU", next_step="use cpu, auto or a number")
    return str(gpus if gpus and given != "cpu" else max(1, int(available_cpus())))
