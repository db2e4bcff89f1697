"""Charts, groups and flipped examples in a real browser."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
from browser import (
    NEEDS_BROWSER,
    drag,
    get_chart,
    get_entries,
    get_position,
    get_ticks,
    read_last_evaluation,
    set_filter,
    wait_until,
)
from report_runs import make_run

from vlm_grpo.report import compare_runs
from vlm_grpo.task import Task
from vlm_grpo.types import Example

pytestmark = NEEDS_BROWSER


def test_dragging_zooms_all_charts_over_the_steps(browser, runs):
    browser.open(runs / "counting-0" / "report.html")
    reward = get_chart(browser, "Reward")
    assert get_ticks(browser, reward)[0] == "0"
    drag(browser, reward, 5, 10)
    low, high = browser.run("return zooms.get('step')")
    assert (low, high) == (pytest.approx(5, abs=0.2), pytest.approx(10, abs=0.2))
    shown = [float(tick) for tick in get_ticks(browser, reward)]
    assert low <= min(shown) < max(shown) <= high
    other = get_chart(browser, "Entropy")
    wait_until(browser, f"!charts[{other}].dirty")  # it is drawn when it comes into sight
    assert min(float(tick) for tick in get_ticks(browser, other)) >= low
    get_chart(browser, "Reward")
    assert browser.run(f"return !charts[{reward}].reset.hidden")
    browser.run(f"charts[{reward}].plot.dispatchEvent(new MouseEvent('dblclick'))")
    assert browser.run("return zooms.size") == 0
    wait_until(browser, f"!charts[{reward}].dirty")
    assert get_ticks(browser, reward)[0] == "0"
    assert browser.read_log() == []


def test_charts_are_zoomed_with_the_keyboard(browser, runs):
    browser.open(runs / "counting-0" / "report.html")
    reward = get_chart(browser, "Reward")
    browser.run(f"charts[{reward}].plot.focus()")
    entry = get_position(browser)
    browser.press("ArrowRight")
    browser.press("ArrowRight")
    readout = f"return charts[{reward}].readout.textContent"
    assert browser.run(readout).startswith("step 1: ")
    assert get_position(browser) == entry  # the gallery stays
    browser.press("+")
    low, high = browser.run("return zooms.get('step')")
    assert high - low == pytest.approx(10, abs=0.5)  # half of the 20 steps
    browser.press("0")
    assert browser.run("return zooms.size") == 0


def test_legend_switches_lines(browser, runs):
    browser.open(runs / "counting-0" / "report.html")
    length = get_chart(browser, "Completion length")
    paths = f"charts[{length}].plot.querySelectorAll('path[style*=series]').length"
    before = browser.run(f"return {paths}")
    assert before == 3  # of the smallest, mean and largest length
    button = f"charts[{length}].figure.querySelector('.legend button')"
    browser.run(f"{button}.click()")
    assert browser.run(f"return {paths}") == 2
    assert browser.run(f"return {button}.ariaPressed") == "false"
    browser.run(f"{button}.click()")
    assert browser.run(f"return {paths}") == before


def test_axes_have_complete_labels(browser, runs):
    browser.open(runs / "counting-0" / "report.html")
    ticks = "return makeTicks([0, 1e-6], 5).map((value) => formatTick(value, 1e-6))"
    assert browser.run(ticks) == ["0", "2e-7", "4e-7", "6e-7", "8e-7", "1e-6"]
    for value, span, text in ((5.6e-17, 1, "0"), (-0.25, 1, "-0.25"), (123_456, 1e5, "1.23e5")):
        assert browser.run("return formatTick(...arguments)", value, span) == text
    rates = "return makeTicks([1e-6, 1e-3], 6, { logarithmic: true }).map((v) => formatTick(v, v))"
    assert browser.run(rates) == ["1e-6", "1e-5", "1e-4", "0.001"]
    # Values of a sampler that agrees bit for bit are 0, which has no logarithm.
    browser.run(
        "const line = { name: 'a', series: 0, x: 0, y: page.xs[0].map(() => 0), low: null };"
        "const data = { ...page.charts[0], logarithmic: true, lines: [line] };"
        "new Chart(charts[0].figure.cloneNode(true), data, 99).draw();"
    )
    assert browser.read_log() == []


def test_group_has_its_completions_side_by_side(browser, runs):
    browser.open(runs / "grounding-0" / "report.html")
    set_filter(browser, "view", "training")
    set_filter(browser, "sort", "largest reward spread")
    set_filter(browser, "signal", "rewards differ")
    assert all(entry["spread"] > 0 for entry in get_entries(browser))
    entry = get_entries(browser)[0]
    cards = browser.run(
        "return [...document.querySelectorAll('#entry .answer')].map((card) => ({"
        "top: card.getBoundingClientRect().top, text: card.textContent,"
        "picture: Boolean(card.querySelector('.picture .marks img')) }))"
    )
    assert len(cards) == len(entry["answers"]) == 8
    assert sum(card["top"] == cards[0]["top"] for card in cards) >= 3  # side by side
    for card, answer in zip(cards, entry["answers"], strict=True):
        assert f"{answer['tokens']} tokens" in card["text"]
        assert ("truncated" in card["text"]) == (answer["stop"] == "length")
        assert "advantage" in card["text"]
        assert all(name.replace("_", " ") in card["text"] for name in answer["rewards"])
        assert card["picture"] == bool(answer["marks"])
    set_filter(browser, "signal", "rewards equal")
    assert all(entry["spread"] == 0 for entry in get_entries(browser))


def test_image_is_enlarged(browser, runs):
    browser.open(runs / "grounding-0" / "report.html")
    width = "document.querySelector('{} img').getBoundingClientRect().width"
    small = browser.run(f"return {width.format('.entry-side .picture')}")
    browser.run("document.querySelector('.entry-side .picture').focus()")
    browser.press("Enter")
    wait_until(browser, "document.querySelector('dialog[open]')")
    assert browser.run(f"return {width.format('dialog .picture')}") > 1.5 * small
    assert browser.run("return document.querySelectorAll('dialog .marks img').length") >= 1
    bottom = "document.querySelector('dialog .picture').getBoundingClientRect().bottom"
    assert browser.run(f"return {bottom} <= innerHeight")
    browser.run("document.querySelector('dialog button').click()")
    wait_until(browser, "!document.querySelector('dialog')")


def answer_every_third(remainder: int) -> Callable[..., str]:
    """Return a policy whose answers are wrong on every third example."""

    def answer(task: Task, example: Example, skill: float, generator: Random) -> str:
        number = int(example.id.rpartition("-")[2])
        return task.gold(example) if number % 3 != remainder else f"{example.id} is not a box"

    return answer


def test_flipped_examples_are_listed_with_both_answers(browser, tmp_path):
    a, b = (
        make_run(
            tmp_path, "grounding", steps=2, held_out=9, seed=seed, policy=answer_every_third(seed)
        )
        for seed in (0, 1)
    )
    browser.open(compare_runs([a, b]))
    pair = browser.run("return findPair(0, 1)")
    shown = browser.run(
        "return [...document.querySelectorAll('.flip-list')].map((list) => ({"
        "title: list.querySelector('h3').textContent,"
        "cards: [...list.querySelectorAll('.flip')].map((card) => ({ text: card.textContent,"
        "pictures: card.querySelectorAll('.picture > img').length })) }))"
    )
    assert shown[0]["title"] == f"right → wrong {pair['worse']}"
    assert shown[1]["title"] == f"wrong → right {pair['better']}"
    assert len(shown[0]["cards"]) == len(shown[1]["cards"]) == pair["worse"] == 3  # of nine
    outputs = {row["id"]: row["output"] for row in read_last_evaluation(a)}
    first = next(flip for flip in pair["flips"] if not flip["better"])
    assert outputs[first["id"]] in shown[0]["cards"][0]["text"]
    assert shown[0]["cards"][0]["pictures"] == 2  # one for each answer
    browser.run("document.querySelector('#pairs button').click()")  # B against A
    flipped = "return [...document.querySelectorAll('.flip-list.better .flip')]"
    swapped = browser.run(f"{flipped}.map((card) => card.textContent)")
    assert len(swapped) == 3
    assert all("is not a box" in text.partition("B · ")[0] for text in swapped)  # A is wrong
    assert browser.read_log() == []


def test_runs_are_switched_in_all_charts(browser, runs):
    browser.open(compare_runs([runs / "grounding-0", runs / "grounding-1"]))
    names = "return [...document.querySelectorAll('#runs span')].map((s) => s.textContent)"
    assert browser.run(names) == ["grounding-0", "grounding-1"]
    shown = "return charts.map((c) => c.shown.map((l) => l.series))"
    assert all(series == [0, 1] for series in browser.run(shown))
    browser.run("document.querySelector('#runs button').click()")
    assert all(series == [1] for series in browser.run(shown))
    browser.run(
        "document.querySelector('#runs button')"
        ".dispatchEvent(new MouseEvent('click', { shiftKey: true }))"
    )
    assert all(series == [0] for series in browser.run(shown))  # alone
