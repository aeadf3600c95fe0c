"""One ``ddpjob run``: from the user's document to the finished or suspended job."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ddpjob.cluster.base import Json
from ddpjob.local.state import StateFolder


@dataclass(frozen=True)
class Options:
    """How to run.

    fresh: forget the job's state, and empty the volume of its claimTemplate, first.
    volumes: claim name -> directory of this machine, in place of the one in the state folder.
    progress_seconds: time between two questions to rank 0.
    directory: where containers without a workingDir run; None is the current directory.
    """

    fresh: bool = False
    volumes: Mapping[str, Path] = field(default_factory=dict)
    progress_seconds: float = 0.25
    directory: Path | None = None


class Session:
    """Runs one job.

    job: the DDPJob as the user wrote it. others: Secrets and ConfigMaps that its pods may refer to.
    on_change: called with the DDPJob and its pods at the start and after every change, at most ten times a second.
    say: one line for the user, without a line's end.
    """

    def __init__(
        self,
        job: Json,
        others: Sequence[Json],
        folder: StateFolder,
        options: Options,
        *,
        on_change: Callable[[Json, Sequence[Json]], None],
        say: Callable[[str], None],
    ) -> None:
        raise NotImplementedError

    async def run(self, stop: asyncio.Event) -> Json:
        """Run until the job is finished, or suspended because ``stop`` was set or its spec says so.

        Returns the DDPJob as it then is. Cancelling the call kills what runs at once; the state stays resumable.

        Raises:
            LocalError: the spec is refused, another process runs this job, or the state folder cannot be used.
        """
        raise NotImplementedError


def render(job: Json) -> list[Json]:
    """What a cluster would be asked for: the DDPJob with its defaults, Service, claim and pods of attempt 1.

    Raises:
        LocalError: the spec is refused.
    """
    raise NotImplementedError
