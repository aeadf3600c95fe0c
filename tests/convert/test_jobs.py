"""Ten jobs with the fields of public PyTorchJobs and TrainJobs, and the DDPJobs that are made of them.

``expected`` has each DDPJob, below the fields that did not carry over unchanged.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from ddpjob.client.jobfile import documents_of, dump_yaml
from ddpjob.client.validation import validate
from ddpjob.convert.conversion import convert

JOBS, EXPECTED = (Path(__file__).parent / name for name in ("jobs", "expected"))
NAMES = sorted(path.stem for path in JOBS.glob("*.yaml"))


@pytest.mark.parametrize("name", NAMES)
def test_job_becomes_this_ddpjob_with_these_notes_and_is_valid(name: str) -> None:
    made = convert(documents_of((JOBS / f"{name}.yaml").read_text(encoding="utf-8")))
    text = dump_yaml(made.job)
    notes = "".join(f"# {note.field}\n" for note in made.notes)
    assert notes + text == (EXPECTED / f"{name}.yaml").read_text(encoding="utf-8")
    problems = validate(name, text).problems
    assert [problem.field for problem in problems] in ([], ["spec"]), "a job of Kubeflow may have no volume"
