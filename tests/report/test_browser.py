"""The report in a real browser, opened from disk without a network."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from browser import CHROMIUM, DRIVER, Browser, wait
from report_runs import TASKS, few_examples, group, make_run, with_alarms

from vlm_grpo.registry import load_task
from vlm_grpo.report import build_report, compare_runs
from vlm_grpo.tracking.samples import write_samples

pytestmark = pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None,
    reason="needs Chromium and its driver (Debian: apt-get install chromium chromium-driver)",
)

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


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as started:
        yield started


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of each task, and a second one of grounding, each with its page."""
    folder = tmp_path_factory.mktemp("runs")
    for task in TASKS:
        build_report(make_run(folder, task, steps=20, held_out=8))
    make_run(folder, "grounding", steps=20, held_out=8, seed=1, skill=(0.2, 0.5))
    return folder


def opened(browser: Browser, page: Path) -> Browser:
    browser.open(page)
    return browser


def choose(browser: Browser, name: str, value: str) -> None:
    """Give a field of the filters a value, as a user's choice does."""
    browser.run(
        "const field = document.querySelector(`#filters [name=${arguments[0]}]`);"
        "field.value = arguments[1];"
        "field.dispatchEvent(new Event('input', { bubbles: true }));",
        name,
        value,
    )


def shown(browser: Browser) -> list[dict]:
    """The entries that pass the filters, in their order."""
    return browser.run("return state.shown")


def place(browser: Browser) -> str:
    return browser.run("return document.getElementById('place').textContent")


@pytest.mark.parametrize("task", TASKS)
def test_page_opens_without_a_complaint(task: str, browser: Browser, runs: Path) -> None:
    opened(browser, runs / f"{task}-0" / "report.html")
    assert place(browser) == "1 of 16"  # 8 held out, and 4 groups at each of 2 steps
    assert browser.run("return document.querySelectorAll('.chart svg').length") >= 10
    broken = "[...document.images].filter((i) => i.complete && !i.naturalWidth).length"
    assert browser.run(f"return {broken}") == 0
    assert browser.log() == []


def test_marks_lie_over_the_image(browser: Browser, runs: Path) -> None:
    opened(browser, runs / "grounding-0" / "report.html")
    choose(browser, "view", "training")
    layers = "document.querySelectorAll('.marks img').length"
    with_answer = browser.run("return state.shown[0].answers.filter((a) => a.marks).length")
    assert browser.run(f"return {layers}") == with_answer + 1  # and the gold one
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


def test_chosen_answer_stands_out(browser: Browser, runs: Path) -> None:
    opened(browser, runs / "grounding-0" / "report.html")
    browser.run("document.querySelector('.answer').click()")
    assert browser.run("return document.querySelectorAll('.answer.chosen').length") == 1
    assert browser.run("return state.answer === state.shown[state.at].answers[0]")
    browser.run("document.querySelector('.answer').click()")
    assert browser.run("return document.querySelectorAll('.answer.chosen').length") == 0


def test_keys_page(browser: Browser, runs: Path) -> None:
    opened(browser, runs / "counting-0" / "report.html")
    first = browser.run("return state.shown[0].id")
    browser.press("ArrowRight")
    browser.press("ArrowRight")
    assert place(browser) == "3 of 16"
    assert browser.run("return document.querySelector('.facts dd:last-child').textContent") == (
        browser.run("return state.shown[2].id")
    )
    browser.press("ArrowLeft")
    browser.press("ArrowLeft")
    browser.press("ArrowLeft")  # stays at the first
    assert place(browser) == "1 of 16"
    assert browser.run("return state.shown[state.at].id") == first
    browser.run("document.querySelector('#filters [name=text]').focus()")
    browser.press("ArrowRight")  # moves the caret, not the page
    assert place(browser) == "1 of 16"


