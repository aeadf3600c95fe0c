"""Debian's Chromium without a window, controlled by the DevTools protocol over a pair of pipes.

Messages are JSON objects that end with a null byte (``--remote-debugging-pipe``), so neither a port nor another
package is needed. What the protocol evaluates in a page is not subject to the page's Content-Security-Policy.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.processes import die_with_parent

TIMEOUT = 120.0  # seconds; only a hang takes that long
_OPTIONS = (
    "--headless", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
    "--hide-scrollbars", "--no-first-run", "--disable-background-networking", "--disable-component-update",
)  # fmt: skip


class Browser:
    """One page of a running browser.

    Attributes:
        events: what the browser reported since the last ``open``: requests, messages of the console, log entries.
    """

    def __init__(self, process: subprocess.Popen[bytes], commands: int, answers: int) -> None:
        self._process, self._commands, self._answers = process, commands, answers
        self._buffer, self._number, self._session = b"", 0, ""
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def open(self, page: Path, *, width: int = 1100, height: int = 800, dark: bool = False) -> None:
        """Load the file in a window of that size, in pixels, and wait until everything in it is loaded."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.events = []
        self.call("Page.navigate", url=page.resolve().as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self._read(time.monotonic() + TIMEOUT)

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression, through JSON."""
        answer = self.call("Runtime.evaluate", expression=f"JSON.stringify({expression})")
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return json.loads(answer["result"]["value"])

    def requests(self) -> list[str]:
        """Return the address of everything that the page asked for, apart from data in the page itself."""
        found = (e["params"]["request"]["url"] for e in self.events if e["method"] == "Network.requestWillBeSent")
        return [url for url in found if not url.startswith("data:")]

    def complaints(self) -> list[str]:
        """Return the errors and warnings that the page caused, and what it wrote to the console."""
        texts = [event["params"]["entry"]["text"] for event in self.events if event["method"] == "Log.entryAdded"]
        kinds = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown")
        return texts + [json.dumps(event["params"]) for event in self.events if event["method"] in kinds]

    def screenshot(self, *, height: int | None = None) -> bytes:
        """Return a PNG image of the whole page, or of its first ``height`` pixels."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": height or size["height"], "scale": 1}
        answer = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        return base64.b64decode(answer["data"])

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and return its result."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        rest = memoryview(json.dumps(message).encode() + b"\0")
        while rest:
            rest = rest[os.write(self._commands, rest) :]
        end = time.monotonic() + TIMEOUT
        while (answer := self._read(end)).get("id") != self._number:
            pass
        assert "error" not in answer, f"{method}: {answer['error']}"
        result: dict[str, Any] = answer["result"]
        return result

    def _read(self, end: float) -> dict[str, Any]:
        """Return the next message; an event is recorded, too."""
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._answers], [], [], max(0.0, end - time.monotonic()))
            assert ready, "timed out waiting for the browser"
            part = os.read(self._answers, 2**16)
            assert part, f"the browser ended with code {self._process.wait(10)}"
            self._buffer += part
        text, self._buffer = self._buffer.split(b"\0", 1)
        message: dict[str, Any] = json.loads(text)
        if "method" in message:
            self.events.append(message)
        return message


def program() -> str | None:
    """Return the path of the browser, or None if it is not installed."""
    return shutil.which("chromium")


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    """Start the browser with a profile of its own, and end it with the context."""
    path = program()
    assert path is not None
    their_commands, our_commands = os.pipe()
    our_answers, their_answers = os.pipe()
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as profile:
        # The protocol's descriptors are 3 and 4.
        shell = f'exec "$0" "$@" 3<&{their_commands} 4>&{their_answers}'
        process = subprocess.Popen(
            ["bash", "-c", shell, path, *_OPTIONS, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(their_commands, their_answers),
            stderr=subprocess.DEVNULL,
            env={**os.environ, "HOME": profile},
            preexec_fn=die_with_parent,  # noqa: PLW1509
        )
        for descriptor in (their_commands, their_answers):
            os.close(descriptor)
        try:
            yield Browser(process, our_commands, our_answers)
        finally:
            process.kill()
            process.wait(30)
            for descriptor in (our_commands, our_answers):
                os.close(descriptor)
