"""Control a headless Chromium over the WebDriver protocol (https://www.w3.org/TR/webdriver2/), and
read and operate a report that is open in it."""

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen
from typing import Any, Self

import pytest
from processes import wait_for

from vlm_grpo.utils.http_json import ServiceError, post_json

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("chrome")
DRIVER = shutil.which("chromedriver")
FLAGS = (
    "--no-sandbox",  # tests often run as root in a container, where Chromium refuses its sandbox
    *("--headless", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    # Every request to a host fails, which exposes a page that needs the network.
    "--host-resolver-rules=MAP * ~NOTFOUND",
)
NEEDS_BROWSER = pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None,
    reason="needs Chromium and its driver (Debian: apt-get install chromium chromium-driver)",
)


class Browser:
    """A browser window behind a session of its driver."""

    def __init__(self, address: str, capabilities: Mapping[str, Any]) -> None:
        self._base = address
        answer = self._call("/session", {"capabilities": {"alwaysMatch": capabilities}})
        self._base += f"/session/{answer['sessionId']}"

    def open(self, path: Path) -> Self:
        self._call("/url", {"url": path.resolve().as_uri()})
        return self

    def run(self, script: str, *arguments: Any) -> Any:
        """Run a script, in which ``arguments`` are the given ones, and return its value."""
        return self._call("/execute/sync", {"script": script, "args": list(arguments)})

    def get(self, expression: str, *arguments: Any) -> Any:
        """Return the value of an expression."""
        return self.run(f"return {expression}", *arguments)

    def count(self, selector: str) -> int:
        return self.get("document.querySelectorAll(arguments[0]).length", selector)

    def read(self, selector: str) -> list[str]:
        """Return the text of each element."""
        elements = "[...document.querySelectorAll(arguments[0])]"
        return self.get(f"{elements}.map((element) => element.textContent)", selector)

    def click(self, selector: str) -> None:
        self.run("document.querySelector(arguments[0]).click()", selector)

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
        return self._call("/goog/cdp/execute", {"cmd": command, "params": dict(parameters)})

    def read_log(self) -> list[str]:
        """Return the console messages since the last call, such as errors."""
        return [entry["message"] for entry in self._call("/se/log", {"type": "browser"})]

    def _call(self, path: str, body: Mapping[str, Any]) -> Any:
        return post_json(self._base + path, body, retries=0)["value"]


@contextlib.contextmanager
def open_browser() -> Iterator[Browser]:
    """Open a window of 1300 by 1000 pixels."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        arguments = [*FLAGS, f"--user-data-dir={folder}/profile", "--window-size=1300,1000"]
        capabilities = {
            "browserName": "chrome",
            "goog:chromeOptions": {"binary": CHROMIUM, "args": arguments},
            "goog:loggingPrefs": {"browser": "ALL"},
        }
        command, environment = [str(DRIVER), "--port=0"], {**os.environ, "HOME": folder}
        with Popen(command, stdout=PIPE, stderr=DEVNULL, env=environment) as process:
            assert process.stdout is not None
            lines = (line for line in process.stdout if b"started successfully on port" in line)
            port = int(next(lines).rstrip(b".\n").rpartition(b" ")[2])
            browser = Browser(f"http://127.0.0.1:{port}", capabilities)
            try:
                yield browser
            finally:
                with contextlib.suppress(ServiceError):  # it answers no more
                    browser.devtools("Browser.close", {})
                process.terminate()


_CODES = {"ArrowLeft": 37, "ArrowRight": 39, "Enter": 13, "+": 187, "0": 48}


def wait_until(browser: Browser, condition: str) -> None:
    wait_for(lambda: browser.get(f"Boolean({condition})"), 5)


def set_filter(browser: Browser, **values: str) -> None:
    """Set fields of the filters and send their input events."""
    browser.run(
        "for (const [name, value] of Object.entries(arguments[0])) {"
        "const field = document.querySelector(`#filters [name=${name}]`);"
        "field.value = value;"
        "field.dispatchEvent(new Event('input', { bubbles: true })); }",
        values,
    )


def get_entries(browser: Browser) -> list[dict]:
    return browser.get("state.shown")


def get_position(browser: Browser) -> str:
    return browser.read("#position")[0]


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


def get_ticks(browser: Browser, chart: int) -> list[str]:
    """Return the labels of a chart's horizontal axis."""
    labels = f"[...charts[{chart}].plot.querySelectorAll('text.x')]"
    return browser.get(f"{labels}.map((label) => label.textContent)")


def drag(browser: Browser, chart: int, start: float, end: float) -> None:
    """Drag over a chart from one step to another with the mouse."""
    x1, x2, y = browser.run(
        f"const chart = charts[{chart}], box = chart.plot.getBoundingClientRect();"
        "const at = (step) => box.left + chart.scaleX.to(step) / SIZE.width * box.width;"
        f"return [at({start}), at({end}), box.top + box.height / 2];"
    )
    for kind, x in (("mousePressed", x1), ("mouseMoved", (x1 + x2) / 2), ("mouseReleased", x2)):
        event = {"type": kind, "x": x, "y": y, "button": "left", "buttons": 1, "clickCount": 1}
        browser.devtools("Input.dispatchMouseEvent", event)
