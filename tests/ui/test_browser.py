"""The pages of ``ddpjob ui`` in Chromium."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cli.program import Program, shell_job, with_volume
from tests.kind.command import CommandError
from tests.kind.packages import require
from tests.prepared import skip_unless_ci
from tests.processes import eventually
from tests.ui.browser import Browser
from tests.ui.conftest import served
from tests.ui.test_pages import TRAINING


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    try:
        require("chromium")
    except CommandError as error:
        skip_unless_ci(error)
    with Browser() as made:
        yield made


def test_a_page_is_kept_current_and_says_when_the_server_is_away(ddpjob: Program, browser: Browser) -> None:
    (ddpjob.folder / "train.py").write_text(TRAINING)
    spec = {"numNodes": 1, "nprocPerNode": 2, "command": ["ddprun", "train.py"], **with_volume()}
    assert ddpjob("submit", ddpjob.write(shell_job("tiny", "", **spec)), "--local").code == 0
    with served(ddpjob) as pages:
        browser.open(f"http://127.0.0.1:{pages.port}{pages.root}")
        browser.shows("default/tiny")
        assert browser.value("document.querySelector('#jobs a').click()") is None
        browser.shows("RestartedInPlace")
        browser.shows("late by")
        browser.value("document.querySelector('details').open = true; document.querySelector('summary').focus()")
        for width, dark in ((400, False), (1100, True), (2560, False)):
            browser.looks(width=width, dark=dark)
            eventually(
                "nothing is wider than the window",
                lambda width=width: browser.value("document.documentElement.scrollWidth") <= width,  # type: ignore[misc]
            )
            assert browser.faults() == [], (width, dark)
        assert browser.value("document.querySelector('details').open"), "what was opened stays open"
        (ddpjob.state / "volumes" / "default" / "tiny-checkpoints" / "end").touch()
        browser.shows("Succeeded")
        browser.open(f"http://127.0.0.1:{pages.port}{pages.root}?q=tiny")
        assert browser.faults() == []
        assert browser.errors == [], "the policy allows all that the page does"
    browser.shows("ddpjob ui does not answer")
