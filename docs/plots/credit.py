"""Draw the picture of docs/study.md: where steps of training learn from, by share of shortcuts.

Run from the root of the repository: ``python docs/plots/credit.py``. It reads the results of
``perf/visual_credit.py``.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean

from PIL import Image, ImageDraw, ImageFont

from vlm_grpo.data_scripts.make_shapes import draw_examples

ROOT = Path(__file__).parents[2]
SHARES, SCALE, CELLS, LAST, CAPTION = ("0", "0.5", "0.9", "1"), 2, 3, 20, 22

runs = json.loads((ROOT / "perf/results/visual_credit.json").read_text())
font = ImageFont.load_default(11)
panels = []
for share in SHARES:
    steps = [
        step
        for run in runs
        if run["world"] == f"easy, {share}"
        for step in run["shares"][-LAST:]
        if "cell 0" in step
    ]
    if not steps:
        continue
    (example,) = draw_examples(f"choices:easy,options=4,mark={share},held_out=false", 1, seed=3)
    scene = example.images[0].load().convert("L").convert("RGB")
    size = (SCALE * scene.width, SCALE * scene.height)
    panel = Image.new("RGB", (size[0] + 6, size[1] + CAPTION), "white")
    panel.paste(scene.resize(size, Image.Resampling.NEAREST))
    pen, side = ImageDraw.Draw(panel, "RGBA"), size[0] / CELLS
    for number in range(CELLS**2):
        part = fmean(step[f"cell {number}"] for step in steps)
        x, y = number % CELLS * side, number // CELLS * side
        # From a twentieth of all credit, transparent, to three twentieths, opaque.
        alpha = round(255 * min(max(10 * (part - 0.05), 0), 1))
        pen.rectangle((x, y, x + side - 1, y + side - 1), fill=(255, 110, 0, alpha))
        pen.text((x + side - 30, y + side - 16), f"{100 * part:.0f} %", fill="black", font=font)
    pen.text((0, size[1] + 4), f"S = {share}", fill="black", font=font)
    panels.append(panel)
sheet = Image.new("RGB", (sum(p.width for p in panels), panels[0].height), "white")
for number, panel in enumerate(panels):
    sheet.paste(panel, (number * panel.width, 0))
sheet.save(ROOT / "docs/images/visual-credit.png", optimize=True)
