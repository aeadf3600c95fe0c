"""The pages of a training that was killed and resumed, in Chromium: layout, requests, colours, hostile texts."""

from __future__ import annotations

import html
import re
from dataclasses import replace
from pathlib import Path

import pytest

from ddpjob.api.time_spent import TIME_CATEGORIES
from ddpplot.history import Failure
from ddpplot.job import Job
from ddpplot.page import Page, as_html
from ddpplot.recorded import read_history
from ddprun.reporting.metrics import FOLDER
from tests.ddptrain.browser.chromium import evaluate, run
from tests.ddptrain.runs import ForkServer
from tests.kind.packages import MissingProgramsError, require
from tests.prepared import skip_unless_ci

# A directory's name can hold everything but a slash.
HOSTILE = "<img src=x onerror=alert(1)><script>alert(2)"
# Name to selector of what must be visible.
PARTS = {
    "curves": "#curves svg.curves",
    "loss": "path.line.loss",
    "accuracy": "path.line.accuracy",
    "throughput": "path.line.speed",
    "restart": ".flag rect",
    "repeated steps": "rect.band",
    "runs": "table.runs",
    "failure": ".failure path",
    "bar": ".bar.failed",
    "advice": "tr.why .muted",
    "time": ".ledger i",
    "goodput": ".formula",
}
_VISIBLE = """(selectors => Object.fromEntries(Object.entries(selectors).map(([name, selector]) => [name,
  [...document.querySelectorAll(selector)].map(e => e.getBoundingClientRect()).filter(r => r.width > 1 && r.height > 1)
  .map(r => [r.left, r.right])])))"""
_FACTS = """width: document.documentElement.scrollWidth, scripts: document.scripts.length,
  heading: document.querySelector('h1').innerText, background: getComputedStyle(document.body).backgroundColor"""


@pytest.fixture(scope="module")
def chromium() -> None:
    try:
        require("chromium", install=False)
    except MissingProgramsError as error:
        skip_unless_ci(error)


@pytest.fixture
def page(ddptrain: ForkServer, tmp_path: Path) -> Path:
    """Return the page of a training on digits that lost a rank in step 60 and resumed from step 40.

    The status of its job has long texts.
    """
    root, out = tmp_path / HOSTILE, tmp_path / "job.html"
    faulty = ("--chaos", "kill:1:60", "--max-restarts", 1, "--checkpoint-every", 20)
    ddptrain.run("launch", "--nproc-per-node", 2, "--data", "digits", "--epochs", 2, *faulty, "--checkpoint-dir", root)
    for metrics in (root / FOLDER).iterdir():
        metrics.write_text(metrics.read_text().replace('"digits"', '"</title><script>alert(3)</script>"'))
    history = read_history(root)
    failure = Failure(HOSTILE * 20, step=60, hint="x" * 400, next_step=HOSTILE)
    first = replace(history.runs[0], cause=failure.message, failure=failure, reached=60, repeated=20)
    history = replace(history, runs=[first, *history.runs[1:]])
    time = dict.fromkeys(TIME_CATEGORIES, 7)
    job = Job("a" * 60, place=HOSTILE, state="Failed", nodes=2, restarts=1, in_place=1, time=time, goodput=0.2)
    out.write_text(as_html(Page(HOSTILE, "ddpjob 0.1.0", history, job)))
    return out


@pytest.mark.soak
def test_the_page_of_a_restarted_training_in_light_dark_and_narrow(chromium: None, page: Path) -> None:
    backgrounds = set()
    for width, dark in ((1100, False), (1100, True), (500, False)):
        found = evaluate(page, f"{{parts: {_VISIBLE}({PARTS}), {_FACTS}}}", width=width, dark=dark)
        for name, boxes in found["parts"].items():
            assert boxes, f"{name} is not visible at {width} pixels"
            if name not in ("runs", "bar"):  # which scroll by themselves
                assert all(left >= 0 and right <= width for left, right in boxes), f"{name} is cut at {width} pixels"
        assert found["width"] == width
        assert found["heading"].startswith(HOSTILE)
        assert found["scripts"] == 1, "that of this test"
        backgrounds.add(found["background"])
    assert len(backgrounds) == 2, "dark is not light"


@pytest.mark.soak
def test_policy_of_the_page_refuses_scripts_and_requests(chromium: None, page: Path) -> None:
    text = page.read_text()
    assert "default-src 'none'" in text
    page.write_text(text.replace("</main>", "</main><script>document.title = 'ran'</script>"))
    title = re.search("<title>(.*?)</title>", run(page, "--dump-dom"), re.DOTALL)
    assert title is not None and html.unescape(title[1]) == f"{HOSTILE} · ddpjob"
