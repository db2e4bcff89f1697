"""The report in a real browser, opened from disk without a network."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from browser import (
    NEEDS_BROWSER,
    Browser,
    get_entries,
    get_position,
    read_last_evaluation,
    set_filter,
    wait_until,
)
from report_runs import TASKS, load_few_examples, make_group, write_alarms

from vlm_grpo.report import build_report, compare_runs
from vlm_grpo.report.samples import write_samples
from vlm_grpo.task.registry import load_task
from vlm_grpo.types import EpisodeTurn, Observed, ToolCall

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
