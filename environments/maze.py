"""A game with a state: a maze that is drawn after each move."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import field
from itertools import product
from typing import Any, Literal

from PIL import Image, ImageDraw, ImageFont

from vlm_grpo.task import metric, reward
from vlm_grpo.task.environment import Environment, tool
from vlm_grpo.task.tool_calls import ToolError
from vlm_grpo.types import Candidate, Example, ToolCall

Cell = tuple[int, int]  # column and row
Direction = Literal["up", "down", "left", "right"]
STEPS: dict[str, Cell] = {"up": (0, -1), "down": (0, 1), "left": (-1, 0), "right": (1, 0)}
AT_GOAL = "You are at the goal, where a sign says:"
LEAST_MOVES = 2  #: number of moves from the start to the goal


class Maze(Environment):
    """Move the red disk through a maze to the green square.

    The maze of an example depends on its id alone. At the goal the model sees a sign with the row's
    answer, so that a task that reads a word or a number can ask for it.

    Attributes:
        cells: number of cells along each side.
        cell: side of a cell in pixels.
    """

    max_turns: int = 12
    cells: int = 3
    cell: int = 28
    place: Cell = field(default=(0, 0), init=False)  #: of the disk

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cells < 2 or self.cell < 4:
            raise ValueError("cells must be at least 2, and cell at least 4 pixels")

    def reset(self, example: Example) -> list[str | Image.Image]:
        self.place, _, _ = self._build(example)
        return ["Move the red disk to the green square.", self._draw()]

    @tool
    def move(self, direction: Direction) -> list[str | Image.Image]:
        """Move the disk by one cell.

        Args:
            direction: where to.
        """
        _, goal, doors = self._build(self.example)
        there = _step(self.place, direction)
        if (self.place, there) not in doors:
            raise ToolError(f"there is a wall: {direction} is not possible")
        self.place = there
        if there == goal:
            return [AT_GOAL, self.draw_sign(self.example.answer)]
        return [self._draw()]

    def preview(self, example: Example) -> Sequence[str | tuple[int, int]]:
        side = self.cell * self.cells
        sizes = (side, side), self.draw_sign(example.answer).size
        return [AT_GOAL, max(sizes, key=math.prod)]

    def demonstrate(self, example: Example) -> Sequence[ToolCall]:
        start, goal, doors = self._build(example)
        return [ToolCall("move", {"direction": name}) for name in _solve(start, goal, doors)]

    @reward(weight=1.0, needs_answer=False)
    def goal(self, episode: Candidate) -> float:
        """Return 1 if the moves lead to the goal, else 0."""
        place, goal, _ = self._build(episode.example)
        for name in _list_moves(episode):
            place = _step(place, name)
        return float(place == goal)

    @metric(without_answer=None)
    def moves(self, episode: Candidate) -> float:
        """Return the number of moves that no wall prevented."""
        return float(sum(1 for _ in _list_moves(episode)))

    def _build(self, example: Example) -> tuple[Cell, Cell, set[tuple[Cell, Cell]]]:
        """Return the start, the goal and the doors between cells, each in both directions."""
        rng = random.Random(f"maze/{self.cells}/{example.id}")
        path, seen = [(0, 0)], {(0, 0)}
        doors = set[tuple[Cell, Cell]]()
        while path:  # a depth-first search visits all cells, and leaves no cycle
            here = path[-1]
            free = [c for c in (_step(here, d) for d in STEPS) if self._holds(c) and c not in seen]
            if not free:
                path.pop()
                continue
            there = rng.choice(free)
            doors |= {(here, there), (there, here)}
            seen.add(there)
            path.append(there)
        cells: list[Cell] = [(x, y) for x in range(self.cells) for y in range(self.cells)]
        start = rng.choice(cells)
        far = [c for c in cells if len(_solve(start, c, doors)) >= LEAST_MOVES]
        return start, rng.choice(far), doors

    def _holds(self, cell: Cell) -> bool:
        return all(0 <= number < self.cells for number in cell)

    def draw_sign(self, answer: Any) -> Image.Image:
        """Draw the answer, the first of several, in a line as high as a cell, at least as wide as
        the maze."""
        first = (
            answer[0] if isinstance(answer, Sequence) and not isinstance(answer, str) else answer
        )
        text, font = " ".join(str(first).split()), ImageFont.load_default(0.8 * self.cell)
        left, _, right, _ = font.getbbox(text)
        size = max(self.cell * self.cells, round(right - left) + 4), self.cell
        image = Image.new("RGB", size, (120, 120, 120))
        pen = ImageDraw.Draw(image)
        pen.text((2 - left, self.cell / 2), text, fill=(240, 240, 240), font=font, anchor="lm")
        return image

    def _draw(self) -> Image.Image:
        _, goal, doors = self._build(self.example)
        side = self.cell
        image = Image.new("RGB", (side * self.cells, side * self.cells), (120, 120, 120))
        pen = ImageDraw.Draw(image)
        for x, y in product(range(self.cells), repeat=2):
            left, top, right, bottom = x * side, y * side, (x + 1) * side - 1, (y + 1) * side - 1
            if (x, y) == goal:
                pen.rectangle((left + 4, top + 4, right - 4, bottom - 4), fill=(60, 200, 60))
            if (x, y) == self.place:
                pen.ellipse((left + 6, top + 6, right - 6, bottom - 6), fill=(220, 40, 40))
            lines = {
                "up": (left, top, right, top),
                "down": (left, bottom, right, bottom),
                "left": (left, top, left, bottom),
                "right": (right, top, right, bottom),
            }
            for name, line in lines.items():
                if ((x, y), _step((x, y), name)) not in doors:
                    pen.line(line, fill=(20, 20, 20), width=2)
        return image


def _step(cell: Cell, direction: str) -> Cell:
    x, y = STEPS[direction]
    return cell[0] + x, cell[1] + y


def _solve(start: Cell, goal: Cell, doors: set[tuple[Cell, Cell]]) -> list[str]:
    """Return the shortest way."""
    ways: dict[Cell, list[str]] = {start: []}
    for here in (queue := [start]):
        for name in STEPS:
            there = _step(here, name)
            if (here, there) in doors and there not in ways:
                ways[there] = [*ways[here], name]
                queue.append(there)
    return ways[goal]


def _list_moves(episode: Candidate) -> Iterator[str]:
    """Yield the moves of an episode that were made."""
    for turn in episode.turns:
        if turn.call is not None and turn.observed is not None and not turn.observed.is_error:
            yield str(turn.call.arguments["direction"])
