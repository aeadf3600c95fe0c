"""``ddpjob exec``: runs a command in a node of a job on a cluster."""

import sys
from typing import Annotated

from typer import Argument, Option

from ddpjob.cli.options import Name
from ddpjob.cli.place import Where, find


def exec(  # noqa: A001 - the name of the command
    name: Name,
    command: Annotated[list[str], Argument(metavar="COMMAND...", help="The command; put -- before it.")],
    *,
    node: Annotated[int, Option("--node", min=0, metavar="N", help="Rank of the node.")] = 0,
    where: Where,
) -> int:
    """Run a command in the trainer's container of a node, without standard input, and return its exit code.

    It needs the right to create pods/exec, as in the role edit. Jobs of this machine have no containers.

    \b
    Example:
      ddpjob exec mnist-cpu --node 1 -- nvidia-smi
    """

    def show(data: bytes, is_error: bool) -> None:
        stream = sys.stderr.buffer if is_error else sys.stdout.buffer
        stream.write(data)
        stream.flush()

    with find(name, where) as client:
        return client.exec(name, command, node=node, on_output=show)
