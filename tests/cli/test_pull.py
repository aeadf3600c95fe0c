"""`ddpjob checkpoints` and `ddpjob pull` on a job of this machine."""

import json
import sys

import pytest

from ddpjob.api.objects import Json
from ddpjob.cli.pull import shown_transfer
from ddpjob.client.volume.contents import PullProgress
from ddprun.checkpoint_files import Checkpoints
from tests.cli.program import ROOT, Program, with_volume
from tests.json_schema import faults

SAVE = """
import json, os, pathlib
from ddprun.checkpoint_files import Checkpoints
from ddprun.reporting.metrics import RowsFile
root = pathlib.Path(os.environ["DDPJOB_CHECKPOINT_DIR"])
rows = RowsFile(root, 1)
rows.append("train", {"step": 1, "loss": 2.5})
rows.write(durable=True)
store = Checkpoints(root, keep=3)
store.claim({})
store.save(10, b"ten" * 1000, {"time": 1.7e9})
last = store.save(20, b"twenty" * 1000, {"time": 1.7e9}).place
progress = {"schema": 3, "seq": 1, "phase": "done", "step": 20, "checkpoint": last, "agreedCheckpoint": last}
end = {"schema": 3, "outcome": "succeeded", "code": 0, "rank": 0, "message": "m", "progress": progress}
pathlib.Path(os.environ["DDPJOB_TERMINATION_LOG"]).write_text(json.dumps(end))
"""


def has_run(ddpjob: Program, **spec: object) -> None:
    body = {"image": "none", "command": [sys.executable, "-c", SAVE], **with_volume(**spec)}
    job: Json = {"apiVersion": "ddpjob.dev/v1alpha1", "kind": "DDPJob", "metadata": {"name": "tiny"}, "spec": body}
    done = ddpjob("run", ddpjob.write(job), "-o", "json")
    assert done.code == 0, done


def objects(ddpjob: Program, code: int, *arguments: str) -> Json:
    """Return what a verb prints as JSON, which has the committed schema."""
    done = ddpjob(*arguments, "-o", "json")
    assert done.code == code, done
    found: Json = json.loads(done.out)
    schema = json.loads((ROOT / "docs" / "reference" / "schemas" / f"{arguments[0]}.json").read_text(encoding="utf-8"))
    assert not list(faults(found, schema))
    return found


def test_checkpoints_are_listed_and_pulled_from_the_directory_of_a_job(ddpjob: Program) -> None:
    has_run(ddpjob)
    listed = objects(ddpjob, 0, "checkpoints", "tiny")
    assert [(c["step"], c["bytes"], c["state"]) for c in listed["checkpoints"]] == [
        (20, 6000, "Intact"),
        (10, 3000, "Intact"),
    ]
    assert [file["path"] for file in listed["metrics"]] == ["metrics/run-000001.jsonl"]
    with ddpjob.on_terminal("checkpoints", "tiny", columns=70) as terminal:
        assert terminal.ends() == 0
        assert f"{listed['checkpoints'][0]['path']}\r\n" in terminal(), "a narrow terminal does not cut it"
    table = ddpjob("checkpoints", "tiny").out.splitlines()
    assert table[0].startswith(f"claim tiny-checkpoints, {ddpjob.state}")
    assert table[1].split() == ["RUN", "STEP", "SIZE", "AGE", "STATE", "FILE"]
    assert table[2].split()[1:4] == ["20", "5.9", "KiB"]
    assert table[4].startswith("metrics: 1 file, ")

    pulled = objects(ddpjob, 0, "pull", "tiny", "--metrics", "--step", "10")
    assert len(pulled["files"]) == 3 and "agreed" not in pulled, "that is known of the newest only"
    found = Checkpoints(ddpjob.folder / "tiny", keep=3).resume(print)
    assert found is not None
    assert (found[0].step, found[1]) == (10, b"ten" * 1000)
    newest = ddpjob("pull", "tiny", "--to", "here")
    assert newest.code == 0
    path = listed["checkpoints"][0]["path"]
    assert newest.out.splitlines()[-2:] == [
        f"2 files of tiny (this machine) in {ddpjob.folder / 'here'}",
        f"all ranks agreed: they had the same parameters at {path}",
    ]
    assert (ddpjob.folder / "here" / listed["checkpoints"][0]["path"]).read_bytes() == b"twenty" * 1000


def test_a_damaged_checkpoint_is_said_and_the_exit_code_is_1(ddpjob: Program) -> None:
    has_run(ddpjob)
    file = sorted((ddpjob.state / "volumes").rglob("*.pt"))[-1]
    file.write_bytes(b"TWENTY" * 1000)
    assert objects(ddpjob, 1, "checkpoints", "tiny")["checkpoints"][0]["state"] == "Damaged"
    assert "Damaged: its content does not match the digest" in ddpjob("checkpoints", "tiny").out
    assert objects(ddpjob, 0, "checkpoints", "tiny", "--no-verify")["checkpoints"][0]["state"] == "Unverified"
    refused = ddpjob("pull", "tiny")
    assert (refused.code, refused.out) == (1, "")
    assert [line[:7] for line in refused.err.splitlines()] == ["error: ", "hint:  ", "next:  "]
    objects(ddpjob, 0, "pull", "tiny", "--all")


def test_a_job_without_a_volume_and_a_step_that_was_never_saved(ddpjob: Program) -> None:
    has_run(ddpjob, command=["true"])
    assert "holds no checkpoint" in ddpjob("pull", "tiny").is_refused()[0]
    assert "no checkpoint of step 7" in ddpjob("pull", "tiny", "--step", "7").is_refused()[0]
    ddpjob("delete", "tiny")
    plain: Json = {"apiVersion": "ddpjob.dev/v1alpha1", "kind": "DDPJob", "metadata": {"name": "plain"}}
    assert ddpjob("run", ddpjob.write(plain | {"spec": {"image": "none", "command": ["true"]}})).code == 0
    assert "plain has no volume" in ddpjob("checkpoints", "plain").is_refused()[0]


@pytest.mark.parametrize(
    ("is_terminal", "printed"),
    [
        (False, "    1s  waits\n   12s  50 % of 10 B, a.pt\n"),
        (True, "    1s  waits\x1b[K\r    3s  50 % of 10 B, a.pt\x1b[K\r   12s  50 % of 10 B, a.pt\x1b[K\r\x1b[K"),
    ],
)
def test_a_transfer_is_one_line_that_changes_on_a_terminal_and_lines_elsewhere(
    is_terminal: bool, printed: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    times = iter([0.0, 1.0, 2.0, 3.0, 12.0])
    monkeypatch.setattr("ddpjob.cli.pull.time.monotonic", lambda: next(times))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    with shown_transfer() as show:
        for progress in (PullProgress("waits"), PullProgress("waits"), *[PullProgress("", "a.pt", 5, 10)] * 2):
            show(progress)
    assert capsys.readouterr().err == printed
