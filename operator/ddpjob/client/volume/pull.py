"""Both verbs on any volume: what it holds, and copies of it."""

from collections.abc import Iterator
from pathlib import Path

from ddpjob.api.backoff import Patience
from ddpjob.api.objects import Json
from ddpjob.client.volume.contents import (
    Choice,
    CutError,
    Files,
    Pulled,
    PulledFile,
    PullProgress,
    Volume,
    VolumeContents,
    listing,
    wanted_files,
)
from ddpjob.client.volume.receive import OnProgress, gone, ignore, receive, wait_after

_ROUNDS = 5  # of listing and copying, before a training is faster than the copy


def read_contents(volume: Volume, on_progress: OnProgress | None = None, *, verify: bool) -> VolumeContents:
    """Return what the volume holds. verify: read the checkpoints and compare their digests."""
    return _listing(volume, on_progress or ignore, Patience(), *(["verify"] if verify else []))[0]


def pull(volume: Volume, to: Path, choice: Choice, on_progress: OnProgress | None = None) -> Pulled:
    """Copy what is wanted of the volume into ``to``."""
    patience, shown = Patience(), on_progress or ignore
    done: dict[str, PulledFile] = {}
    missing: list[str] = []
    for _ in range(_ROUNDS):  # a training that goes on deletes checkpoints: list again what is there now
        contents, files = _listing(volume, shown, patience)
        wanted = wanted_files(contents, files, choice)
        left = [one for one in wanted if one.file.path not in done]
        copied, missing = receive(volume, left, to, on_progress=shown, patience=patience)
        done |= {file.path: file for file in copied}
        if not missing:
            break
    if missing and not choice.everything:
        raise gone(volume.job, missing[0])
    return Pulled(
        job=volume.job,
        namespace=volume.namespace,
        to=str(to.absolute()),
        files=[*done.values()] if choice.everything else [done[one.file.path] for one in wanted],
        complete=not choice.everything or not (contents.unlisted or missing),
    )


def _listing(
    volume: Volume, on_progress: OnProgress, patience: Patience, *arguments: str
) -> tuple[VolumeContents, Files]:
    """Return what the volume holds, and show which file is read; a cut connection is made again."""
    seen: set[str] = set()

    def shown() -> Iterator[Json | bytes]:
        for message in volume.messages("list", *arguments):
            match message:
                case {"working": path}:
                    on_progress(PullProgress(path=path))
                    continue
                case {"file": {"path": str(path)}} if path not in seen:
                    seen.add(path)
                    patience.reset()
            yield message

    while True:
        try:
            return listing(volume, shown())
        except CutError as cut:
            on_progress(PullProgress(waiting=f"the connection was cut: {cut}"))
            wait_after(cut, patience)
