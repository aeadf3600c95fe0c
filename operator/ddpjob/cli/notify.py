"""Messages about the end of a wait: to Slack, mail, ntfy and other services, by Apprise."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from ddpjob.cli.text import one_line, show_error
from ddpjob.errors import DDPJobError, InvalidJobError

if TYPE_CHECKING:
    from apprise import Apprise

_LONGEST = 1500  # characters; the services cut at some thousand


class Messages:
    """Where messages go. An address may hold a password or a token: no error shows more of it than its scheme.

    Args:
        targets: addresses of Apprise, or files with such addresses, one a line.

    Raises:
        DDPJobError: Apprise is not installed.
        InvalidJobError: a target is none.
    """

    def __init__(self, targets: Sequence[str]) -> None:
        self._to = _apprise()
        for target in targets:
            for address in _addresses(target):
                if not self._to.add(address):
                    raise InvalidJobError(
                        f"--notify {urlsplit(address).scheme or 'without a scheme'}: this is no address of a service",
                        "an address is as in https://appriseit.com/services, for example ntfy://TOPIC",
                        "to keep its token out of the list of processes, write it to a file, and name this",
                    )

    def send(self, title: str, text: str, *, is_bad: bool) -> None:
        """Send a message. What cannot be delivered is said on standard error, and changes nothing else."""
        from apprise import NotifyType

        kind = NotifyType.FAILURE if is_bad else NotifyType.SUCCESS
        if not self._to.notify(title=one_line(title), body=one_line(text)[:_LONGEST], notify_type=kind):
            show_error(
                DDPJobError(
                    "the message was not delivered to each address of --notify",
                    "the service refuses it, or this machine does not reach it",
                    "try the address with the command apprise -vv",
                )
            )


def _addresses(target: str) -> list[str]:
    if "://" in target:
        return [target]
    try:
        lines = Path(target).expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidJobError(
            f"--notify {one_line(target)}: neither an address nor a file that can be read",
            str(error.strerror if isinstance(error, OSError) else error.reason),
            "for example --notify ntfy://TOPIC",
        ) from error
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


def _apprise() -> "Apprise":
    try:
        from apprise import Apprise
    except ModuleNotFoundError as error:
        raise DDPJobError(
            f"the package {error.name} is not installed",
            "--notify needs the extra notify of ddpjob",
            "pip install 'ddpjob[notify]'",
        ) from error
    return Apprise()
