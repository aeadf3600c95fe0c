"""Imported once by the process from which programs are forked: pydantic builds the models of a job at the first one.

That takes a second of CPU time, which each command and each operator would spend again.
"""

from pathlib import Path

from ddpjob.client import jobfile
from ddpjob.client.validation import validate
from ddpjob.local.admission import admit

_EXAMPLE = str(Path(__file__).parents[1] / "manifests" / "examples" / "mnist-cpu.yaml")

validate(_EXAMPLE, jobfile.read_text(_EXAMPLE))
admit(jobfile.read(_EXAMPLE).job).created()
