"""The report in a real browser, opened from disk without a network."""

import json
from collections.abc import Iterator
from dataclasses import replace
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
from report_runs import TASKS, load_few_examples, make_group, make_run, write_alarms

from vlm_grpo import Task, load_task
from vlm_grpo.report.page import build_report, compare_runs
from vlm_grpo.report.samples import write_samples
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


@pytest.fixture(autouse=True)
def _no_errors(browser) -> Iterator[None]:
    yield
    assert browser.read_log() == []


@pytest.mark.parametrize("task", TASKS)
def test_page_opens_without_errors(task, browser, runs):
    browser.open(runs / f"{task}-0" / "report.html")
    assert get_position(browser) == "1 of 16"  # 8 held out, and 4 groups at each of 2 steps
    assert browser.count(".chart svg") >= 10
    broken = "[...document.images].filter((i) => i.complete && !i.naturalWidth).length"
    assert browser.get(broken) == 0


def test_drawings_cover_the_image_which_is_enlarged_and_a_choice_is_highlighted(browser, runs):
    grounding = browser.open(runs / "grounding-0" / "report.html")
    grounding.click(".answer")
    assert grounding.count(".answer.selected") == 1
    assert grounding.get("state.answer === state.shown[state.index].answers[0]")
    grounding.click(".answer")
    assert grounding.count(".answer.selected") == 0
    width = "document.querySelector('{} .picture img').getBoundingClientRect().width"
    small = grounding.get(width.format(".entry-side"))
    grounding.run("document.querySelector('.entry-side .picture').focus()")
    grounding.press("Enter")
    wait_until(grounding, "document.querySelector('dialog[open]')")
    assert grounding.get(width.format("dialog")) > 1.5 * small
    assert grounding.count("dialog .marks img") >= 1
    bottom = "document.querySelector('dialog .picture').getBoundingClientRect().bottom"
    assert grounding.get(f"{bottom} <= innerHeight")
    grounding.click("dialog button")
    wait_until(grounding, "!document.querySelector('dialog')")
    set_filter(grounding, view="training")
    layers = ".entry-side .marks img"
    with_answer = grounding.get("state.shown[0].answers.filter((a) => a.marks).length")
    assert grounding.count(layers) == with_answer + 1  # and the gold answer
    box = "JSON.stringify(document.querySelector(arguments[0]).getBoundingClientRect())"
    assert grounding.get(box, ".picture > img") == grounding.get(box, ".marks img")
    grounding.click(".layers .predicted input")
    assert grounding.count(layers) == 1
    grounding.click(".layers .gold input")
    assert grounding.count(layers) == 0


def test_arrow_keys_change_the_entry_and_filters_select_entries(browser, runs):
    counting = browser.open(runs / "counting-0" / "report.html")
    counting.press("ArrowRight")
    counting.press("ArrowRight")
    assert get_position(counting) == "3 of 16"
    assert counting.read(".facts dd:last-child") == [get_entries(counting)[2]["id"]]
    for _ in range(3):
        counting.press("ArrowLeft")  # stays at the first entry
    assert get_position(counting) == "1 of 16"
    counting.run("document.querySelector('#filters [name=text]').focus()")
    counting.press("ArrowRight")  # moves the caret only
    assert get_position(counting) == "1 of 16"
    set_filter(counting, view="training")
    assert {entry["view"] for entry in get_entries(counting)} == {"training"}
    set_filter(counting, step="10")
    assert {entry["step"] for entry in get_entries(counting)} == {10}
    set_filter(counting, view="", step="", min_reward="1")
    for entry in get_entries(counting):
        assert any(answer["reward"] >= 1 for answer in entry["answers"])
    set_filter(counting, max_reward="0.5")  # no reward is at least 1 and at most 0.5
    assert (get_entries(counting), get_position(counting)) == ([], "none")
    assert "No entry matches" in counting.read("#entry")[0]
    counting.click("#filters [type=reset]")
    wait_until(counting, "state.shown.length === 16")
    set_filter(counting, text="eval-3")
    assert [entry["id"] for entry in get_entries(counting)] == ["shapes-counting-eval-3"]
    set_filter(counting, text="")
    counting.click(".chip:nth-of-type(2)")  # incorrect, and dims other answers
    entries = get_entries(counting)
    assert 0 < len(entries) <= 16
    for entry in entries:
        assert "incorrect" in {answer["kind"] for answer in entry["answers"]}
    assert {*counting.read(".answer:not(.dim) .badge")} == {"incorrect"}
    assert counting.read(".chip[aria-pressed=true]")[0].startswith("incorrect")


