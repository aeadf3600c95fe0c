"""The pages of ``ddpjob ui`` about jobs of this machine."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack

from ddpjob.api.objects import Json
from tests.cli.program import Program, shell_job, with_volume
from tests.processes import eventually
from tests.ui.conftest import Pages, pages_of, served

HOSTILE = "<script>alert(1)</script>\u202etxt.exe\x1b[31m"
SCRIPT = """
trap 'exit 75' TERM
echo up
until [ -s $DDPJOB_CHECKPOINT_DIR/code ]; do sleep 0.02; done
echo "failing $DDPJOB_ATTEMPT" >&2
exit $(cat $DDPJOB_CHECKPOINT_DIR/code)
"""


def a_job(**spec: object) -> Json:
    return shell_job("tiny", SCRIPT, restartPolicy={"maxRestarts": 0}, **with_volume(**spec))


def test_only_a_browser_of_this_machine_that_has_the_token_reads_and_changes(ddpjob: Program) -> None:
    with ddpjob.started("run", ddpjob.write(a_job()), "-o", "json"), served(ddpjob) as pages:
        ddpjob.until_log("tiny", "up")
        eventually("the job is known", lambda: pages("jobs/default/tiny").status == 200)
        assert pages().status == 200
        assert pages(Host=f"localhost:{pages.port}").status == 200
        assert pages(Host=f"evil.example:{pages.port}").status == 421
        for wrong in ("/", "/jobs/default/tiny", "/x" + pages.root, pages.root[:-2] + "/", "/live.js"):
            assert pages(whole=wrong).status == 404, wrong
        suspend = "jobs/default/tiny/suspend"
        own = f"http://127.0.0.1:{pages.port}"
        assert pages(suspend, method="POST").status == 403
        assert pages(suspend, method="POST", Origin="http://evil.example").status == 403
        assert pages(suspend, method="POST", Origin="null").status == 403
        assert pages(suspend, method="POST", Origin=own, Sec_Fetch_Site="cross-site").status == 403
        assert pages(suspend, method="DELETE", Origin=own).status == 405
        assert ddpjob.job("tiny")["status"]["state"] == "Running"
        page = pages("jobs/default/tiny")
        assert page.headers["cache-control"] == "no-store"
        # Not no-referrer: the Origin of a form would be null then, and each button be refused.
        assert page.headers["referrer-policy"] == "same-origin"
        policy = page.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy and "frame-ancestors 'none'" in policy
        assert not re.search(r"\sstyle=|\son\w+=|https?://", page.text), "the policy allows none, and no other host"


def test_a_job_is_shown_while_it_runs_and_changes_by_a_confirmed_command(ddpjob: Program) -> None:
    with ddpjob.started("run", ddpjob.write(a_job()), "-o", "json") as run, served(ddpjob) as pages:
        ddpjob.until_log("tiny", "up")
        eventually("the job is listed", lambda: f'href="{pages.root}jobs/default/tiny"' in pages().text)
        with pages.stream("jobs/default/tiny/stream") as events, pages.stream("stream?q=tiny") as fleets:
            asked = pages("jobs/default/tiny/suspend")
            assert asked.status == 200 and "ddpjob suspend tiny" in asked.text and 'method="post"' in asked.text
            origin = f"http://127.0.0.1:{pages.port}"
            done = pages("jobs/default/tiny/suspend", method="POST", Origin=origin)
            assert (done.status, done.headers["location"]) == (303, pages.root + "jobs/default/tiny")
            assert run.wait(60) == 143
            until(events, "Suspended")
            until(fleets, "Suspended")

        def buttons() -> list[str]:
            return re.findall(r'class="button" href="[^"]*/(\w+)\?uid=', pages("jobs/default/tiny").text)

        eventually("it has the command that makes sense now", lambda: buttons() == ["resume"])
        refused = pages("jobs/default/tiny/stacks", method="POST", Origin=origin)
        assert refused.status == 200 and "no rank of tiny runs" in refused.text


def test_a_failure_is_told_with_its_log_and_hostile_text_stays_text(ddpjob: Program) -> None:
    job = shell_job("tiny", f"printf '%s\\n' '{HOSTILE}'; exit 3", restartPolicy={"maxRestarts": 0})
    job["metadata"]["labels"] = {"team": "a"}
    assert ddpjob("run", ddpjob.write(job), "-o", "json").code == 1
    with served(ddpjob, "--read-only") as pages:
        page = pages("jobs/default/tiny").text
        assert "<script>alert" not in page and "&lt;script&gt;alert(1)" in page
        assert "\u202e" not in page and "\x1b" not in page
        assert 'id="verdict" class="bad"' in page and "exit code 3" in page
        assert 'class="button"' not in page, "read only"
        assert pages("jobs/default/tiny/suspend").status == 404
        assert pages("jobs/default/other").status == 404
        log = pages("jobs/default/tiny/log?rank=0")
        assert log.headers["content-type"].startswith("text/plain") and "alert(1)" in log.text
        assert 'aria-current="true"' in pages("?group=needs+a+person").text
        assert "No job matches" in pages("?q=nothing").text


def test_without_jobs_the_page_says_how_to_begin_and_a_state_that_is_away_is_said(ddpjob: Program) -> None:
    with served(ddpjob) as pages:
        assert "No jobs on this machine" in pages().text and "ddpjob run FILE" in pages().text
        spoil(ddpjob, "odd")
        eventually("the damaged record is said", lambda: 'class="trouble"' in pages().text)
    assert ddpjob("run", ddpjob.write(shell_job("tiny", "echo up")), "-o", "json").code == 0
    with served(ddpjob) as pages:
        eventually("the other job is shown, too", lambda: "/jobs/default/tiny" in pages().text)
        eventually("the damaged record is said", lambda: 'class="trouble"' in pages().text)


def spoil(ddpjob: Program, name: str) -> None:
    folder = ddpjob.state / "jobs" / "default" / name
    folder.mkdir(parents=True)
    (folder / "job.json").write_text("{")


def test_a_job_that_is_deleted_or_replaced_is_not_taken_for_the_one_that_was_shown(ddpjob: Program) -> None:
    job, page = shell_job("tiny", "echo first; exec sleep 1000"), "jobs/default/tiny"
    with served(ddpjob, "--local") as pages, ddpjob.started("run", ddpjob.write(job), "-o", "json"):
        ddpjob.until_log("tiny", "first")
        eventually("the job is known", lambda: "/restart?uid=" in pages(page).text)
        [form] = re.findall(r'action="([^"]*)"', pages(page + "/restart").text)
        assert ddpjob("delete", "tiny", "-y").code == 0
        eventually("its end is said", lambda: "the job tiny was deleted" in pages(page).text)
        assert 'class="button"' not in pages(page).text
        job["spec"]["command"][-1] = "echo second; exec sleep 1000"
        with ddpjob.started("run", ddpjob.write(job), "-o", "json"):
            ddpjob.until_log("tiny", "second")
            eventually("the other job is shown", lambda: "second" in pages(page).text)
            text = pages(page).text
            assert "was deleted" not in text and "first" not in text
            origin = f"http://127.0.0.1:{pages.port}"
            assert pages(whole=form).status == pages(whole=form, method="POST", Origin=origin).status == 409
            assert ddpjob.job("tiny")["status"]["state"] == "Running"


def test_the_command_says_what_is_missing_and_which_port_is_taken(ddpjob: Program) -> None:
    source = "import sys; sys.modules['uvicorn'] = None; from ddpjob.cli.main import main; sys.exit(main(['ui']))"
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[-1] == "next:  pip install 'ddpjob[ui]'"
    with served(ddpjob) as pages:
        assert f"port {pages.port} of 127.0.0.1" in ddpjob("ui", "--port", str(pages.port)).is_refused()[0]
    assert "no job missing" in ddpjob("ui", "missing").is_refused()[0]


def test_a_log_is_followed_until_its_viewer_goes_also_if_nothing_is_printed(ddpjob: Program) -> None:
    with ddpjob.started("run", ddpjob.write(a_job()), "-o", "json"):
        ddpjob.until_log("tiny", "up")
        with ddpjob.started("ui", "--local", "--no-browser") as process:
            pages = pages_of(process)
            log = "jobs/default/tiny/log?rank="
            eventually("the job is known", lambda: pages("jobs/default/tiny").status == 200)
            for wrong in ("1", "-1", "%C2%B2", "9" * 5000, ""):
                assert pages(log + wrong).status == 404, wrong
            with ExitStack() as followed:
                for _ in range(16):
                    assert followed.enter_context(pages.lines(log + "0")).readline() == b"up\n"
                assert pages(log + "0").status == 503
            with pages.lines("stream"):
                eventually("they have ended", lambda: first_line(pages, log + "0") == b"up\n")
                process.send_signal(signal.SIGINT)
                assert process.stderr is not None
                assert process.stderr.read() == "Ctrl-C ends it.\n" and process.wait(60) == 130


def first_line(pages: Pages, path: str) -> bytes:
    with pages.lines(path) as answer:
        return answer.readline() if answer.status == 200 else b""


TRAINING = """
import os, pathlib, time, ddprun
end, failed = (pathlib.Path(os.environ["DDPJOB_CHECKPOINT_DIR"], name) for name in ("end", "failed"))
for step in range(1, 10_000):
    time.sleep(0.02)
    ddprun.report(step=step, loss=1 / step)
    if step == 100 and os.environ["RANK"] == "1" and not failed.exists():
        failed.touch()
        raise ValueError("sample 17 is bad")
    if end.exists():
        break
