"""The pages of a training that was killed and resumed, in Chromium: layout, requests, colours, hostile texts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ddpjob.api.time_spent import TIME_CATEGORIES
from ddpplot.history import Failure
from ddpplot.job import Job
from ddpplot.page import Page, as_html
from ddpplot.recorded import read_history
from ddprun.reporting.metrics import FOLDER
from tests.ddptrain.browser.chromium import Browser, browser
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


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    try:
        require("chromium", install=False)
    except MissingProgramsError as error:
        skip_unless_ci(error)
    with browser() as started:
        yield started


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
def test_the_page_of_a_restarted_training_in_light_dark_and_narrow(chromium: Browser, page: Path) -> None:
    _assert_looks_right(chromium, page)
    _assert_pointer_shows_numbers(chromium, page)
    _assert_policy_refuses_scripts(chromium, page)


def _assert_looks_right(chromium: Browser, page: Path) -> None:
    backgrounds = set()
    for width, dark in ((1100, False), (1100, True), (390, False)):
        chromium.open(page, width=width, dark=dark)
        chromium.screenshot()  # paints everything
        assert chromium.requests() == [page.as_uri()], "nothing but the page itself is loaded"
        assert chromium.complaints() == []
        for name, boxes in chromium.evaluate(f"{_VISIBLE}({PARTS})").items():
            assert boxes, f"{name} is not visible at {width} pixels"
            if name not in ("runs", "bar"):  # which scroll by themselves
                assert all(left >= 0 and right <= width for left, right in boxes), f"{name} is cut at {width} pixels"
        assert chromium.evaluate("document.documentElement.scrollWidth") == width
        backgrounds.add(chromium.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert len(backgrounds) == 2, "dark is not light"
    assert chromium.evaluate("document.querySelector('h1').innerText").startswith(HOSTILE)
    assert chromium.evaluate("document.scripts.length") == 0


def _assert_pointer_shows_numbers(chromium: Browser, page: Path) -> None:
    chromium.open(page)
    left, top = chromium.evaluate(
        "(r => [r.left + r.width / 2, r.top + 50])(document.querySelectorAll('.hit')[30].getBoundingClientRect())"
    )
    shown = "[...document.querySelectorAll('.hit g')].filter(g => getComputedStyle(g).visibility === 'visible').length"
    assert chromium.evaluate(shown) == 0
    chromium.call("Input.dispatchMouseEvent", type="mouseMoved", x=left, y=top)
    assert chromium.evaluate(shown) == 1


def _assert_policy_refuses_scripts(chromium: Browser, page: Path) -> None:
    injected = "<script>document.title = 'ran'</script><img src=http://127.0.0.1:9/>"
    page.write_text(page.read_text().replace("</main>", f"</main>{injected}"))
    chromium.open(page)
    assert chromium.evaluate("document.title") == f"{HOSTILE} · ddpjob"
    assert len(chromium.complaints()) == 2, "script and image are refused by the page's policy"
