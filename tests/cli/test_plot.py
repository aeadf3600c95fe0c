"""`ddpjob plot` and `ddpjob report` of a job of this machine whose script was killed, failed and resumed."""

import re
import shutil
import xml.etree.ElementTree as ET
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path

import pytest

from ddpjob import DDPJob
from ddpjob.cli.main import main
from ddpjob.client.connection import ApiConnection
from ddpjob.client.volume import reader_pod
from ddpjob.client.volume.contents import Volume
from ddpjob.client.volume.reader import output_of_folder
from tests.cli.program import Program, shell_job, with_volume
from tests.plot.rows import write_run
from tests.worlds.scripted_api import ScriptedApi

# Killed after the save of step 4: restarted in place. In its second life it raises: a second attempt resumes.
SCRIPT = """
import os
import ddprun

checkpoints = ddprun.checkpoints(os.environ["DDPJOB_CHECKPOINT_DIR"])
found = checkpoints.load_newest()
start = os.environ["DDPJOB_ATTEMPT"], os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
for step in range(found.step + 1 if found else 1, 13):
    ddprun.report(step=step, total_steps=12, loss=1 / step)
    if step % 4 == 0:
        checkpoints.save(step, {"step": step})
    if start == ("1", "0") and step == 5:
        os.kill(os.getpid(), 9)
    if start == ("1", "1") and step == 10:
        raise ValueError("sample 17 is <bad>")
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Program:
    """Run the job once; the tests only read it."""
    ddpjob = Program(tmp_path_factory.mktemp("plot"))
    (ddpjob.folder / "train.py").write_text(SCRIPT)
    job = shell_job("tiny", "exec ddprun train.py", numNodes=1, nprocPerNode=1, **with_volume())
    # One restart in place is granted; the exception then ends the attempt.
    job["spec"]["env"] = [{"name": "DDPJOB_INPLACE_RESTARTS", "value": "1"}]
    done = ddpjob("run", ddpjob.write(job), "-o", "json")
    assert done.code == 0, done
    return ddpjob


def test_text_lists_the_marks_below_the_curve(trained: Program) -> None:
    done = trained("plot", "tiny", env={"COLUMNS": "90"})
    assert done.code == 0
    lines = done.out.splitlines()
    restarts = "2 restarts (1 in place, 1 of at most 12 counted)"
    assert lines[0] == f"tiny Succeeded (this machine): step 12 of 12, loss 0.08333, {restarts}"
    assert "training loss by step" in done.out and "\x1b" not in done.out
    assert "  ┊ step 4: attempt 1, life 2 resumed from step 4 in place" in lines
    assert "  │ step 8: attempt 2 resumed from step 8" in lines
    assert "  ▴ 3 saved, the last at step 12" in lines
    assert lines[-1].startswith("time: ")
    assert max(map(len, lines[1:-1])) <= 90


def test_a_picture_goes_to_a_file(trained: Program, tmp_path: Path) -> None:
    done = trained("plot", "tiny", "--file", "tiny.svg", cwd=tmp_path)
    assert (done.code, done.out, done.err) == (0, "", "wrote tiny.svg: tiny (this machine)\n")
    classes = [element.get("class") for element in ET.parse(tmp_path / "tiny.svg").iter()]  # noqa: S314 - our own
    assert [classes.count(kind) for kind in ("restart", "restart inplace", "save")] == [1, 1, 3]
    assert "failure" in classes


def test_page_has_attempts_failures_and_time_and_no_markup_of_the_job(trained: Program, tmp_path: Path) -> None:
    done = trained("report", "tiny", cwd=tmp_path)
    assert (done.code, done.err) == (0, "wrote tiny.html: tiny (this machine)\n")
    page = (tmp_path / "tiny.html").read_text()
    assert "sample 17 is &lt;bad&gt;" in page and "<bad>" not in page
    assert '<section id="runs">\n<h2>Attempts</h2>' in page
    assert page.count('<rect class="end"') >= 1
    assert "= training / (all - queued - stopped)" in page and "hint: " in page
    assert "<script" not in page


def test_a_loss_that_becomes_nan_is_shown_everywhere(ddpjob: Program) -> None:
    script = """
import ddprun
for step in range(1, 51):
    ddprun.report(step=step, total_steps=100, loss=1 / step if step < 25 else float("nan"))
