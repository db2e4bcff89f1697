"""Control a headless Chromium over the WebDriver protocol (https://www.w3.org/TR/webdriver2/), and
read and operate a report that is open in it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("chrome")
DRIVER = shutil.which("chromedriver")
FLAGS = (
    "--headless",
    "--no-sandbox",  # tests often run as root in a container, where Chromium refuses its sandbox
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    # Every request to a host fails, which exposes a page that needs the network.
    "--host-resolver-rules=MAP * ~NOTFOUND",
)
NEEDS_BROWSER = pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None,
    reason="needs Chromium and its driver (Debian: apt-get install chromium chromium-driver)",
)


class Browser:
    """A browser window, used as a context manager."""

    def __enter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self._log = Path(self._folder.name, "driver.log").open("wb")
        self._process = subprocess.Popen(
            [str(DRIVER), "--port=0"],
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**os.environ, "HOME": self._folder.name},
        )
        self._base = f"http://127.0.0.1:{self._read_port()}"
        options = {
            "binary": CHROMIUM,
            "args": [
                *FLAGS,
                f"--user-data-dir={self._folder.name}/profile",
                "--window-size=1300,1000",
            ],
        }
        capabilities = {
            "browserName": "chrome",
            "goog:chromeOptions": options,
            "goog:loggingPrefs": {"browser": "ALL"},
        }
        answer = self._call("POST", "/session", {"capabilities": {"alwaysMatch": capabilities}})
        self._base += f"/session/{answer['sessionId']}"
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(urllib.error.URLError):  # the driver may have exited
            self._call("DELETE", "")
        self._process.terminate()
        self._process.wait(10)
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._log.close()
        self._folder.cleanup()

    def open(self, path: Path) -> None:
        self._call("POST", "/url", {"url": path.resolve().as_uri()})

    def run(self, script: str, *arguments: Any) -> Any:
        """Run a script, in which ``arguments`` are the given ones, and return its value."""
        return self._call("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def resize(self, width: int, height: int) -> None:
        """Set the size of the viewport, which may be smaller than the smallest window."""
        self.devtools(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": height, "deviceScaleFactor": 2, "mobile": True},
        )

    def prefer(self, scheme: str) -> None:
        """Set ``prefers-color-scheme`` to "light" or "dark"."""
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.devtools("Emulation.setEmulatedMedia", {"features": [feature]})

    def press(self, key: str) -> None:
        """Press and release a key, such as ``ArrowRight``, in the focused element."""
        for kind in ("rawKeyDown", "keyUp"):
            event = {"type": kind, "key": key, "code": key, "windowsVirtualKeyCode": _CODES[key]}
            self.devtools("Input.dispatchKeyEvent", event)

    def devtools(self, command: str, parameters: Mapping[str, Any]) -> Any:
        """Send a command of the DevTools protocol and return its result."""
        return self._call("POST", "/goog/cdp/execute", {"cmd": command, "params": dict(parameters)})

    def read_log(self) -> list[str]:
        """Return the console messages since the last call, such as errors."""
        return [entry["message"] for entry in self._call("POST", "/se/log", {"type": "browser"})]

    def _read_port(self) -> int:
        """Return the port that the driver announces in its first lines."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if b"started successfully on port" in line:
                return int(line.rstrip(b".\n").rpartition(b" ")[2])
        raise RuntimeError("chromedriver did not start")

    def _call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self._base + path, data, {"Content-Type": "application/json"}, method=method
        )
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # the driver is local
        try:
            with opener.open(request, timeout=60) as response:
                return json.load(response)["value"]
        except urllib.error.HTTPError as error:
            with error:
                raise RuntimeError(json.load(error)["value"]["message"]) from error


_CODES = {"ArrowLeft": 37, "ArrowRight": 39, "Enter": 13, "+": 187, "0": 48}


def wait_until(browser: Browser, condition: str, seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not browser.run(f"return Boolean({condition})"):
        if time.monotonic() > deadline:
            raise TimeoutError(f"still false after {seconds} s: {condition}")
        time.sleep(0.05)


def set_filter(browser: Browser, name: str, value: str) -> None:
    """Set a field of the filters and send its input event."""
    browser.run(
        "const field = document.querySelector(`#filters [name=${arguments[0]}]`);"
        "field.value = arguments[1];"
        "field.dispatchEvent(new Event('input', { bubbles: true }));",
        name,
        value,
    )


def get_entries(browser: Browser) -> list[dict]:
    return browser.run("return state.shown")


def get_position(browser: Browser) -> str:
    return browser.run("return document.getElementById('position').textContent")


def read_last_evaluation(run: Path) -> list[dict[str, Any]]:
    path = sorted((run / "evaluation").glob("step-*.jsonl"))[-1]
    return [json.loads(line) for line in path.read_text().splitlines()]


def get_chart(browser: Browser, title: str) -> int:
    """Scroll to the chart with this title until it is in sight, and return its number."""
    number = browser.run(
        "const chart = charts.find((c) => c.data.title === arguments[0]);"
        "chart.figure.scrollIntoView({ block: 'center' });"
        "chart.point(null);"
        "return chart.number;",
        title,
    )
    # The page learns of it in a later frame, and draws changes of charts in sight alone.
    wait_until(browser, f"charts[{number}].inSight")
    return number


def get_ticks(browser: Browser, chart: int, kind: str = "x") -> list[str]:
    """Return the labels of a chart's horizontal (x) or vertical (y) axis."""
    return browser.run(
        "return [...charts[arguments[0]].plot.querySelectorAll(`text.${arguments[1]}`)]"
        ".map((label) => label.textContent)",
        chart,
        kind,
    )


def drag(browser: Browser, chart: int, start: float, end: float) -> None:
    """Drag over a chart from one step to another with the mouse."""
    x1, x2, y = browser.run(
        "const [number, ...steps] = arguments, chart = charts[number];"
        "const box = chart.plot.getBoundingClientRect();"
        "const at = (step) => box.left + chart.scaleX.to(step) / SIZE.width * box.width;"
        "return [...steps.map(at), box.top + box.height / 2];",
        chart,
        start,
        end,
    )
    for kind, x in (("mousePressed", x1), ("mouseMoved", (x1 + x2) / 2), ("mouseReleased", x2)):
        event = {"type": kind, "x": x, "y": y, "button": "left", "buttons": 1, "clickCount": 1}
        browser.devtools("Input.dispatchMouseEvent", event)
