"""Both verbs on any reader of a volume: what it holds, and copies of it."""

from collections.abc import Iterator
from pathlib import Path

from ddpjob.api.backoff import Patience
from ddpjob.api.objects import Json
from ddpjob.client.volume.contents import (
    Choice,
    Listing,
    Place,
    Pulled,
    PulledFile,
    PullProgress,
    VolumeContents,
    listing,
    wanted_files,
)
from ddpjob.client.volume.messages import CutError, VolumeReader, messages
from ddpjob.client.volume.receive import OnProgress, gone, ignore, receive, wait_after

_ROUNDS = 5  # of listing and copying, before a training is faster than the copy


def read_contents(
    reader: VolumeReader, place: Place, on_progress: OnProgress | None = None, *, verify: bool
) -> VolumeContents:
    """Return what the volume holds. verify: read the checkpoints and compare their digests."""
    return _listing(reader, place, on_progress or ignore, Patience(), verify=verify).contents


def pull(reader: VolumeReader, place: Place, to: Path, choice: Choice, on_progress: OnProgress | None = None) -> Pulled:
    """Copy what is wanted of the volume into ``to``."""
    patience, shown = Patience(), on_progress or ignore
    done: dict[str, PulledFile] = {}
    missing: list[str] = []
    for _ in range(_ROUNDS):  # a training that goes on deletes checkpoints: list again what is there now
        found = _listing(reader, place, shown, patience, verify=False)
        wanted = wanted_files(found, choice)
        left = [file for file in wanted if file.path not in done]
        copied, missing = receive(reader, place.job, left, to, on_progress=shown, patience=patience)
        done |= {file.path: file for file in copied}
        if not missing:
            break
    if missing and not choice.everything:
        raise gone(place.job, missing[0])
    files = done.values() if choice.everything else [done[file.path] for file in wanted]
    return Pulled(
        job=place.job,
        namespace=place.namespace,
        to=str(to.absolute()),
        files=list(files),
        complete=not choice.everything or (found.contents.complete and not found.contents.unreadable and not missing),
        hidden=sum(map(choice.leaves_out, found.files)) if choice.everything else 0,
    )


def _listing(
    reader: VolumeReader, place: Place, on_progress: OnProgress, patience: Patience, *, verify: bool
) -> Listing:
    seen: set[str] = set()
    while True:
        try:
            return listing(place, _shown(reader, on_progress, patience, seen, verify=verify))
        except CutError as cut:
            on_progress(PullProgress(waiting=f"the connection was cut: {cut}"))
            wait_after(cut, patience)


def _shown(
    reader: VolumeReader, on_progress: OnProgress, patience: Patience, seen: set[str], *, verify: bool
) -> Iterator[Json | bytes]:
    """Yield the messages of ``list``, and show which file is read. seen: the files that have been listed."""
    for message in messages(reader.output("list", *(["verify"] if verify else []))):
        match message:
            case {"working": path}:
                on_progress(PullProgress(path=path))
                continue
            case {"file": {"path": str(path)}} if path not in seen:
                seen.add(path)
                patience.reset()
        yield message
