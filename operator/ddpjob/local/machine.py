"""What every pod meets on this machine: the one node of local mode."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ddpjob.cluster.memory.api import ApiServer
from ddpjob.local.ports import Ports
from ddpjob.local.sources import Sources
from ddpjob.local.state import JobFolder

NODE_NAME = "local"


@dataclass(frozen=True)
class Machine:
    """The node.

    claim_directory: directory of a claim by name. directory: where containers without workingDir run.
    nodes: pods of one attempt, which share the CPUs in ``available`` evenly, and ``gpus`` as their limits say.
    """

    server: ApiServer
    folder: JobFolder
    sources: Sources
    ports: Ports
    claim_directory: Callable[[str], Path]
    directory: Path
    domain: str
    nodes: int
    available: Sequence[int]
    gpus: Sequence[str] = ()
