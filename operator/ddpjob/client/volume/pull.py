"""Both verbs on any reader of a volume: what it holds, and copies of it."""

from collections.abc import Iterator
from pathlib import Path

from ddpjob.api.objects import Json
from ddpjob.client.volume.contents import (
    Choice,
    Listing,
    Place,
    Pulled,
    PullProgress,
    VolumeContents,
    listing,
    wanted_files,
)
from ddpjob.client.volume.messages import CutError, Reader, messages
from ddpjob.client.volume.receive import OnProgress, Tries, ignore, receive


def read_contents(
    reader: Reader, place: Place, on_progress: OnProgress | None = None, *, verify: bool
) -> VolumeContents:
    """Return what the volume holds. verify: read the checkpoints and compare their digests."""
    return _listing(reader, place, on_progress or ignore, Tries(), verify=verify).contents


def pull(reader: Reader, place: Place, to: Path, choice: Choice, on_progress: OnProgress | None = None) -> Pulled:
    """Copy what is wanted of the volume into ``to``."""
    tries, shown = Tries(), on_progress or ignore
    found = _listing(reader, place, shown, tries, verify=False)
    wanted = wanted_files(found, choice)
    files = receive(reader, place.job, wanted, to, on_progress=shown, tries=tries)
    complete = found.contents.complete or not choice.everything
    return Pulled(job=place.job, namespace=place.namespace, to=str(to.absolute()), files=files, complete=complete)


def _listing(reader: Reader, place: Place, on_progress: OnProgress, tries: Tries, *, verify: bool) -> Listing:
    seen: set[str] = set()
    while True:
        try:
            return listing(place, _shown(reader, on_progress, tries, seen, verify=verify))
        except CutError as cut:
            on_progress(PullProgress(waiting=f"the connection was cut: {cut}"))
            tries.wait(cut)


def _shown(
    reader: Reader, on_progress: OnProgress, tries: Tries, seen: set[str], *, verify: bool
) -> Iterator[Json | bytes]:
    """Yield the messages of ``list``, and show which file is read. seen: the files that have been listed."""
    for message in messages(reader.output("list", *(["verify"] if verify else []))):
        match message:
            case {"working": path}:
                on_progress(PullProgress(path=path))
                continue
            case {"file": {"path": str(path)}} if path not in seen:
                seen.add(path)
                tries.reset()
        yield message
