"""``ddpjob``: parses the command line and runs one command; every mistake becomes three lines and an exit code.

Imports little, so that ``--help`` and usage errors answer at once: a command only its own module, ``run`` the operator.
"""

import errno
import os
import shlex
import signal
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer
from typer import Option
from typer.main import get_command

from ddpjob.api.exit_codes import SIGNAL_BASE, USAGE
from ddpjob.cli import options
from ddpjob.cli.text import show_error
from ddpjob.errors import DDPJobError, NotAllowedError, TransferError, UnavailableError
from ddpjob.version import __version__

_NOT_DONE = 1
"""The exit code of a command that is right, but that the cluster did not carry out."""

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Errors of a write to a file, which no other call that a command makes lets through."""


def run(request: options.RunOptions) -> int:
    """Run a DDPJob, or a script under ddprun, on this machine.

    The job gets the same pods, restarts and status as in a cluster. Run the same command again to resume it. Each line
    of the JSON has the schema docs/reference/schemas/run.json.

    \b
    Exit codes:
      0         the job succeeded
      1         the job failed
      2         the command line or the spec is wrong
      130, 143  stopped by Ctrl-C or SIGTERM; run the same command again to resume

    \b
    Example:
      ddpjob run manifests/examples/mnist-cpu.yaml -- --data digits
    """
    from ddpjob.cli.run import execute

    again = [argument for argument in sys.argv[1:] if argument != "--fresh"]
    return execute(request, shlex.join(["ddpjob", *again]))


_ON_JOBS = "run submit get ui why top stacks profile logs describe wait suspend resume restart delete"
_ON_VOLUME = "checkpoints pull plot report"
_ON_FILES = "init validate render convert"
_ON_TROUBLE = "doctor bundle"
_VERBS = " ".join((_ON_JOBS, _ON_VOLUME, _ON_FILES, _ON_TROUBLE)).split()
_MODULES = {
    "checkpoints": "cli.pull", "suspend": "cli.change", "resume": "cli.change", "restart": "cli.change",
    "report": "cli.plot", "ui": "ui.command",
}  # fmt: skip
"""Modules of this package that are not ``cli`` with the name of their command."""


def application(*verbs: str) -> typer.Typer:
    """Return the program, with all commands or some: to import and parse all takes a tenth of a command's start."""
    app = typer.Typer(
        name="ddpjob",
        add_completion=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["--help", "-h"]},
    )
    app.callback()(ddpjob)
    for verb in verbs or _VERBS:
        command = run if verb == "run" else getattr(import_module(f"ddpjob.{_MODULES.get(verb, f'cli.{verb}')}"), verb)
        app.command()(options.expanded(command))
    return app


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"ddpjob {__version__}")
        raise typer.Exit


def ddpjob(
    version: Annotated[
        bool, Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Run DDPJobs on this machine, and follow and change them here or on a cluster.

    \b
    Example:
      ddpjob run manifests/examples/mnist-cpu.yaml -- --data digits
    """


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line. Return the exit code."""
    _open_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    warnings.filterwarnings("ignore", message="Unverified HTTPS request")  # the kubeconfig asks for it
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] in (["--show-completion"], ["--install-completion"]) and arguments[1:]:
        os.environ["_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION"] = "1"  # Typer then takes the name of a shell
    if os.environ.get("_DDPJOB_COMPLETE", "").startswith("complete_"):
        return _complete()
    try:
        code = _carry_out(arguments)
        sys.stdout.flush()
    except DDPJobError as error:
        return _refused(error)
    except typer.TyperException as error:
        return _refused(_usage(error, arguments))
    except (typer.Abort, EOFError, KeyboardInterrupt):
        return SIGNAL_BASE + signal.SIGINT
    except OSError as error:
        if error.errno not in (errno.EPIPE, *_NO_ROOM):
            raise
        return _not_written(error)
    return code


def _open_closed_streams() -> None:
    """Open the null device in place of standard streams that the caller has closed; Python has None for them."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode))  # noqa: SIM115 - open as long as the process


def _carry_out(arguments: list[str]) -> int:
    """Run one command. Unlike ``main`` of the command, it hides no error of a write."""
    command = get_command(application(*(verb for verb in arguments[:1] if verb in _VERBS)))
    if "_DDPJOB_COMPLETE" in os.environ:  # prints the script that completes in a shell
        return int(command.main(arguments, prog_name="ddpjob", standalone_mode=False) or 0)
    try:
        with command.make_context("ddpjob", arguments or ["--help"]) as context:
            return int(command.invoke(context) or 0)
    except typer.Exit as ended:
        return ended.exit_code


def _not_written(error: OSError) -> int:
    """Return the exit code of a command whose output has no reader, or no room."""
    from ddpjob.cli.output import discard

    discard(sys.stdout.fileno())
    if error.errno == errno.EPIPE:
        return SIGNAL_BASE + signal.SIGPIPE
    show_error(
        DDPJobError(
            f"standard output cannot be written: {error.strerror}",
            "its file is on a disk that is full, or the file has its largest size",
            "make room, or write the output to another file",
        )
    )
    return _NOT_DONE


def _complete() -> int:
    from ddpjob.cli import completion

    app = application()
    completion.attach(app)
    return completion.answer(lambda: get_command(app).main([], prog_name="ddpjob"))


def _refused(error: DDPJobError) -> int:
    show_error(error)
    return _NOT_DONE if isinstance(error, NotAllowedError | UnavailableError | TransferError) else USAGE


def _usage(error: typer.TyperException, arguments: Sequence[str]) -> DDPJobError:
    """Return a usage error as three lines."""
    context = getattr(error, "ctx", None)
    verb = next((argument for argument in arguments[:1] if argument in _VERBS), "")
    command = getattr(context, "command_path", None) or f"ddpjob {verb}".strip()
    near = ", ".join(getattr(error, "possibilities", None) or ())
    usage = " ".join(context.get_usage().split()) if context is not None else f"Usage: {command} [OPTIONS] …"
    return DDPJobError(
        str(error.message if near else error.format_message()).rstrip("."),
        f"did you mean {near}?" if near else usage.removeprefix("Usage: "),
        f"{command} --help lists the options and shows an example",
    )


if __name__ == "__main__":
    sys.exit(main())
