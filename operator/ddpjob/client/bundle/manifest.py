"""``Manifest``: what is in a bundle, what is not and why. Its JSON is that of ``ddpjob bundle -o json``."""

from ddpjob.api.model import WireModel
from ddpjob.client.bundle.recording import Place, Unread

FORMAT = 1
"""Of the files in a bundle. A reader refuses a higher number."""


class BundledFile(WireModel):
    """A file of the bundle."""

    path: str
    """Path in the bundle."""
    what: str
    """What it holds."""
    bytes: int
    """Its size."""


class Redaction(WireModel):
    """How much was removed."""

    env_values: int
    """Values of environment variables, except those that the operator sets."""
    annotations: int
    """Values of annotations."""
    secrets: int
    """Other texts that look like a secret: passwords, tokens, keys, credentials in URLs."""
    names_hidden: bool
    """Whether names are replaced by pseudonyms."""
    same_plan: bool
    """Whether the operator would do the same about the redacted job, so that a replay shows what it does."""


class Manifest(WireModel):
    """What a bundle holds."""

    format: int
    """Version of the form of the bundle."""
    recorded: str
    """When the job was read, by the clock of the API server."""
    place: Place
    """Where the job is: a job of this machine, or of a cluster."""
    job: str
    """Name of the job."""
    namespace: str
    """Namespace of the job."""
    state: str
    """State of the job."""
    versions: dict[str, str]
    """Versions of programs and of the cluster."""
    redaction: Redaction
    """What was removed."""
    files: list[BundledFile]
    """The files, without this one."""
    unread: list[Unread]
    """What could not be read, and why."""
    file: str | None = None
    """Path of the bundle; in the output of the command, not in the bundle."""