def test_filters(browser: Browser, runs: Path) -> None:
    opened(browser, runs / "counting-0" / "report.html")
    choose(browser, "view", "training")
    assert {entry["view"] for entry in shown(browser)} == {"training"}
    choose(browser, "step", "10")
    assert {entry["step"] for entry in shown(browser)} == {10}
    choose(browser, "view", "")
    choose(browser, "step", "")
    choose(browser, "least", "1")
    for entry in shown(browser):
        assert any(answer["reward"] >= 1 for answer in entry["answers"])
    choose(browser, "most", "0.5")  # nothing is at least 1 and at most 0.5
    assert shown(browser) == []
    assert place(browser) == "none"
    text = browser.run("return document.getElementById('entry').textContent")
    assert "Nothing passes" in text
    browser.run("document.querySelector('#filters [type=reset]').click()")
    wait(browser, "state.shown.length === 16")
    choose(browser, "text", "eval-3")
    assert [entry["id"] for entry in shown(browser)] == ["shapes-counting-eval-3"]


def test_kinds_filter_and_dim_the_others(browser: Browser, runs: Path) -> None:
    opened(browser, runs / "counting-0" / "report.html")
    browser.run("document.querySelectorAll('.chip')[1].click()")  # wrong
    entries = shown(browser)
    assert 0 < len(entries) <= 16
    for entry in entries:
        assert "wrong" in {answer["kind"] for answer in entry["answers"]}
    bright = browser.run(
        "return [...document.querySelectorAll('.answer:not(.dim) .badge')]"
        ".map((badge) => badge.textContent)"
    )
    assert set(bright) == {"wrong"}
    assert browser.run("return document.querySelectorAll('.chip')[1].ariaPressed") == "true"


def test_sorts(browser: Browser, runs: Path) -> None:
    opened(browser, runs / "grounding-0" / "report.html")
    changes = [abs(entry["change"] or 0) for entry in shown(browser)]  # the first choice
    assert changes == sorted(changes, reverse=True)
    choose(browser, "sort", "oldest")
    steps = [entry["step"] for entry in shown(browser)]
    assert steps == sorted(steps)
    choose(browser, "sort", "lowest reward")
    means = [mean_reward(entry) for entry in shown(browser)]
    assert means == sorted(means)
    choose(browser, "sort", "largest spread of rewards")
    spreads = [entry["spread"] or -1 for entry in shown(browser) if entry["spread"] is not None]
    assert spreads == sorted(spreads, reverse=True)


def mean_reward(entry: dict) -> float:
    rewards = [answer["reward"] for answer in entry["answers"]]
    return round(sum(rewards) / len(rewards), 9)


def test_values_under_the_pointer(browser: Browser, runs: Path) -> None:
    opened(browser, runs / "counting-0" / "report.html")
    readout = browser.run(
        "const plot = document.querySelector('.plot');"
        "plot.scrollIntoView();"
        "const box = plot.getBoundingClientRect();"
        "plot.dispatchEvent(new PointerEvent('pointermove', { clientX: box.right - 5 }));"
        "return document.querySelector('.readout').textContent;"
    )
    last = [json.loads(line) for line in _last_evaluation(runs / "counting-0")]
    share = 100 * sum(row["rewards"]["exact"] for row in last) / len(last)
    assert readout == f"step 20: {float(f'{share:.3g}'):g} %"


def _last_evaluation(run: Path) -> list[str]:
    return sorted((run / "evaluation").glob("step-*"))[-1].read_text().splitlines()


def test_light_and_dark(browser: Browser, runs: Path) -> None:
    background = "return getComputedStyle(document.body).backgroundColor"
    browser.prefer("dark")
    opened(browser, runs / "counting-0" / "report.html")
    dark = browser.run(background)
    browser.prefer("light")
    wait(browser, "document.documentElement.dataset.theme === 'light'")
    light = browser.run(background)
    assert max(map(int, dark[4:-1].split(","))) < 60 < 200 < min(map(int, light[4:-1].split(",")))
    line = "getComputedStyle(document.querySelector('.plot path[style*=series]')).stroke"
    before = browser.run(f"return {line}")
    browser.run("document.getElementById('theme').click()")
    assert browser.run(background) == dark
    assert browser.run(f"return {line}") != before  # the curves follow
    browser.run("localStorage.clear()")


