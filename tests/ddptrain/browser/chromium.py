"""Debian's Chromium without a window: what a page looks like, and what it computes, by one command each."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

TIMEOUT = 120  # seconds; only a hang takes that long
_OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars", "--no-first-run",
    "--disable-background-networking", "--disable-component-update",
)  # fmt: skip
_POLICY = re.compile(r'<meta http-equiv="Content-Security-Policy"[^>]*>')


def program() -> str | None:
    """Return the path of the browser, or None if it is not installed."""
    return shutil.which("chromium")


def run(page: Path, *options: str, height: int = 800) -> str:
    """Load the page in a window of that height, in pixels, and return what the browser prints."""
    path = program()
    assert path is not None
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as profile:
        window = (f"--user-data-dir={profile}", f"--window-size=1100,{height}")
        command = [path, *_OPTIONS, *window, *options, page.resolve().as_uri()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=True)
    return done.stdout


def evaluate(page: Path, expression: str) -> Any:
    """Return the value of a JavaScript expression in a copy of the page without its policy, which refuses scripts."""
    script = f"<script>document.documentElement.dataset.found = JSON.stringify({expression})</script>"
    text = _POLICY.sub("", page.read_text())
    assert text != page.read_text(), "the page has a policy"
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "page.html"
        copy.write_text(text + script)
        found = re.search(r'data-found="([^"]*)"', run(copy, "--dump-dom"))
    assert found is not None
    return json.loads(html.unescape(found[1]))
