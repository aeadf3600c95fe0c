"""`ddpjob doctor`, `bundle` and `replay` on this machine."""

import json
import re
import zipfile
from pathlib import Path

import pytest

from ddpjob.api.objects import Json
from tests.cli.program import ROOT, Program, shell_job, with_volume
from tests.json_schema import faults

SECRET = "correct-horse-battery"
SCRIPT = (
    'mkdir -p "$DDPJOB_CHECKPOINT_DIR/metrics"; '
    'echo \'{"event": "train", "step": 1, "loss": 0.5}\' > "$DDPJOB_CHECKPOINT_DIR/metrics/run-1.jsonl"; '
    'echo "key $MY_TOKEN"; exit 3'
)


def fits(document: Json, schema: str) -> Json:
    text = (ROOT / "docs" / "schemas" / f"{schema}.json").read_text(encoding="utf-8")
    assert not list(faults(document, json.loads(text)))
    return document


@pytest.fixture
def failed(ddpjob: Program) -> Program:
    """Run a job that prints a secret, and fails."""
    spec = with_volume(restartPolicy={"maxRestarts": 0}, env=[{"name": "MY_TOKEN", "value": SECRET}])
    job = shell_job("tiny", SCRIPT, **spec)
    job["metadata"]["annotations"] = {"contact": "alice@example.com"}
    assert ddpjob("run", ddpjob.write(job), "-o", "json").code == 1
    return ddpjob


def test_a_bundle_of_a_failed_job_has_all_but_its_secrets(failed: Program) -> None:
    done = failed("bundle", "tiny", "-f", "b.zip", "--logs", "-o", "json")
    assert (done.code, done.err) == (0, "")
    manifest = fits(json.loads(done.out), "bundle")
    assert (manifest["place"], manifest["job"], manifest["state"]) == ("machine", "tiny", "Failed")
    assert manifest["redaction"]["samePlan"] and manifest["redaction"]["envValues"]
    with zipfile.ZipFile(failed.folder / "b.zip") as zipped:
        files = {name: zipped.read(name).decode() for name in zipped.namelist()}
    paths = {re.sub(r"tiny-\w{5}", "tiny", path) for path in files}
    assert paths >= {"manifest.json", "job.json", "pods.json", "plan-inputs.json", "events.log", "logs/tiny-1-0.log"}
    assert '"loss": 0.5' in files["metrics/run-1.jsonl"]
    text = "".join(files.values())
    assert SECRET not in text and "alice" not in text
    assert '"MY_TOKEN"' in text and "key [redacted]" in text
    again = failed("bundle", "tiny", "-f", "b.zip")
    assert "exists" in again.is_refused()[0]


def test_a_bundle_without_names_is_replayed(failed: Program) -> None:
    done = failed("bundle", "tiny", "-f", "b.zip", "--hide-names")
    assert done.code == 0, done
    assert done.out.splitlines()[0].startswith("wrote b.zip: ")
    with zipfile.ZipFile(failed.folder / "b.zip") as zipped:
        text = "".join(zipped.read(name).decode() for name in zipped.namelist())
    assert "tiny" not in text
    shown = failed("replay", "b.zip")
    assert (shown.code, shown.err) == (0, "")
    assert shown.out.splitlines()[0].startswith("job-1 in namespace default, recorded ")
    found = fits(json.loads(failed("replay", "b.zip", "-o", "json").out), "replay")
    assert (found["isIdle"], found["creates"]) == (True, []), "the job has failed"


def test_a_file_that_is_no_bundle_is_refused(ddpjob: Program, tmp_path: Path) -> None:
    (tmp_path / "b.zip").write_text("none")
    assert "cannot be read as a bundle" in ddpjob("replay", "b.zip").is_refused()[0]
    assert "there is no job tiny" in ddpjob("bundle", "tiny", "--local").is_refused()[0]
    assert not list(tmp_path.glob("tiny*"))


@pytest.mark.soak
def test_doctor_checks_this_machine(ddpjob: Program, tmp_path: Path) -> None:
    done = ddpjob("doctor", "--local", "-o", "json")
    assert (done.code, done.err) == (0, "")
    found = fits(json.loads(done.out), "doctor")
    assert found["healthy"] and "cluster" not in found
    assert {check["part"] for check in found["checks"]} == {"machine"}
    (tmp_path / "file").touch()
    spoiled = ddpjob("doctor", "--local", "--state-dir", str(tmp_path / "file"))
    assert spoiled.code == 1
    (line,) = [line for line in spoiled.out.splitlines() if "state-folder" in line]
    assert line.startswith("  error ")
    assert spoiled.out.splitlines()[-1].startswith("1 error, ")


def test_doctor_without_a_kubeconfig_and_with_a_cluster_that_does_not_answer(ddpjob: Program, tmp_path: Path) -> None:
    nowhere = {"KUBECONFIG": str(tmp_path / "absent")}
    found = json.loads(ddpjob("doctor", "-o", "json", env=nowhere).out)
    assert [(c["name"], c["status"]) for c in found["checks"] if c["part"] == "cluster"] == [("connection", "unknown")]
    config = {
        "clusters": [{"name": "c", "cluster": {"server": "https://127.0.0.1:1"}}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
        "current-context": "c",
    }
    (tmp_path / "config").write_text(json.dumps(config))
    done = ddpjob("doctor", "-o", "json", env={"KUBECONFIG": str(tmp_path / "config")})
    assert done.code == 1
    checks = {c["name"]: c["status"] for c in fits(json.loads(done.out), "doctor")["checks"] if c["part"] == "cluster"}
    assert checks["api-server"] == "error"
    assert {*checks.values()} == {"error", "unknown"}
