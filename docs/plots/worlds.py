"""Draw the pictures of docs/small-worlds.md: each world at two levels, with its questions.

Run from the root of the repository: ``python docs/plots/worlds.py`` (needs the extra
``handwriting``).
"""

from __future__ import annotations

from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from vlm_grpo.data_scripts import make_shapes, make_words

FOLDER = Path(__file__).parents[1] / "images"
COLUMNS, SCALE, CAPTION = 5, 2, 26


def draw_world(world: str, levels: tuple[str, ...]) -> Image.Image:
    """Draw a row of training scenes for each level, each with its question and answer."""
    generator = next(
        module.draw_examples
        for module in (make_shapes, make_words)
        if world in module.draw_examples.worlds
    )
    rows = [generator(f"{world}:{level}", COLUMNS, seed=1) for level in levels]
    width, height = (SCALE * side for side in rows[0][0].images[0].size)
    sheet = Image.new("RGB", (COLUMNS * (width + 6), len(rows) * (height + CAPTION)), "white")
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(9)
    for y, row in enumerate(rows):
        for x, example in enumerate(row):
            corner = (x * (width + 6), y * (height + CAPTION))
            scene = example.images[0].load().resize((width, height), Image.Resampling.NEAREST)
            answer = example.answer
            if isinstance(answer, dict):
                box = [SCALE * side for side in answer["boxes"][0]]
                ImageDraw.Draw(scene).rectangle(box, outline="white")
                answer = ""
            sheet.paste(scene, corner)
            question = example.question.removesuffix(" are there?").removeprefix("How many ")
            text = f"{'' if question == make_words.QUESTION else question} {answer}".strip()
            pen.text((corner[0], corner[1] + height + 4), text, fill="black", font=font)
    return sheet


for name in ("attributes", "relations", "words", "handwriting"):
    draw_world(name, ("easy", "hard")).save(FOLDER / f"world-{name}.png", optimize=True)