@pytest.mark.parametrize("page", ["report", "compare"])
def test_phone(page: str, runs: Path) -> None:
    path = runs / "grounding-0" / "report.html"
    if page == "compare":
        path = compare_runs(runs / "grounding-0", runs / "grounding-1")
    with Browser() as browser:
        browser.resize(360, 740)
        opened(browser, path)
        # Nothing sticks out: the page is as wide as the screen.
        assert browser.run("return document.documentElement.scrollWidth") == 360
        small = browser.run(
            "return [...document.querySelectorAll('#filters button, #filters select, .quiet')]"
            ".filter((e) => e.offsetParent && e.getBoundingClientRect().height < 32).length"
        )
        assert small == 0  # a finger hits what is 32 pixels high
        assert browser.log() == []


def test_two_runs_side_by_side(browser: Browser, runs: Path) -> None:
    opened(browser, compare_runs(runs / "grounding-0", runs / "grounding-1"))
    assert browser.run("return document.querySelectorAll('.head').length") == 2
    entries = shown(browser)
    assert len(entries) == 8
    changes = [abs(entry["change"]) for entry in entries]
    assert changes == sorted(changes, reverse=True)
    assert {answer["run"] for answer in entries[0]["answers"]} == {"grounding-0", "grounding-1"}
    colours = browser.run(
        "return [...document.querySelectorAll('.answer header b')]"
        ".map((name) => getComputedStyle(name).color)"
    )
    assert len(set(colours)) == 2  # each run has its own
    assert "optim.lr" not in browser.run("return document.getElementById('settings').textContent")
    browser.press("ArrowRight")
    assert place(browser) == "2 of 8"
    assert browser.log() == []


def test_hostile_output_is_harmless(browser: Browser, tmp_path: Path) -> None:
    """Whatever a model or a dataset wrote is text: nothing runs, loads, or leaves its place."""
    run = tmp_path / "<b onclick=x> & co"
    task = load_task("counting", tags=True)
    (example,) = few_examples("counting", task)
    for step, words in enumerate(HOSTILE):
        row = replace(example, id=words, question=words, answer=words)
        sampled = group(task, row, [*HOSTILE, f"<think>{words}</think>{words}"])
        failing = [replace(s, failures={words: words}) for s in sampled.scores]
        sampled = replace(sampled, scores=tuple(failing))
        write_samples(run / "samples", step, [sampled], [[0.0] * len(failing)], task)
    with_alarms(run, [{"step": words, "name": words, "message": words} for words in HOSTILE])
    (run / "metrics.jsonl").write_text(
        "".join(
            json.dumps({"step": step, "reward": 0.5, **{f"rewards/{w}/mean": 1.0 for w in HOSTILE}})
            + "\n"
            for step in range(3)
        )
    )
    page = build_report(run)
    assert page.stat().st_size < 2e6  # the long texts are cut
    opened(browser, page)
    assert place(browser) == f"1 of {len(HOSTILE)}"
    for _ in HOSTILE:
        # Only what the page itself makes: no element that a text asked for.
        foreign = "#entry :is(script, svg, textarea, style, title), .alarms :is(b b, img)"
        assert browser.run("return document.querySelectorAll(arguments[0]).length", foreign) == 0
        wide = browser.run("return document.documentElement.scrollWidth - innerWidth")
        assert wide <= 0
        browser.press("ArrowRight")
    assert browser.run("return window.hacked ?? null") is None
    assert browser.run("return document.querySelectorAll('script').length") == 2 + browser.run(
        "return document.querySelectorAll('.chart').length"
    )
    text = browser.run("return document.getElementById('entry').textContent")
    assert "⟨U+202E⟩right to left⟨U+202C⟩" in text
    assert "characters more)" in text
    assert browser.log() == []


def test_page_refuses_scripts_of_others(browser: Browser, runs: Path, tmp_path: Path) -> None:
    """Even markup that got into the page would not run: its policy allows one script alone."""
    html = (runs / "counting-0" / "report.html").read_text("utf-8")
    attack = "<script>window.hacked = 1</script><img src=https://example.org/x.png>"
    page = tmp_path / "attacked.html"
    page.write_text(html.replace("<footer>", attack + "<footer>"), "utf-8")
    opened(browser, page)
    assert place(browser) == "1 of 16"  # the page's own script does run
    assert browser.run("return window.hacked ?? null") is None
    refused = browser.log()
    assert len(refused) == 2
    assert all("Content Security Policy" in message for message in refused)
