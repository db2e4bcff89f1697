"""Random outputs near tables, pages and intervals, many of them malformed, with gold answers."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

from random_outputs import edit, make_example

from vlm_grpo.tasks.graders.page_tests import normalize
from vlm_grpo.tasks.graders.tables import Grid, read_grids
from vlm_grpo.types import Example, VideoRef

_CELLS = (
    "a|ab|12|3.5|p &lt; 0.05|<b>x</b>|<i>y</i>z|Age (years)|é||1,234|10%|μ±σ|<sup>2</sup>|Total"
)
_PARTS = ("x", "<", "</td>", "<td>", "<tr>", "</tr>", "<b>", "&amp;", " ", "\n", "é")
_SENTENCES = (
    "# The annual report of the society|First the rivers of the **north**.|Then the lakes – “all”.|"
    "The value is 3.14 and rises by 12 %.|Jim's _own_ notes, part two.|See figure 7 on page 12."
)
_DIRECTIONS = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
_HEADINGS = {"top_heading": (-1, 0), "left_heading": (0, -1)}


def write_table(rng: random.Random, tag: str = "td") -> str:
    """Write a table of up to 6 rows and 5 columns, with spans; ``tag`` is that of the first row."""
    width, rows = rng.randint(1, 5), []
    for row in range(rng.randint(1, 6)):
        cells, column, name = [], 0, "td" if row else tag
        while column < width:
            span = 2 if column + 1 < width and rng.random() < 0.2 else 1
            spans = f' colspan="{span}"' * (span > 1) + ' rowspan="2"' * (rng.random() < 0.05)
            cells.append(f"<{name}{spans}>{rng.choice(_CELLS.split('|'))}</{name}>")
            column += span
        rows.append(f"<tr>{''.join(cells)}</tr>")
    if rng.random() < 0.4:
        return f"<table>{''.join(rows)}</table>"
    return f"<table><thead>{rows[0]}</thead><tbody>{''.join(rows[1:])}</tbody></table>"


def break_table(rng: random.Random, table: str) -> str:
    """Apply a random change to a table; most changes make it malformed."""
    place = rng.randrange(7, len(table))
    kinds: list[Callable[[], str]] = [
        lambda: table,
        lambda: write_table(rng),
        lambda: table[:place] + rng.choice(_PARTS) + table[place:],
        lambda: table[:place] + table[place + rng.randint(1, 8) :],
        lambda: table[:place],
        lambda: table.replace("</td>", ""),
        lambda: table.replace("</tr>", "").replace("</td>", ""),
        lambda: table.replace("><", ">\n  <"),
        lambda: table.replace("thead", "tbody"),
        lambda: re.sub("</?t(?:head|body)>", "", table),
        lambda: table.upper().replace("SPAN", "span"),
        lambda: table.replace("<td>", "<td><p>", 1),
        lambda: f"Here:\n{table}\nDone",
        lambda: table.replace("<td>", "<td><!-- c -->", 2),
        lambda: f"<table>{'<tr><td>1</td></tr>' * rng.randint(0, 30)}</table>",
    ]
    return rng.choice(kinds)()


def draw_table(rng: random.Random) -> tuple[Example, str]:
    gold = write_table(rng)
    text = break_table(rng, gold)
    text = break_table(rng, text) if rng.random() < 0.1 and len(text) > 7 else text
    spans = re.findall(r'span="?([^">\s]*)', text)
    meta = {} if all(map(str.isdigit, spans)) else {"kind": "a span that is no number"}
    return make_example(gold, **meta), text


def write_page(rng: random.Random) -> str:
    blocks: list[str] = rng.sample(_SENTENCES.split("|"), rng.randint(1, 5))
    for _ in range(rng.randint(0, 2)):
        rows = [[rng.choice(["a", "b", "12", "Total"]) for _ in range(3)] for _ in range(3)]
        markdown = "\n".join(f"| {' | '.join(row)} |" for row in rows)
        blocks.append(rng.choice([write_table(rng), write_table(rng, "th"), markdown]))
    rng.shuffle(blocks)
    return "\n\n".join(blocks)


def draw_text_test(rng: random.Random, page: str, kind: str) -> dict[str, Any]:
    """Draw a test of texts that are parts of a page, with up to three edits."""

    def cut() -> str:
        start = rng.randrange(len(page))
        part = page[start : start + rng.randint(12, 60)].strip() or "lakes"
        part = edit(rng, part, rng.choice([0, 0, 1, 3]))
        return part if normalize(part).strip() else "lakes"

    names = ("before", "after") if kind == "order" else ("text",)
    test: dict[str, Any] = {"type": kind} | {name: cut() for name in names}
    shortest = min(len(normalize(test[name])) for name in names)
    test["max_diffs"] = min(rng.choice([0, 0, 1, 2, 3]), max(0, shortest // 2 - 1))
    if kind != "order":
        test["case_sensitive"] = rng.random() < 0.8
        test |= {n: rng.randint(1, 200) for n in ("first_n", "last_n") if rng.random() < 0.2}
    return test


def draw_cell_test(rng: random.Random, grids: list[Grid]) -> dict[str, Any]:
    """Draw a test of a cell and of those around it, a tenth of them wrong."""
    grid = rng.choice(grids)
    place = rng.choice(list(grid.cells))
    test = {"type": "table", "cell": grid.cells[place].text.strip() or "q"}
    for name, step in (_DIRECTIONS | _HEADINGS).items():
        find = grid.neighbors if name in _DIRECTIONS else grid.find_headings
        if rng.random() < 0.35 and (found := find(place, *step)):
            wrong = rng.random() < 0.1
            test[name] = "12" if wrong else grid.cells[rng.choice(sorted(found))].text
    return test | {"max_diffs": rng.choice([0, 0, 1, 3])}


def change_page(rng: random.Random, page: str) -> tuple[str, str]:
    """Apply a random change to a page, and return its name and the text."""
    blocks: list[str] = rng.sample(page.split("\n\n"), page.count("\n\n") + 1)
    kinds: dict[str, Callable[[], str]] = {
        "itself": lambda: page,
        "edited": lambda: edit(rng, page, rng.randint(1, 30)),
        "shuffled": lambda: "\n\n".join(blocks),
        "a part": lambda: page[: rng.randint(0, len(page))],
        "repeating": lambda: f"{page}\n{rng.choice(['ab', 'a', '。']) * rng.choice([5, 40])}",
        "twice": lambda: f"{page}\n\n{page}",
        "bold": lambda: "**" + page.replace("\n", "**\n**") + "**",
        "other signs": lambda: page.replace("-", "–").replace('"', "“").replace("'", "’"),
        "spaced": lambda: page.replace(" ", "  ").replace("\n", "\r\n"),
        "tiny": lambda: rng.choice(["e", "a b", "北京", "![x](y.png)", "|", "<table>", "|a|\n|b|"]),
        "malformed tables": lambda: break_table(rng, f"{page}       "),
    }
    form = rng.choice(list(kinds))
    return form, kinds[form]()


def draw_page(rng: random.Random, kind: str) -> tuple[Example, str]:
    """Draw a page's test of a type, and an output near the page."""
    kind = rng.choice(["present", "absent"]) if kind == "present" else kind
    page = write_page(rng)
    form, text = change_page(rng, page)
    test: dict[str, Any] = {"type": kind}
    if kind == "table":
        grids = read_grids(page) or read_grids(write_table(rng))
        test = draw_cell_test(rng, grids)
    elif kind != "baseline":
        test = draw_text_test(rng, page, kind)
    elif rng.random() < 0.3:
        test |= {"max_length": rng.choice([5, 10, 100])}
    meta = {}
    if kind == "table" and form in ("edited", "a part", "malformed tables"):
        meta["kind"] = "malformed tables"
    elif "text" in test and len(normalize(text)) < len(normalize(test["text"])):
        meta["kind"] = "a page shorter than the text"
    return make_example({"tests": [test]}, **meta), text