"""
    (ddpjob.folder / "train.py").write_text(script)
    job = shell_job("tiny", "exec ddprun train.py", numNodes=1, nprocPerNode=1, **with_volume())
    assert ddpjob("run", ddpjob.write(job), "-o", "json").result["status"]["progress"]["loss"] == "nan"
    plain = {"COLUMNS": "90"}
    drawn = ddpjob("plot", "tiny", env=plain).out
    assert drawn.splitlines()[0].endswith("step 50 of 100, loss NaN from step 25")
    assert "  ! step 25: attempt 1: the loss is NaN at step 25 and 25 later" in drawn
    card = ddpjob("get", "tiny", env=plain).out
    assert "loss nan" in card
    assert " nan" in ddpjob("get", "-o", "wide").out
    assert ddpjob("report", "tiny").code == 0
    page = (ddpjob.folder / "tiny.html").read_text()
    assert '<b class="bad">NaN</b><span>training loss from step 25</span>' in page
    assert ">NaN at step 25<" in page


def test_a_copy_of_the_metrics_is_read(trained: Program, tmp_path: Path) -> None:
    volume = trained.state / "volumes" / "default" / "tiny-checkpoints"
    shutil.copytree(volume / "metrics", tmp_path / "copy")
    copied = trained("plot", "tiny", "--metrics", str(tmp_path / "copy"), env={"COLUMNS": "90"}).out
    assert "step 12 of 12, loss 0.08333" in copied and "  │ step 8: attempt 2 resumed from step 8" in copied
    assert "saved, the last at step 12" in copied, "the rows of processes that failed may lack the last save"
    assert "no metrics" in trained("plot", "tiny", "--metrics", str(tmp_path)).is_refused(1)[0]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["tiny", "-f", "x.png"], "--file x.png: its name does not end in .svg"),
        (["tiny", "-f", "missing/x.svg"], "cannot be written"),
        (["tniy"], "there is no job tniy"),
    ],
)
def test_a_mistake_is_three_lines(trained: Program, arguments: list[str], error: str) -> None:
    assert error in trained("plot", *arguments).is_refused()[0]


def test_a_job_without_metrics_says_who_writes_them(ddpjob: Program) -> None:
    ddpjob("run", ddpjob.write(shell_job("none", "true")))
    lines = ddpjob("plot", "none").is_refused(1)
    assert "no volume" in lines[0] and "ddprun.report" in lines[1] and "--metrics DIR" in lines[2]
    ddpjob("run", ddpjob.write(shell_job("other", "true", **with_volume())))
    lines = ddpjob("plot", "other").is_refused(1)
    assert "no metrics of a training in" in lines[0] and "ddprun.report(step=" in lines[2]
    assert "no metrics" in ddpjob("report", "other", "--metrics", str(ddpjob.folder)).is_refused(1)[0]


def test_a_page_about_a_job_without_metrics_has_attempts_failures_and_time(ddpjob: Program) -> None:
    job = shell_job("plain", "sleep 2; echo 'ValueError: sample 17 is <bad>'; exit 3", restartPolicy={"maxRestarts": 1})
    assert ddpjob("run", ddpjob.write(job)).code == 1
    done = ddpjob("report", "plain")
    assert (done.code, done.out) == (0, "")
    note, wrote = done.err.splitlines()
    assert note.startswith("note: without curves: ") and wrote == "wrote plain.html: plain (this machine)"
    page = (ddpjob.folder / "plain.html").read_text()
    assert page.count('<rect class="end"') == 2, "both attempts"
    assert "Where the time went" in page and "no metrics · 1 node" in page
    runs = page.partition('id="runs"')[2].partition("</section>")[0]
    ends = re.findall(r"plain-\w+-(\d)-0\) ended with exit code 3", runs)
    assert ends == ["1", "2"]
    assert "Loss and throughput" not in page and "moving average" not in page
    assert 'id="verdict" class="bad"' in page and "ValueError: sample 17 is &lt;bad&gt;</pre>" in page


def test_metrics_of_a_cluster_are_read_through_the_pod_of_its_volume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "volume", 1, range(1, 31), totalSteps=30, attempt=1)
    readers = []

    def reader(connection: ApiConnection, job: DDPJob, on_progress: object) -> AbstractContextManager[Volume]:
        readers.append(job.name)
        output = partial(output_of_folder, str(tmp_path / "volume"))  # instead of a pod, which needs a kubelet
        return nullcontext(Volume(job.name, str(job.namespace), "claim", "/checkpoints", output))

    monkeypatch.setattr(reader_pod, "PodReader", reader)
    monkeypatch.chdir(tmp_path)
    with ScriptedApi(tmp_path, lambda *_: None) as api:
        monkeypatch.setenv("KUBECONFIG", str(api.kubeconfig))
        assert main(["plot", "mnist", "--context", "test"]) == 0
        assert capsys.readouterr().out.startswith("mnist Running (cluster ")
        assert main(["report", "mnist", "--context", "test"]) == 0
        assert "Loss and throughput" in (tmp_path / "mnist.html").read_text()
    assert readers == ["mnist", "mnist"]
