"""``ddpjob plot`` and ``report``: the training of a job in the terminal, as a picture, or as an HTML page."""

import shutil
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from ddpjob.cli.options import MetricsDir, Name
from ddpjob.cli.place import Where, find
from ddpjob.cli.text import is_coloured, one_line, time_text
from ddpjob.errors import DDPJobError, InvalidJobError

if TYPE_CHECKING:
    from ddpjob.cli.training import Training
    from ddpplot.history import History
    from ddpplot.job import JobRecord

_WIDEST, _NARROWEST = 160, 40  # characters


def plot(
    name: Name,
    *,
    file: Annotated[
        Path | None,
        Option("--file", "-f", metavar="FILE", help="Write a picture into this file, whose name ends in .svg."),
    ] = None,
    metrics: MetricsDir = None,
    where: Where,
) -> int:
    """Draw the loss and the throughput of a job over its steps, with its restarts, failures and saves.

    It needs metrics: of ddptrain, or of a script that calls ddprun.report. Those of a job on a cluster are read through
    a pod, as by ddpjob checkpoints.

    \b
    Example:
      ddpjob plot mnist-cpu
    """
    require_ddpplot()
    if file is not None and file.suffix != ".svg":
        raise InvalidJobError(
            f"--file {file}: its name does not end in .svg",
            "the picture is an SVG; ddpjob report writes a page, FILE.html",
            "-f plot.svg",
        )
    from ddpjob.cli.training import read_training

    with find(name, where) as client:
        training = read_training(client, name, metrics)
    if file is None:
        width = max(_NARROWEST, min(_WIDEST, shutil.get_terminal_size().columns))
        print("\n".join(text_lines(training, width, coloured=is_coloured())))
    else:
        from ddpplot.figure import drawing

        write_file(file.expanduser(), drawing(training.history), training.job)
    return 0


def report(
    name: Name,
    file: Annotated[
        str | None, Option("--file", "-f", metavar="FILE", help="The page; default: NAME.html in this directory.")
    ] = None,
    *,
    metrics: MetricsDir = None,
    where: Where,
) -> int:
    """Write an HTML page about a job: why it is in its state, curves, attempts with their failures, events, a log.

    The page is one file without scripts, and requests nothing from a network. Metrics are found as by ddpjob plot; a
    page about a job without any has no curves.

    \b
    Example:
      ddpjob report mnist-cpu -f report.html
    """
    require_ddpplot()
    from ddpjob.cli.page import read_page
    from ddpjob.cli.training import read_training
    from ddpplot.page import as_html

    with find(name, where) as client:
        training = read_training(client, name, metrics, is_needed=False)
        page = read_page(client, training)
    write_file(Path(file).expanduser() if file else Path(f"{name}.html"), as_html(page), training.job)
    return 0


def require_ddpplot() -> None:
    """Raise ``DDPJobError`` unless the package that draws is installed, with what it needs."""
    try:
        import_module("ddpplot.recorded")
    except ModuleNotFoundError as error:
        raise DDPJobError(
            f"the package {error.name} is not installed",
            "ddpplot draws curves and pages; it belongs to the extra plot of ddpjob",
            "pip install 'ddpjob[plot]'",
        ) from error


def history_in(directory: Path) -> "History | None":
    """Return what the metrics in a directory hold; None without any or without ddpplot: it is only a picture."""
    try:
        from ddpplot import recorded
    except ModuleNotFoundError:
        return None
    try:
        return recorded.read_history(directory)
    except recorded.DataMissing:
        return None


def write_file(file: Path, text: str, about: "JobRecord") -> None:
    """Write a file about a job that the user named, and say so on standard error."""
    try:
        file.write_text(text, encoding="utf-8", errors="replace")
    except OSError as error:
        raise DDPJobError(
            f"{file} cannot be written: {error.strerror}",
            "the command writes one file and makes no directory",
            "name a file in a directory that exists and that you can write to",
        ) from error
    typer.echo(one_line(f"wrote {file}: {about.name} ({about.place})"), err=True)


def text_lines(training: "Training", width: int, *, coloured: bool) -> Iterator[str]:
    """Yield the lines for a terminal."""
    from ddpjob.cli.card import restarts_text
    from ddpplot import terminal
    from ddpplot.history import loss_text

    history, job = training.history, training.job
    total = f" of {history.total_steps:,}" if history.total_steps else ""
    facts = [f"step {history.last_step:,}{total}"]
    since = f" from step {history.diverged:,}" if history.diverged is not None else ""
    facts += [f"loss {loss_text(history.loss)}{since}"] if history.loss is not None else []
    facts += [restarts] if (restarts := restarts_text(training.found)) else []
    yield one_line(f"{job.name} {job.state} ({job.place}): {', '.join(facts)}")
    yield from terminal.drawing(history, width, coloured=coloured)
    for failure in job.failures:
        if not any(run.failure is failure for run in history.runs):
            yield one_line(f"  × attempt {failure.attempt} failed, without a step in the metrics: {failure.message}")
    if training.time is not None and training.time.total:
        yield f"time: {time_text(training.time)}"