_SPANS = (
    "{s} to {e}|{s} to {e}|{s} and {e}|{e} to {s}|{s}  to {e}|{s}-{e}|from {s}s to {e}s|"
    "{s} to {e}s|1 to 2, no, {s} to {e}|"
    "{s} to {e} and 9|{s}. to {e}.|-{s} to {e}|{s} to {s}|0 to 30|none||"
    "<answer>{s} to {e}</answer>|<think>1 to 2</think><answer>{s} to {e}</answer>|{s}to {e}|٣ to ٤"
)


def draw_interval(rng: random.Random) -> tuple[Example, str]:
    clip = VideoRef("a", (8, 8), (8, 8), times=(0.0,), seconds=30)
    start = round(rng.uniform(0, 20), 1)
    end = round(start + rng.uniform(0.1, 10), 1)
    change = [rng.choice([0, 0, rng.uniform(-5, 5)]) for _ in range(2)]
    if rng.random() < 0.3:  # an IoU that is a threshold, or next to it by rounding
        change = [(end - start) * rng.choice([0.3, 0.5, 0.7]), 0]
    text = rng.choice(_SPANS.split("|"))
    text = text.replace("{s}", f"{max(0, start + change[0]):.2f}")
    return Example("a", (clip,), "?", [start, end]), text.replace("{e}", f"{end + change[1]:g}")