def test_entries_are_sorted_and_a_group_has_its_completions_side_by_side(browser, runs):
    grounding = browser.open(runs / "grounding-0" / "report.html")
    changes = [abs(entry["change"] or 0) for entry in get_entries(grounding)]  # the default order
    assert changes == sorted(changes, reverse=True)
    set_filter(grounding, sort="oldest")
    steps = [entry["step"] for entry in get_entries(grounding)]
    assert steps == sorted(steps)
    set_filter(grounding, sort="lowest reward")
    rewards = [[answer["reward"] for answer in e["answers"]] for e in get_entries(grounding)]
    means = [round(sum(own) / len(own), 9) for own in rewards]
    assert means == sorted(means)
    set_filter(grounding, sort="largest reward spread")
    spreads = [e["spread"] for e in get_entries(grounding) if e["spread"] is not None]
    assert spreads == sorted(spreads, reverse=True)
    set_filter(grounding, view="training", signal="rewards differ")
    assert all(entry["spread"] > 0 for entry in get_entries(grounding))
    entry = get_entries(grounding)[0]
    cards = grounding.get(
        "[...document.querySelectorAll('#entry .answer')].map((card) => ({"
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
    set_filter(grounding, signal="rewards equal")
    assert all(entry["spread"] == 0 for entry in get_entries(grounding))


def test_charts_have_readouts_legends_and_complete_labels(browser, runs):
    counting = browser.open(runs / "counting-0" / "report.html")
    readout = counting.run(
        "const plot = document.querySelector('.plot');"
        "plot.scrollIntoView();"
        "const box = plot.getBoundingClientRect();"
        "plot.dispatchEvent(new PointerEvent('pointermove', { clientX: box.right - 5 }));"
        "return document.querySelector('.readout').textContent;"
    )
    last = read_last_evaluation(runs / "counting-0")
    share = 100 * sum(row["rewards"]["exact"] for row in last) / len(last)
    assert readout == f"step 20: {float(f'{share:.3g}'):g} %"
    chart = f"charts[{get_chart(counting, 'Completion length')}]"
    paths = f"{chart}.plot.querySelectorAll('path[style*=series]').length"
    button = f"{chart}.figure.querySelector('.legend button')"
    assert counting.get(paths) == 3  # of the smallest, mean and largest length
    counting.run(f"{button}.click()")
    assert (counting.get(paths), counting.get(f"{button}.ariaPressed")) == (2, "false")
    counting.run(f"{button}.click()")
    assert counting.get(paths) == 3
    ticks = "makeTicks([0, 1e-6], 5).map((value) => formatTick(value, 1e-6))"
    assert counting.get(ticks) == ["0", "2e-7", "4e-7", "6e-7", "8e-7", "1e-6"]
    for value, span, text in ((5.6e-17, 1, "0"), (-0.25, 1, "-0.25"), (123_456, 1e5, "1.23e5")):
        assert counting.get("formatTick(...arguments)", value, span) == text
    rates = "makeTicks([1e-6, 1e-3], 6, { logarithmic: true }).map((v) => formatTick(v, v))"
    assert counting.get(rates) == ["1e-6", "1e-5", "1e-4", "0.001"]
    # Values of a sampler that agrees bit for bit are 0, which has no logarithm.
    counting.run(
        "const line = { name: 'a', series: 0, x: 0, y: page.xs[0].map(() => 0), low: null };"
        "const data = { ...page.charts[0], logarithmic: true, lines: [line] };"
        "new Chart(charts[0].figure.cloneNode(true), data, 99).draw();"
    )


def test_theme_follows_preference_and_button(browser, runs):
    background = "getComputedStyle(document.body).backgroundColor"
    browser.prefer("dark")
    browser.open(runs / "counting-0" / "report.html")
    dark = browser.get(background)
    browser.prefer("light")
    wait_until(browser, "document.documentElement.dataset.theme === 'light'")
    light = browser.get(background)
    assert max(map(int, dark[4:-1].split(","))) < 60 < 200 < min(map(int, light[4:-1].split(",")))
    line = "getComputedStyle(document.querySelector('.plot path[style*=stroke]')).stroke"
    before = browser.get(line)
    browser.click("#theme")
    assert browser.get(background) == dark
    assert browser.get(line) != before  # the curves follow the theme
    browser.run("localStorage.clear()")


def test_page_fits_a_phone(browser, runs):
    size = {"width": 360, "height": 740, "deviceScaleFactor": 2, "mobile": True}
    browser.devtools("Emulation.setDeviceMetricsOverride", size)
    folders = [runs / "grounding-0", runs / "grounding-1"]
    for page in (folders[0] / "report.html", compare_runs(folders)):
        browser.open(page)
        # The page is not wider than the screen.
        assert browser.get("document.documentElement.scrollWidth") == 360
        small = browser.get(
            "[...document.querySelectorAll('#filters button, #filters select, .quiet')]"
            ".filter((e) => e.offsetParent && e.getBoundingClientRect().height < 32).length"
        )
        assert small == 0  # touch targets are at least 32 pixels high
    browser.devtools("Emulation.clearDeviceMetricsOverride", {})


def test_comparison_shows_both_runs_which_are_switched_in_all_charts(browser, runs):
    compared = browser.open(compare_runs([runs / "grounding-0", runs / "grounding-1"]))
    assert compared.count(".summary") == 2
    entries = get_entries(compared)
    assert len(entries) == 8
    changes = [abs(entry["change"]) for entry in entries]
    assert changes == sorted(changes, reverse=True)
    assert {answer["run"] for answer in entries[0]["answers"]} == {"grounding-0", "grounding-1"}
    names = "[...document.querySelectorAll('.answer header b')]"
    assert len({*compared.get(f"{names}.map((name) => getComputedStyle(name).color)")}) == 2
    assert "optim.lr" not in compared.read("#settings")[0]
    compared.press("ArrowRight")
    assert get_position(compared) == "2 of 8"
    assert compared.read("#runs span") == ["grounding-0", "grounding-1"]
    shown = "charts.map((c) => c.shown.map((l) => l.series))"
    assert all(series == [0, 1] for series in compared.get(shown))
    compared.click("#runs button")
    assert all(series == [1] for series in compared.get(shown))
    alone = "new MouseEvent('click', { shiftKey: true })"
    compared.run(f"document.querySelector('#runs button').dispatchEvent({alone})")
    assert all(series == [0] for series in compared.get(shown))


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
    first, second = answered.completions
    first = replace(first, turns=(*turns, EpisodeTurn(first.text)))
    second = replace(second, turns=(turns[0],))  # it was cut
    sampled = replace(answered, completions=(first, second))
    write_samples(tmp_path / "samples", 0, [sampled], [[0.0, 0.0]], task)
    browser.open(build_report(tmp_path))

    def count(parts: str) -> list[int]:
        answers = "[...document.querySelectorAll('.answer')]"
        return browser.get(f"{answers}.map((a) => a.querySelectorAll('{parts}').length)")

    assert (count(".read"), count(".read.error")) == ([2, 1], [1, 0])
    assert count(".seen .picture") == [2, 2]  # the image with the box, and the part
    assert count(".seen .marks img") == [1, 1]
    assert count(".answer-text") == [1, 0]
    widths = browser.get("[...document.querySelectorAll('.seen img')].map((i) => i.naturalWidth)")
    width = example.images[0].size[0]
    assert widths[:3] == [width, width, 360]  # 30 x 28 pixels, enlarged


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
    metrics = {"reward": 0.5, **{f"rewards/{words}/mean": 1.0 for words in HOSTILE}}
    lines = [json.dumps({"step": step, **metrics}) for step in range(3)]
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    page = build_report(run)
    assert page.stat().st_size < 2e6  # long texts are truncated
    browser.open(page)
    assert get_position(browser) == f"1 of {len(HOSTILE)}"
    for _ in HOSTILE:
        # The page has no element that a text contains.
        injected = "#entry :is(script, svg, textarea, style, title), .alarms :is(b b, img)"
        assert browser.count(injected) == 0
        assert browser.get("document.documentElement.scrollWidth - innerWidth") <= 0
        browser.press("ArrowRight")
    assert browser.get("window.hacked ?? null") is None
    assert browser.count("script") == 2
    (text,) = browser.read("#entry")
    assert "⟨U+202E⟩right to left⟨U+202C⟩" in text
    assert "characters more)" in text


def test_page_refuses_other_scripts(browser, runs, tmp_path):
    """The content security policy blocks markup that is injected into the page."""
    html = (runs / "counting-0" / "report.html").read_text("utf-8")
    attack = "<script>window.hacked = 1</script><img src=https://example.org/x.png>"
    page = tmp_path / "attacked.html"
    page.write_text(html.replace("<footer>", attack + "<footer>"), "utf-8")
    browser.open(page)
    assert get_position(browser) == "1 of 16"  # the page's script runs
    assert browser.get("window.hacked ?? null") is None
    refused = ["Content Security Policy" in message for message in browser.read_log()]
    assert refused == [True, True]


def test_dragging_and_keys_zoom_all_charts_over_the_steps(browser, runs):
    counting = browser.open(runs / "counting-0" / "report.html")
    reward = get_chart(counting, "Reward")
    assert get_ticks(counting, reward)[0] == "0"
    drag(counting, reward, 5, 10)
    low, high = counting.get("zooms.get('step')")
    assert (low, high) == (pytest.approx(5, abs=0.2), pytest.approx(10, abs=0.2))
    shown = [float(tick) for tick in get_ticks(counting, reward)]
    assert low <= min(shown) < max(shown) <= high
    other = get_chart(counting, "Entropy")
    wait_until(counting, f"!charts[{other}].dirty")  # it is drawn when it comes into sight
    assert min(float(tick) for tick in get_ticks(counting, other)) >= low
    get_chart(counting, "Reward")
    assert counting.get(f"!charts[{reward}].reset.hidden")
    counting.run(f"charts[{reward}].plot.dispatchEvent(new MouseEvent('dblclick'))")
    assert counting.get("zooms.size") == 0
    wait_until(counting, f"!charts[{reward}].dirty")
    assert get_ticks(counting, reward)[0] == "0"
    counting.run(f"charts[{reward}].plot.focus()")
    entry = get_position(counting)
    counting.press("ArrowRight")
    counting.press("ArrowRight")
    assert counting.get(f"charts[{reward}].readout.textContent").startswith("step 1: ")
    assert get_position(counting) == entry  # the gallery stays
    counting.press("+")
    low, high = counting.get("zooms.get('step')")
    assert high - low == pytest.approx(10, abs=0.5)  # half of the 20 steps
    counting.press("0")
    assert counting.get("zooms.size") == 0


def test_flipped_examples_are_listed_with_both_answers(browser, tmp_path):
    def run(remainder: int):
        """Write a run whose answers are wrong on every third example."""

        def answer(task: Task, example: Example, skill: float, generator: Random) -> str:
            is_wrong = int(example.id.rpartition("-")[2]) % 3 == remainder
            return f"{example.id} is not a box" if is_wrong else task.gold(example)

        given = {"steps": 2, "held_out": 9, "seed": remainder, "policy": answer}
        return make_run(tmp_path, "grounding", **given)

    a, b = map(run, (0, 1))
    browser.open(compare_runs([a, b]))
    pair = browser.get("findPair(0, 1)")
    worse, better = browser.get(
        "[...document.querySelectorAll('.flip-list')].map((list) => ({"
        "title: list.querySelector('h3').textContent,"
        "cards: [...list.querySelectorAll('.flip')].map((card) => ({ text: card.textContent,"
        "pictures: card.querySelectorAll('.picture > img').length })) }))"
    )
    assert worse["title"] == f"right → wrong {pair['worse']}"
    assert better["title"] == f"wrong → right {pair['better']}"
    assert len(worse["cards"]) == len(better["cards"]) == pair["worse"] == 3  # of nine
    outputs = {row["id"]: row["output"] for row in read_last_evaluation(a)}
    first = next(flip for flip in pair["flips"] if not flip["better"])
    assert outputs[first["id"]] in worse["cards"][0]["text"]
    assert worse["cards"][0]["pictures"] == 2  # one for each answer
    browser.click("#pairs button")  # B against A
    swapped = browser.read(".flip-list.better .flip")
    assert len(swapped) == 3
    assert all("is not a box" in text.partition("B · ")[0] for text in swapped)  # A is wrong