"""


def test_a_training_is_followed_through_a_failure_by_ten_viewers(ddpjob: Program) -> None:
    (ddpjob.folder / "train.py").write_text(TRAINING)
    spec = {"numNodes": 1, "nprocPerNode": 2, "command": ["ddprun", "train.py"]}
    job = shell_job("tiny", "", **spec, **with_volume())
    assert ddpjob("submit", ddpjob.write(job), "--local").code == 0
    with ExitStack() as stack:
        pages = stack.enter_context(served(ddpjob))
        eventually("the job is known", lambda: pages("jobs/default/tiny").status == 200)
        first, *others = (stack.enter_context(pages.stream("jobs/default/tiny/stream")) for _ in range(10))
        seen = until(first, 'id="ranks"')
        assert 'src="data:image/png;base64,' in seen and "/log?rank=1" in seen
        until(first, "sample 17 is bad")
        until(first, "RestartedInPlace")
        (ddpjob.state / "volumes" / "default" / "tiny-checkpoints" / "end").touch()
        for events in (first, *others):
            last = until(events, ">Succeeded<")
            assert 'class="curves"' in last and 'class="failure"' in last


def until(events: Iterator[str], text: str) -> str:
    """Return the first page of a stream that has this text."""
    end = time.monotonic() + 120
    for event in events:
        page: str = json.loads(event)
        if text in page:
            return page
        assert time.monotonic() < end, f"no page with {text!r}"
    raise AssertionError("the stream has ended")
