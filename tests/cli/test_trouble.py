"""`ddpjob doctor` and `bundle` on this machine."""

import json
import re
import zipfile
from pathlib import Path

import pytest

from ddpjob.api.objects import Json
from tests.cli.program import ROOT, Program, shell_job
from tests.json_schema import faults

SECRET = "correct-horse-battery"
SCRIPT = 'echo "key $MY_TOKEN"; echo "my last line"; exit 3'


def fits(document: Json, schema: str) -> Json:
    text = (ROOT / "docs" / "reference" / "schemas" / f"{schema}.json").read_text(encoding="utf-8")
    assert not list(faults(document, json.loads(text)))
    return document


@pytest.fixture
def failed(ddpjob: Program) -> Program:
    """Run a job that prints a secret, and fails."""
    env = [{"name": "MY_TOKEN", "value": SECRET}]
    job = shell_job("tiny", SCRIPT, restartPolicy={"maxRestarts": 0}, env=env)
    job["metadata"]["annotations"] = {"contact": "alice@example.com"}
    assert ddpjob("run", ddpjob.write(job), "-o", "json").code == 1
    return ddpjob


def test_a_bundle_of_a_failed_job_has_no_value_of_its_user(failed: Program) -> None:
    done = failed("bundle", "tiny", "-f", "b.zip", "-o", "json")
    assert (done.code, done.err) == (0, "")
    manifest = fits(json.loads(done.out), "bundle")
    assert (manifest["place"], manifest["job"], manifest["state"]) == ("machine", "tiny", "Failed")
    files = files_of(failed.folder / "b.zip")
    assert set(files) == {"manifest.json", "job.json", "pods.json", "events.json"}
    assert '"MY_TOKEN"' in files["job.json"]
    text = "".join(files.values())
    assert SECRET not in text and "alice" not in text and "my last line" not in text
    again = failed("bundle", "tiny", "-f", "b.zip")
    assert "exists" in again.is_refused()[0]


def test_a_bundle_has_the_logs_on_request(failed: Program) -> None:
    done = failed("bundle", "tiny", "-f", "b.zip", "--logs")
    assert done.code == 0 and done.out.splitlines()[0].startswith("wrote b.zip: ")
    assert "secrets that a program printed are in them" in done.out.splitlines()[-1]
    files = {re.sub(r"tiny-\w{5}", "tiny", path): text for path, text in files_of(failed.folder / "b.zip").items()}
    assert re.fullmatch(r"key hidden-\w{8}\nmy last line\n?", files["logs/tiny-1-0.log"])
    assert SECRET not in "".join(files.values())


def files_of(path: Path) -> dict[str, str]:
    with zipfile.ZipFile(path) as zipped:
        return {name: zipped.read(name).decode() for name in zipped.namelist()}


def test_doctor_without_a_kubeconfig_and_with_a_cluster_that_does_not_answer(ddpjob: Program, tmp_path: Path) -> None:
    nowhere = {"KUBECONFIG": str(tmp_path / "absent")}
    done = ddpjob("doctor", "-o", "json", env=nowhere)
    found = fits(json.loads(done.out), "doctor")
    assert (done.code, done.err, found["healthy"]) == (0, "", True)
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
