"""The report in a real browser, opened from disk without a network."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest
from browser import (
    NEEDS_BROWSER,
    Browser,
    drag,
    get_chart,
    get_entries,
    get_position,
    get_ticks,
    read_last_evaluation,
    set_filter,
    wait_until,
)
from report_runs import TASKS, load_few_examples, make_group, make_run, write_alarms

from vlm_grpo.report import build_report, compare_runs
from vlm_grpo.report.samples import write_samples
from vlm_grpo.task import Task
from vlm_grpo.task.registry import load_task
from vlm_grpo.types import EpisodeTurn, Example, Observed, ToolCall

pytestmark = NEEDS_BROWSER

HOSTILE = (
    "</script><script>window.hacked = 1</script>",
    "<img src=x onerror='window.hacked = 1'><svg onload='window.hacked = 1'>",
    "<!--<script>window.hacked = 1",
    "javascript:window.hacked=1//</textarea></title></style>'\"><b>",
    "{{ 7 * 7 }}{% raw %}${window.hacked = 1}`",
    "<answer>" + "A" * 100_000,
    "\u202eright to left\u202c \u2066isolated \u2028 \u2029 \x00\x07\x1b[31m \ufeff",
    "broken \ud800 half, marks " + "Z" + "\u0335\u0489" * 500,
)


@pytest.mark.parametrize("task", TASKS)
def test_page_opens_without_errors(task, browser, runs):
    browser.open(runs / f"{task}-0" / "report.html")
    assert get_position(browser) == "1 of 16"  # 8 held out, and 4 groups at each of 2 steps
    assert browser.run("return document.querySelectorAll('.chart svg').length") >= 10
    broken = "[...document.images].filter((i) => i.complete && !i.naturalWidth).length"
    assert browser.run(f"return {broken}") == 0
    assert browser.read_log() == []


def test_drawings_cover_the_image(browser, runs):
    browser.open(runs / "grounding-0" / "report.html")
    set_filter(browser, "view", "training")
    layers = "document.querySelectorAll('.entry-side .marks img').length"
    with_answer = browser.run("return state.shown[0].answers.filter((a) => a.marks).length")
    assert browser.run(f"return {layers}") == with_answer + 1  # and the gold answer
    boxes = browser.run(
        "const box = (q) => { const b = document.querySelector(q).getBoundingClientRect();"
        "return [b.left, b.top, b.width, b.height]; };"
        "return [box('.picture > img'), box('.marks img')];"
    )
    assert boxes[0] == boxes[1]
    browser.run("document.querySelector('.layers .predicted input').click()")
    assert browser.run(f"return {layers}") == 1
    browser.run("document.querySelector('.layers .gold input').click()")
    assert browser.run(f"return {layers}") == 0


def test_selected_answer_is_highlighted(browser, runs):
    browser.open(runs / "grounding-0" / "report.html")
    browser.run("document.querySelector('.answer').click()")
    assert browser.run("return document.querySelectorAll('.answer.selected').length") == 1
    assert browser.run("return state.answer === state.shown[state.index].answers[0]")
    browser.run("document.querySelector('.answer').click()")
    assert browser.run("return document.querySelectorAll('.answer.selected').length") == 0


def test_arrow_keys_change_the_entry(browser, runs):
    browser.open(runs / "counting-0" / "report.html")
    first = browser.run("return state.shown[0].id")
    browser.press("ArrowRight")
    browser.press("ArrowRight")
    assert get_position(browser) == "3 of 16"
    assert browser.run("return document.querySelector('.facts dd:last-child').textContent") == (
        browser.run("return state.shown[2].id")
    )
    browser.press("ArrowLeft")
    browser.press("ArrowLeft")
    browser.press("ArrowLeft")  # stays at the first entry
    assert get_position(browser) == "1 of 16"
    assert browser.run("return state.shown[state.index].id") == first
    browser.run("document.querySelector('#filters [name=text]').focus()")
    browser.press("ArrowRight")  # moves the caret only
    assert get_position(browser) == "1 of 16"


def test_filters_select_entries(browser, runs):
    browser.open(runs / "counting-0" / "report.html")
    set_filter(browser, "view", "training")
    assert {entry["view"] for entry in get_entries(browser)} == {"training"}
    set_filter(browser, "step", "10")
    assert {entry["step"] for entry in get_entries(browser)} == {10}
    set_filter(browser, "view", "")
    set_filter(browser, "step", "")
    set_filter(browser, "min_reward", "1")
    for entry in get_entries(browser):
        assert any(answer["reward"] >= 1 for answer in entry["answers"])
    set_filter(browser, "max_reward", "0.5")  # no reward is at least 1 and at most 0.5
    assert get_entries(browser) == []
    assert get_position(browser) == "none"
    text = browser.run("return document.getElementById('entry').textContent")
    assert "No entry matches" in text
    browser.run("document.querySelector('#filters [type=reset]').click()")
    wait_until(browser, "state.shown.length === 16")
    set_filter(browser, "text", "eval-3")
    assert [entry["id"] for entry in get_entries(browser)] == ["shapes-counting-eval-3"]


def test_kind_filter_dims_other_answers(browser, runs):
    browser.open(runs / "counting-0" / "report.html")
    browser.run("document.querySelectorAll('.chip')[1].click()")  # incorrect
    entries = get_entries(browser)
    assert 0 < len(entries) <= 16
    for entry in entries:
        assert "incorrect" in {answer["kind"] for answer in entry["answers"]}
    bright = browser.run(
        "return [...document.querySelectorAll('.answer:not(.dim) .badge')]"
        ".map((badge) => badge.textContent)"
    )
    assert set(bright) == {"incorrect"}
    assert browser.run("return document.querySelectorAll('.chip')[1].ariaPressed") == "true"


def test_entries_are_sorted(browser, runs):
    browser.open(runs / "grounding-0" / "report.html")
    changes = [abs(entry["change"] or 0) for entry in get_entries(browser)]  # the default order
    assert changes == sorted(changes, reverse=True)
    set_filter(browser, "sort", "oldest")
    steps = [entry["step"] for entry in get_entries(browser)]
    assert steps == sorted(steps)
    set_filter(browser, "sort", "lowest reward")
    means = [get_mean_reward(entry) for entry in get_entries(browser)]
    assert means == sorted(means)
    set_filter(browser, "sort", "largest reward spread")
    spreads = [
        entry["spread"] or -1 for entry in get_entries(browser) if entry["spread"] is not None
    ]
    assert spreads == sorted(spreads, reverse=True)


def get_mean_reward(entry: dict) -> float:
    rewards = [answer["reward"] for answer in entry["answers"]]
    return round(sum(rewards) / len(rewards), 9)


def test_pointer_shows_the_values_of_a_step(browser, runs):
    browser.open(runs / "counting-0" / "report.html")
    readout = browser.run(
        "const plot = document.querySelector('.plot');"
        "plot.scrollIntoView();"
        "const box = plot.getBoundingClientRect();"
        "plot.dispatchEvent(new PointerEvent('pointermove', { clientX: box.right - 5 }));"
        "return document.querySelector('.readout').textContent;"
    )
    last = read_last_evaluation(runs / "counting-0")
    share = 100 * sum(row["rewards"]["exact"] for row in last) / len(last)
    assert readout == f"step 20: {float(f'{share:.3g}'):g} %"


def test_theme_follows_preference_and_button(browser, runs):
    background = "return getComputedStyle(document.body).backgroundColor"
    browser.prefer("dark")
    browser.open(runs / "counting-0" / "report.html")
    dark = browser.run(background)
    browser.prefer("light")
    wait_until(browser, "document.documentElement.dataset.theme === 'light'")
    light = browser.run(background)
    assert max(map(int, dark[4:-1].split(","))) < 60 < 200 < min(map(int, light[4:-1].split(",")))
    line = "getComputedStyle(document.querySelector('.plot path[style*=stroke]')).stroke"
    before = browser.run(f"return {line}")
    browser.run("document.getElementById('theme').click()")
    assert browser.run(background) == dark
    assert browser.run(f"return {line}") != before  # the curves follow the theme
    browser.run("localStorage.clear()")


@pytest.mark.parametrize("page", ["report", "compare"])
def test_page_fits_a_phone(page, runs):
    path = runs / "grounding-0" / "report.html"
    if page == "compare":
        path = compare_runs([runs / "grounding-0", runs / "grounding-1"])
    with Browser() as browser:
        browser.resize(360, 740)
        browser.open(path)
        # The page is not wider than the screen.
        assert browser.run("return document.documentElement.scrollWidth") == 360
        small = browser.run(
            "return [...document.querySelectorAll('#filters button, #filters select, .quiet')]"
            ".filter((e) => e.offsetParent && e.getBoundingClientRect().height < 32).length"
        )
        assert small == 0  # touch targets are at least 32 pixels high
        assert browser.read_log() == []


def test_comparison_shows_both_runs(browser, runs):
    browser.open(compare_runs([runs / "grounding-0", runs / "grounding-1"]))
    assert browser.run("return document.querySelectorAll('.summary').length") == 2
    entries = get_entries(browser)
    assert len(entries) == 8
    changes = [abs(entry["change"]) for entry in entries]
    assert changes == sorted(changes, reverse=True)
    assert {answer["run"] for answer in entries[0]["answers"]} == {"grounding-0", "grounding-1"}
    colors = browser.run(
        "return [...document.querySelectorAll('.answer header b')]"
        ".map((name) => getComputedStyle(name).color)"
    )
    assert len(set(colors)) == 2  # one per run
    assert "optim.lr" not in browser.run("return document.getElementById('settings').textContent")
    browser.press("ArrowRight")
    assert get_position(browser) == "2 of 8"
    assert browser.read_log() == []


def test_the_turns_of_an_episode_are_drawn(browser, tmp_path):
    task = load_task("grounding", environment="zoom")
    (example,) = load_few_examples("grounding", task)
    environment, turns = task.environment.adapt(task.frame), []
    environment.begin(example)
    for box in ([10, 10, 40, 30], [30, 10, 10, 40]):  # a good one, and a reversed one
        call = {"name": "zoom", "arguments": {"bbox_2d": box}}
        text = f"<think>It is small.</think><tool_call>{json.dumps(call)}</tool_call>"
        turns.append(EpisodeTurn(text, *environment.step(text)))
    answered = make_group(task, example, [task.gold(example)] * 2)
    texts = [EpisodeTurn(completion.text) for completion in answered.completions]
    episodes = ((*turns, texts[0]), turns[:1])  # the second was cut
    pairs = zip(answered.completions, episodes, strict=True)
    completions = tuple(replace(c, turns=tuple(own)) for c, own in pairs)
    sampled = replace(answered, completions=completions)
    write_samples(tmp_path / "samples", 0, [sampled], [[0.0, 0.0]], task)
    browser.open(build_report(tmp_path))

    def count(parts: str) -> list[int]:
        script = "[...document.querySelectorAll('.answer')].map((a) => a.querySelectorAll('%s'))"
        return browser.run(f"return {script % parts}.map((found) => found.length)")

    assert (count(".read"), count(".read.error")) == ([2, 1], [1, 0])
    assert count(".seen .picture") == [2, 2]  # the image with the box, and the part
    assert count(".seen .marks img") == [1, 1]
    assert count(".answer-text") == [1, 0]
    widths = browser.run(
        "return [...document.querySelectorAll('.seen img')].map((i) => i.naturalWidth)"
    )
    width = example.images[0].size[0]
    assert widths[:3] == [width, width, 360]  # 30 x 28 pixels, enlarged
    assert browser.read_log() == []


def test_hostile_output_is_harmless(browser, tmp_path):
    """Text of a model or a dataset cannot run scripts, load resources or break the layout."""
    run = tmp_path / "<b onclick=x> & co"
    task = load_task("counting", tags=True)
    (example,) = load_few_examples("counting", task)
    for step, words in enumerate(HOSTILE):
        row = replace(example, id=words, question=words, answer=words)
        sampled = make_group(task, row, [*HOSTILE, f"<think>{words}</think>{words}"])
        failing = [replace(s, failures={words: words}) for s in sampled.scores]
        turn = EpisodeTurn(words, ToolCall(words, {words: words}), Observed(words))
        called = [replace(c, turns=(turn, EpisodeTurn(c.text))) for c in sampled.completions]
        sampled = replace(sampled, scores=tuple(failing), completions=tuple(called))
        write_samples(run / "samples", step, [sampled], [[0.0] * len(failing)], task)
    write_alarms(run, [{"step": words, "name": words, "message": words} for words in HOSTILE])
    (run / "metrics.jsonl").write_text(
        "".join(
            json.dumps({"step": step, "reward": 0.5, **{f"rewards/{w}/mean": 1.0 for w in HOSTILE}})
            + "\n"
            for step in range(3)
        )
    )
    page = build_report(run)
    assert page.stat().st_size < 2e6  # long texts are truncated
    browser.open(page)
    assert get_position(browser) == f"1 of {len(HOSTILE)}"
    for _ in HOSTILE:
        # The page has no element that a text contains.
        injected = "#entry :is(script, svg, textarea, style, title), .alarms :is(b b, img)"
        assert browser.run("return document.querySelectorAll(arguments[0]).length", injected) == 0
        overflow = browser.run("return document.documentElement.scrollWidth - innerWidth")
        assert overflow <= 0
        browser.press("ArrowRight")
    assert browser.run("return window.hacked ?? null") is None
    assert browser.run("return document.querySelectorAll('script').length") == 2
    text = browser.run("return document.getElementById('entry').textContent")
    assert "⟨U+202E⟩right to left⟨U+202C⟩" in text
    assert "characters more)" in text
    assert browser.read_log() == []


def test_page_refuses_other_scripts(browser, runs, tmp_path):
    """The content security policy blocks markup that is injected into the page."""
    html = (runs / "counting-0" / "report.html").read_text("utf-8")
    attack = "<script>window.hacked = 1</script><img src=https://example.org/x.png>"
    page = tmp_path / "attacked.html"
    page.write_text(html.replace("<footer>", attack + "<footer>"), "utf-8")
    browser.open(page)
    assert get_position(browser) == "1 of 16"  # the page's script runs
    assert browser.run("return window.hacked ?? null") is None
    messages = browser.read_log()
    assert len(messages) == 2
    assert all("Content Security Policy" in message for message in messages)


# Charts, groups and flipped examples.


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
