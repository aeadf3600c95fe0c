"""Chromium without a window, driven by the DevTools protocol. https://chromedevtools.github.io/devtools-protocol/"""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import tempfile
import urllib.request
from importlib.resources import files
from pathlib import Path
from typing import Any, Self

import websocket

from tests.processes import eventually

_OPTIONS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--remote-debugging-port=0",
    "--remote-allow-origins=*",
)  # fmt: skip
_AXE = (files("axe_core_python") / "axe.min.js").read_text()
_SECONDS = 120.0  # only a hang takes that long


class Browser:
    """One page. Use as a context manager.

    Attributes:
        errors: what the console has said, and scripts that failed.
    """

    def __init__(self) -> None:
        self.errors: list[str] = []
        self._numbers = itertools.count(1)

    def __enter__(self) -> Self:
        program = shutil.which("chromium")
        assert program is not None
        self._profile = tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True)
        place = Path(self._profile.name) / "DevToolsActivePort"
        words = [program, *_OPTIONS, f"--user-data-dir={self._profile.name}", "about:blank"]
        self._process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        eventually("Chromium listens", lambda: place.exists() and place.read_text().count("\n"), timeout=_SECONDS)
        port = place.read_text().split()[0]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=_SECONDS) as answer:
            page = next(one for one in json.load(answer) if one["type"] == "page")
        self._socket = websocket.create_connection(page["webSocketDebuggerUrl"], timeout=_SECONDS)
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        self._process.kill()
        self._process.wait()
        self._profile.cleanup()

    def call(self, method: str, **parameters: Any) -> Any:
        """Return the result of a method."""
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._socket.recv())
            if message.get("method") == "Log.entryAdded":
                self.errors.append(message["params"]["entry"]["text"])
            elif message.get("method") == "Runtime.exceptionThrown":
                self.errors.append(json.dumps(message["params"]["exceptionDetails"]))
            elif message.get("id") == number:
                assert "error" not in message, message
                return message["result"]

    def open(self, address: str) -> None:
        """Load a page."""
        self.call("Page.navigate", url=address)
        eventually("the page is loaded", lambda: self.value("document.readyState") == "complete", timeout=_SECONDS)

    def value(self, expression: str) -> Any:
        """Return the value of an expression, or of the promise that it is."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def shows(self, text: str) -> None:
        """Wait until the page has a text."""
        has_it = f"document.body?.innerText.includes({json.dumps(text)})"
        eventually(f"the page shows {text!r}", lambda: self.value(has_it), timeout=_SECONDS)

    def looks(self, *, width: int, dark: bool) -> None:
        """Set the width of the window in pixels, and the scheme of colours."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def faults(self) -> list[str]:
        """Return what axe-core finds by the rules of WCAG 2.1, levels A and AA."""
        self.value(f"{_AXE};0")
        tags = "{runOnly: ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa']}"
        shown = "r.violations.flatMap((v) => v.nodes.map((n) => v.id + ' ' + n.html))"
        found = self.value(f"axe.run(document, {tags}).then((r) => {shown})")
        return list(map(str, found))
