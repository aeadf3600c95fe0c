"""What a launcher prints and keeps: each line of its ranks, told apart by rank, and the lines of its own.

``launch`` chooses the printers by ``--log-format``; ``supervise`` calls them for each line that it read from a pipe.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable

from ddptrain.console import tagged
from ddptrain.node import Child


def rank_printer(log_format: str) -> Callable[[Child, bytes], None]:
    """Prints one line of a rank's output, without its end, and keeps it in the rank's log where there is one.

    Args:
        log_format: text, tagged ``[rank N]``; or json, one object per line.
    """
    return _print_json if log_format == "json" else _print_text


def own_printer(log_format: str) -> Callable[[str], None]:
    """Prints a line of the launcher's own, which is no rank."""
    return lambda text: print(tagged(None, text) if log_format == "json" else text, flush=True)


def _print_text(child: Child, line: bytes) -> None:
    sys.stdout.buffer.write(b"[rank %d] %s\n" % (child.rank, line))
    _keep(child, line + b"\n")


def _print_json(child: Child, line: bytes) -> None:
    encoded = tagged(child.rank, line.decode(errors="replace")).encode() + b"\n"
    sys.stdout.buffer.write(encoded)
    _keep(child, encoded)


def _keep(child: Child, line: bytes) -> None:
    if child.log:
        with contextlib.suppress(OSError):  # a full --log-dir must not cost the training; the line was printed
            child.log.write(line)
