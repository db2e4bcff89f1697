"""Tables: write the table in the image in HTML or in markdown."""

from __future__ import annotations

import re
from collections.abc import Sequence

from PIL import Image, ImageDraw, ImageFont

from vlm_grpo.task import Task, metric, reward
from vlm_grpo.task.drawing import GOLD_COLOR
from vlm_grpo.tasks.graders.subjects import is_introduced
from vlm_grpo.tasks.graders.tables import (
    MAX_CHARACTERS,
    MAX_STEPS,
    Tree,
    build_markdown_tree,
    count_steps,
    drop_texts,
    import_extra,
    read_html_rows,
    read_html_tree,
    read_markdown_rows,
    teds,
)
from vlm_grpo.types import Example

FORMS = {"html": "HTML", "markdown": "markdown"}
_TABLE = re.compile(r"<table\b.*?(?:</table\s*>|\Z)", re.IGNORECASE | re.DOTALL)
_LINES = re.compile(r"(?m:^[^\n]*\|[^\n]*$)(?:\n[^\n]*\|[^\n]*)*")
_TAG = re.compile(r"</?table\b", re.IGNORECASE)


class Table(Task):
    """Write a table; the gold answer is its text in the form that is asked for.

    The answer is the only table in the text, without the words around it; two tables, or one
    within another, are no answer. A table in HTML may lack its end. A markdown table is a run of
    lines with a ``|``; it has no spans, and lines of dashes are ignored.

    Attributes:
        form: "html", or "markdown", which does not need the extra ``documents``.
    """

    primary_metric = "teds"
    instruction: str | None = "Answer with the table alone, in {form}."
    form: str = "html"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.form not in FORMS:
            raise ValueError(f"form is {self.form!r}; it must be one of {', '.join(FORMS)}")
        if self.form == "html":
            import_extra("lxml.etree")

    def instructions(self, example: Example) -> str:
        return super().instructions(example).replace("{form}", FORMS[self.form])

    def parse(self, text: str, example: Example) -> str | None:
        if len(text) > MAX_CHARACTERS:
            return None
        if self.form == "html":
            found = _TABLE.findall(text)
            one = len(found) == 1 and len(_TAG.findall(text)) <= 2
            one = one and is_introduced(*text.split(found[0]))
            return found[0] if one and read_html_tree(found[0]) else None
        found = read_markdown_rows(text)
        if len(found) != 1 or not is_introduced(*re.split(_LINES, text, maxsplit=1)):
            return None
        return "\n".join(f"|{'|'.join(row)}|" for row in found[0])

    def write(self, answer: str, example: Example) -> str:
        return answer

    def check(self, example: Example) -> None:
        text = example.answer
        if not isinstance(text, str) or self.parse(text, example) is None:
            form = FORMS[self.form]
            raise ValueError(
                f"the answer must be one table in {form} of at most {MAX_CHARACTERS:,} "
                f"characters, not {text!r:.80}; another form is set by form="
                f"{'|'.join(name for name in FORMS if name != self.form)}"
            )
        tree = self._read(self.gold_answer(example))
        if not any(tag == "td" for tag, *_ in tree.kinds):
            raise ValueError(f"the answer must be a table with cells, not {text!r:.80}")
        if count_steps(tree, tree) > MAX_STEPS:
            raise ValueError("the table has too many cells to be compared: about 1,000 are allowed")

    def gold_answer(self, example: Example) -> str:
        return self.parse(example.answer, example) or ""

    @reward(weight=1.0)
    def teds(self, answer: str, example: Example) -> float:
        """TEDS: 1 − tree edit distance / number of nodes, at least 0."""
        return teds(self._read(answer), self._read(self.gold_answer(example)))

    @reward(weight=0.0)
    def structure(self, answer: str, example: Example) -> float:
        """TEDS of the structure, without the texts of cells."""
        gold = self._read(self.gold_answer(example))
        return teds(drop_texts(self._read(answer)), drop_texts(gold))

    @metric()
    def teds_script(self, answer: str, example: Example) -> float:
        """TEDS with all tags within cells counted as nodes, as PubTabNet's script does."""
        gold = self._read(self.gold_answer(example))
        return teds(self._read(answer), gold, most_inline=MAX_CHARACTERS)

    @metric()
    def exact(self, answer: str, example: Example) -> float:
        """1 if structure and texts are those of the gold table, else 0."""
        return float(self._read(answer) == self._read(self.gold_answer(example)))

    def draw(self, image: Image.Image, answer: str, example: Example, color: str) -> Image.Image:
        is_html = self.form == "html"
        return draw_table(
            image, read_html_rows(answer) if is_html else read_markdown_rows(answer)[0], color
        )

    def _read(self, table: str) -> Tree:
        """Return the tree of a table that ``parse`` or ``check`` has accepted."""
        if self.form == "html":
            tree = read_html_tree(table)
            assert tree is not None
            return tree
        return build_markdown_tree(read_markdown_rows(table)[0])


def draw_table(image: Image.Image, rows: Sequence[Sequence[str]], color: str) -> Image.Image:
    """Return a copy of the image with a table over its left half if the color is that of gold
    answers, else over its right half, so that both are next to each other. Texts are cut to the
    width of their cells.
    """
    drawn = image.copy()
    pen = ImageDraw.Draw(drawn)
    half = image.width / 2
    left = 0.0 if color == GOLD_COLOR else half
    width = half / max(1, *map(len, rows), 1)
    height = min(image.height / max(1, len(rows)), max(10.0, image.height / 8))
    size = max(5, min(32, int(height * 0.6)))
    font = ImageFont.load_default(size)
    for row, texts in enumerate(rows):
        for column, text in enumerate(texts):
            x, y = left + column * width, row * height
            corners = (x, y, x + width - 1, y + height - 1)
            if corners[2] >= x and corners[3] >= y:
                pen.rectangle(corners, fill="#ffffffd0", outline=color)
                shown = " ".join(text.split())[: int(width / (0.55 * size))]
                pen.text((x + 2, y + height * 0.15), shown, fill=color, font=font)
    return drawn
