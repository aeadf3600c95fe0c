"""``ddpjob report``: one HTML page about a job, to look at and to send."""

from pathlib import Path
from typing import Annotated

from typer import Option

from ddpjob.cli.options import MetricsDir, Name
from ddpjob.cli.place import Where, find
from ddpjob.cli.plot import require_ddpplot, write_file
from ddpjob.version import __version__


def report(
    name: Name,
    file: Annotated[
        str | None, Option("--file", "-f", metavar="FILE", help="The page; default: NAME.html in this directory.")
    ] = None,
    *,
    metrics: MetricsDir = None,
    where: Where,
) -> int:
    """Write an HTML page about a job: curves, attempts with their failures, and where the time went.

    The page is one file without scripts, and requests nothing from a network. Metrics are found as by ddpjob plot; a
    page about a job without any has no curves.

    \b
    Example:
      ddpjob report mnist-cpu -f report.html
    """
    require_ddpplot()
    from ddpjob.cli.training import read_training
    from ddpplot.page import Page, as_html

    with find(name, where) as client:
        training = read_training(client, name, metrics, is_needed=False)
    page = Page(name, f"ddpjob {__version__}", training.history, training.job)
    write_file(Path(file).expanduser() if file else Path(f"{name}.html"), as_html(page), training.job)
    return 0
