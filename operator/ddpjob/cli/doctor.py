"""``ddpjob doctor``: checks this machine and the cluster, and says what to do about what it finds."""

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ddpjob.cli.options import Form
from ddpjob.cli.place import Where, has_kubeconfig
from ddpjob.cli.text import is_coloured, number_of, one_line
from ddpjob.errors import DDPJobError

if TYPE_CHECKING:
    from ddpjob.client.checkup import Check, Checkup

_UNHEALTHY = 1
_COLOURS = {"warning": "33", "error": "31"}


def doctor(output: Form = "text", *, where: Where) -> int:
    """Check torch on this machine, and the cluster of the kubeconfig with your rights there.

    Each check is ok, warning, error or unknown, with a hint and the next command. What you may not read is unknown. The
    JSON has the schema docs/reference/schemas/doctor.json.

    \b
    Exit codes:
      0  no check found an error; there may be warnings
      1  a check found an error

    \b
    Example:
      ddpjob doctor --local
    """
    from ddpjob.client.checkup import Checkup
    from ddpjob.version import __version__

    with where.machine() as machine:
        checks = machine.check()
    place, more = (None, []) if where.local else _of_cluster(where)
    checks += more
    found = Checkup(
        version=__version__, cluster=place, healthy=all(one.status != "error" for one in checks), checks=checks
    )
    if output == "json":
        print(json.dumps(found.wire(), indent=2))
    else:
        print("\n".join(_lines(found, coloured=is_coloured())))
    return 0 if found.healthy else _UNHEALTHY


def _of_cluster(where: Where) -> "tuple[str | None, list[Check]]":
    from ddpjob.client.checkup import of_cluster

    if where.context is None and not has_kubeconfig():
        hint = "commands act on this machine only"
        todo = "kubectl config get-contexts; KUBECONFIG names the file"
        return None, [of_cluster("connection", "unknown", "there is no kubeconfig", hint, todo)]
    try:
        with where.cluster() as client:
            return client.place, client.check()
    except DDPJobError as error:
        return None, [of_cluster("connection", "error", error.error, error.hint, error.next_step)]


def _lines(found: "Checkup", *, coloured: bool) -> Iterator[str]:
    """Yield the checks for a person; only what is abnormal has a hint and a colour."""
    yield f"ddpjob {found.version}"
    part = ""
    width = max(len(check.name) for check in found.checks)
    for check in found.checks:
        if check.part != part:
            part = check.part
            yield ""
            yield "this machine" if part == "machine" else one_line(found.cluster or "cluster")
        colour = _COLOURS.get(check.status) if coloured else None
        status = f"{check.status:<7}"
        shown = f"\x1b[{colour}m{status}\x1b[0m" if colour else status
        yield f"  {shown}  {check.name:<{width}}  {one_line(check.summary)}"
        if check.status != "ok":
            yield from (
                f"{'':>11}{label}{one_line(text)}"
                for label, text in (("hint:  ", check.hint), ("next:  ", check.next))
                if text
            )
    yield ""
    counts = [(sum(check.status == status for check in found.checks), status) for status in ("error", "warning")]
    unknown = sum(check.status == "unknown" for check in found.checks)
    yield ", ".join([*(number_of(count, noun) for count, noun in counts), f"{unknown} unknown"])
