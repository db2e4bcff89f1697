"""Rows for the environment ``maze``: a question, and a word as the answer, which a sign at the goal
shows. The environment draws the maze itself, from the row's id.

Example ``i`` depends on (seed, split, i) only:
``python -m vlm_grpo.data_scripts.make_mazes --count 10 --out DIR``.
"""

from __future__ import annotations

import random

from vlm_grpo.data_scripts.make_words import LENGTHS, LETTERS
from vlm_grpo.data_scripts.synthetic import Generator
from vlm_grpo.types import Example

QUESTION = "What does the goal say?"


def _draw(name: str, rng: random.Random) -> Example:
    return Example(name, (), QUESTION, "".join(rng.choices(LETTERS, k=rng.randint(*LENGTHS))))


draw_examples = Generator("mazes", {"mazes": _draw})

if __name__ == "__main__":
    raise SystemExit(draw_examples.main())
