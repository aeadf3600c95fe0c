"""`wait`, `suspend`, `resume` and `restart` on jobs of this machine, and where a command acts."""

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from ddpjob.cli.logs import print_lines
from ddpjob.cli.place import Where, find
from ddpjob.client.job import DDPJob
from ddpjob.client.log_lines import LogLine
from ddpjob.errors import DDPJobError, InvalidJobError, JobNotFoundError
from tests.cli.program import Program, shell_job, with_volume

# Saves on SIGTERM, and ends with what stands in the file `code` of its volume.
SCRIPT = """
trap 'exit 75' TERM
echo up
until [ -s $DDPJOB_CHECKPOINT_DIR/code ]; do sleep 0.02; done
exit $(cat $DDPJOB_CHECKPOINT_DIR/code)
"""


@pytest.mark.parametrize(
    ("is_terminal", "printed"),
    [(False, "first\n  0%|\n 50%|#\n100%|##\nlast\n"),
     (True, "first\n  0%|\x1b[K\r 50%|#\x1b[K\r100%|##\x1b[K\nlast\n")],
)  # fmt: skip
def test_a_progress_bar_is_drawn_again_on_a_terminal_and_is_lines_elsewhere(
    is_terminal: bool, printed: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    monkeypatch.setenv("NO_COLOR", "1")
    bar = [LogLine(0, 0, 1, "  0%|", unfinished=True), LogLine(0, 0, 1, " 50%|#", unfinished=True)]
    whole = LogLine(0, 0, 1, "\r  0%|\r 50%|#\r100%|##")
    lines = [LogLine(0, 0, 1, "first"), *bar, whole, LogLine(0, 0, 1, "last")]
    print_lines(DDPJob("tiny", image="none"), lines, flush=False)
    assert capsys.readouterr().out == printed


def test_a_job_is_suspended_resumed_and_restarted_and_wait_tells_its_end(ddpjob: Program) -> None:
    job = shell_job("tiny", SCRIPT, restartPolicy={"maxRestarts": 0}, **with_volume())
    with ddpjob.started("run", ddpjob.write(job), "-o", "json") as run:
        ddpjob.until_log("tiny", "up")
        assert ddpjob("wait", "tiny", "--for", "running", "--timeout", "60").out == "tiny is Running (this machine)\n"
        with ddpjob.started("logs", "tiny", "-f", "-o", "json") as lines:
            assert lines.stdout is not None and json.loads(lines.stdout.readline())["line"] == "up", "at once"
        assert ddpjob("suspend", "tiny").out == "tiny suspended (this machine)\n"
        assert run.wait(60) == 143
    assert ddpjob("wait", "tiny").code == 102
    assert ddpjob("resume", "tiny").code == 0
    assert ddpjob("wait", "tiny", "--for", "running", "--timeout", "60").code == 0
    assert ddpjob("restart", "tiny").out == "tiny restarted (this machine)\n"
    done = ddpjob("wait", "tiny", "--timeout", "0.1")
    assert done.code == 101
    assert "after 0.1 s" in done.err
    with ddpjob.started("get", "tiny", "--watch") as rows, ddpjob.started("get", "-w", "-o", "json") as objects:
        assert rows.stdout is not None and objects.stdout is not None
        assert next(rows.stdout).startswith("NAME ") and next(rows.stdout).startswith("tiny  Running ")
        assert json.loads(next(objects.stdout))["status"]["state"] == "Running"
        (ddpjob.state / "volumes" / "default" / "tiny-checkpoints" / "code").write_text("3")
        assert ddpjob("wait", "tiny", "--timeout", "60").code == 100
        assert rows.communicate(timeout=60)[0].splitlines()[-1].startswith("tiny  Failed ")
        assert rows.returncode == 0, "the job has finished"
        assert any(json.loads(line)["status"]["state"] == "Failed" for line in objects.stdout)
        assert objects.poll() is None, "it goes on"
    status = ddpjob.job("tiny")["status"]
    assert (status["attempt"], status["restarts"]) == (3, 0)
    assert "has finished" in ddpjob("resume", "tiny").is_refused()[0]
    ddpjob("delete", "tiny")
    assert ddpjob("wait", "tiny").code == 103


JOBS = ("one", "two", "three")


def test_several_jobs_are_changed_by_name_or_label_and_what_failed_is_summed_up(ddpjob: Program) -> None:
    for name, team in zip(JOBS, "aab", strict=True):
        job = shell_job(name, "true", suspend=name != "two")
        job["metadata"]["labels"] = {"team": team}
        assert ddpjob("submit", ddpjob.write(job), "--local", "--wait").code in (0, 102)
    assert ddpjob("get", "-l", "team=a", "-o", "name").out.split() == ["ddpjob.ddpjob.dev/one", "ddpjob.ddpjob.dev/two"]
    some = ddpjob("suspend", "one", "two", "three", "one")
    assert (some.code, some.out) == (1, "one suspended (this machine)\nthree suspended (this machine)\n")
    first, *_, last = some.err.splitlines()
    assert (first, last) == ("error: the job two has finished: it succeeded", "2 of 3 jobs suspended; not two")
    assert ddpjob("suspend", "-l", "team=a").out == "one suspended (this machine)\n", "the other has finished"
    for wrong in ((), ("one", "-l", "team=a"), ("-l", " ")):
        assert "name the jobs, or select them" in ddpjob("delete", *wrong).is_refused()[0]
    assert "no job has the labels team=c" in ddpjob("delete", "-l", "team=c").is_refused()[0]
    assert ddpjob("delete", "-l", "team=a").out.count(" deleted (this machine)\n") == 2
    assert ddpjob("get", "-o", "name").out.split() == ["ddpjob.ddpjob.dev/three"]
    assert ddpjob("delete", "missing", "three").code == 1
    assert ddpjob("get", "-o", "name").out == ""


def test_jobs_of_one_name_in_two_namespaces_are_changed_by_label(ddpjob: Program) -> None:
    for namespace in ("a", "b"):
        job = shell_job("tiny", "true", suspend=True)
        job["metadata"] |= {"labels": {"team": "x"}, "namespace": namespace}
        assert ddpjob("submit", ddpjob.write(job), "--local", "--wait").code == 102
    job["metadata"] |= {"name": "other"}
    assert ddpjob("submit", ddpjob.write(job), "--local", "--wait").code == 102
    some = ddpjob("suspend", "tiny", "missing", "other")
    assert (some.code, some.out) == (1, "other suspended (this machine)\n"), some
    named = [line for line in some.err.splitlines() if line.startswith("error: ")]
    assert ["there are 2 jobs named tiny" in named[0], "no job missing" in named[1]] == [True, True]
    assert some.err.splitlines()[-1] == "1 of 3 jobs suspended; not tiny, missing"
    done = ddpjob("suspend", "-l", "team=x")
    assert (done.code, done.out.split(" suspended (this machine)\n")[:-1]) == (0, ["a/tiny", "other", "b/tiny"]), done
    assert ddpjob("delete", "-l", "team=x").code == 0
    assert ddpjob("get", "-o", "name").out == ""


def test_a_cluster_that_does_not_answer_is_not_asked_for_each_of_many_jobs(ddpjob: Program, tmp_path: Path) -> None:
    asked: list[str] = []

    class Refuses(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_error(401)

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Refuses) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        cluster = {"cluster": {"server": f"http://127.0.0.1:{server.server_port}"}, "name": "c"}
        config = {"clusters": [cluster], "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}]}
        config |= {"users": [{"name": "u", "user": {"token": "t"}}], "current-context": "x"}
        path = tmp_path / "kubeconfig"
        path.write_text(json.dumps({"apiVersion": "v1", "kind": "Config"} | config))
        names = [f"job-{number}" for number in range(60)]
        done = ddpjob("suspend", *names, env={"KUBECONFIG": str(path)})
        server.shutdown()
    assert (done.code, done.out) == (1, "")
    assert 0 < len({path.rpartition("/")[2] for path in asked}) < len(names), "each try takes 30 s"
    assert done.err.splitlines()[-1] == f"0 of 60 jobs suspended; not {', '.join(names)}"


def test_logs_as_json_have_what_a_terminal_shows(ddpjob: Program) -> None:
    bar = r"printf '  1/9\r  5/9\r\033[32m  9/9\033[0m\nend\n'"
    assert ddpjob("submit", ddpjob.write(shell_job("tiny", bar)), "--local", "--wait").code == 0
    assert [line["line"] for line in ddpjob("logs", "tiny", "-o", "json").objects] == ["  9/9", "end"]
    assert ddpjob("logs", "tiny").out == "  9/9\nend\n"


def test_a_job_that_is_not_known_here_is_looked_for_on_the_cluster_of_the_kubeconfig(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DDPJOB_STATE_DIR", str(tmp_path))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    with pytest.raises(JobNotFoundError):
        find("mnist", Where())
    cluster = {"name": "c", "cluster": {"server": "https://198.18.0.1:6443"}}
    context = {"name": "c", "context": {"cluster": "c", "user": "u", "namespace": "team-a"}}
    (tmp_path / "config").write_text(
        f"{{apiVersion: v1, kind: Config, current-context: c, users: [{{name: u, user: {{}}}}], "
        f"clusters: [{cluster}], contexts: [{context}]}}"
    )
    for state in (tmp_path, tmp_path / "config"):  # a file is no reason not to ask the cluster
        monkeypatch.setenv("DDPJOB_STATE_DIR", str(state))
        found = find("mnist", Where())
        assert found.place == "cluster https://198.18.0.1:6443, namespace team-a"
    monkeypatch.setenv("DDPJOB_STATE_DIR", str(tmp_path))
    with pytest.raises(JobNotFoundError):
        find("mnist", Where(local=True))
    with pytest.raises(InvalidJobError, match="one place"):
        find("mnist", Where(local=True, context="c"))
    for space in ("a", "b"):
        record = tmp_path / "jobs" / space / "mnist" / "job.json"
        record.parent.mkdir(parents=True)
        record.write_text("{}")
    with pytest.raises(DDPJobError, match="2 jobs named mnist"):
        find("mnist", Where())


class Receiver(BaseHTTPRequestHandler):
    """Keeps the messages that it is sent."""

    messages: ClassVar[list[dict[str, str]]] = []

    def do_POST(self) -> None:
        self.messages.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(200)
        self.end_headers()

    def log_request(self, *_: object) -> None:
        """Print nothing."""


def test_a_message_tells_the_end_of_a_wait(ddpjob: Program) -> None:
    job = shell_job("tiny", "echo 'ValueError: sample 17'; exit 3", restartPolicy={"maxRestarts": 0})
    assert ddpjob("run", ddpjob.write(job), "-o", "json").code == 1
    with ThreadingHTTPServer(("127.0.0.1", 0), Receiver) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        (ddpjob.folder / "addresses").write_text(f"# mine\njson://user:secret@127.0.0.1:{server.server_port}/\n")
        done = ddpjob("wait", "tiny", "--notify", "addresses")
        server.shutdown()
    assert (done.code, done.err) == (100, "")
    [message] = Receiver.messages
    assert (message["title"], message["type"]) == ("tiny is Failed", "failure")
    assert "exit code 3" in message["message"] and " next: ddpjob logs tiny" in message["message"]
    away = ddpjob("wait", "tiny", "--notify", f"json://user:secret@127.0.0.1:{server.server_port}/")
    assert away.code == 100, "the exit code is that of the job"
    assert "not delivered" in away.err and "secret" not in away.err
    for wrong in ("nothing://user:secret@a", "missing-file"):
        refused = ddpjob("wait", "tiny", "--notify", wrong).is_refused()
        assert "--notify" in refused[0] and "secret" not in "".join(refused)
