"""Read and operate a report that is open in a browser."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from browser import CHROMIUM, DRIVER, Browser

NEEDS_BROWSER = pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None,
    reason="needs Chromium and its driver (Debian: apt-get install chromium chromium-driver)",
)


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
    """Return the entries that match the filters, in order."""
    return browser.run("return state.shown")


def get_position(browser: Browser) -> str:
    """Return the position of the current entry, such as "3 of 16"."""
    return browser.run("return document.getElementById('position').textContent")


def read_last_evaluation(run: Path) -> list[dict[str, Any]]:
    """Return the rows of a run's last evaluation."""
    path = sorted((run / "evaluation").glob("step-*.jsonl"))[-1]
    return [json.loads(line) for line in path.read_text().splitlines()]


def get_chart(browser: Browser, title: str) -> int:
    """Scroll to the chart with this title, and return its number."""
    return browser.run(
        "const chart = charts.find((c) => c.data.title === arguments[0]);"
        "chart.figure.scrollIntoView({ block: 'center' });"
        "chart.point(null);"
        "return chart.number;",
        title,
    )


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
