"""``ddpjob logs``: prints what the nodes of a job printed, also while it runs."""

from typing import TYPE_CHECKING, Annotated

from typer import Option

from ddpjob.cli.options import Name, Namespace, StateDir
from ddpjob.cli.place import Context, Local, find
from ddpjob.cli.text import is_coloured, sanitize_line

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ddpjob.client.base import LogLine
    from ddpjob.client.job import DDPJob

_COLOURS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)


def logs(
    name: Name,
    *,
    node: Annotated[int | None, Option("--node", min=0, metavar="N", help="Only this node.")] = None,
    attempt: Annotated[
        int | None, Option("--attempt", min=1, metavar="N", help="Logs of this attempt.", show_default="the newest")
    ] = None,
    all_nodes: Annotated[bool, Option("--all", help="All nodes, not only node 0 and nodes that failed.")] = False,
    follow: Annotated[bool, Option("--follow", "-f", help="Follow the logs until the run ends.")] = False,
    tail: Annotated[
        int | None, Option("--tail", min=0, metavar="N", help="Only the last N lines of each node.")
    ] = None,
    local: Local = False,
    context: Context = None,
    namespace: Namespace = None,
    state_dir: StateDir = None,
) -> int:
    """Print the logs of a job: of node 0 and of nodes that failed.

    Lines of a job with several nodes begin with the node, for example n1. Control characters are escaped.

    \b
    Example:
      ddpjob logs mnist-cpu --all --tail 20
    """
    nodes = None if node is None else {node}
    client = find(name, local=local, context=context, namespace=namespace, state_dir=state_dir)
    with client:
        job = client.get(name)
        lines = client.logs(name, nodes=nodes, all_nodes=all_nodes, attempt=attempt, follow=follow, tail=tail)
        print_lines(job, lines, flush=follow)
    return 0


def print_lines(job: "DDPJob", lines: "Iterable[LogLine]", *, flush: bool) -> None:
    """Print lines of a job, after the node if it has several."""
    several = job.manifest["spec"].get("numNodes", 1) > 1
    for line in lines:
        print((_prefix(line.node) if several else "") + sanitize_line(line.text), flush=flush)


def _prefix(rank: int) -> str:
    """Return the node, in colour on a terminal; see https://no-color.org."""
    return f"\x1b[{_COLOURS[rank % len(_COLOURS)]}mn{rank}\x1b[0m " if is_coloured() else f"n{rank} "
