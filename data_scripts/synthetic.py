"""What the makers of synthetic data share: seeding, PNG encoding, the file form, the command."""

from __future__ import annotations

import argparse
import io
import json
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from PIL import Image

from vlm_grpo.types import Example, ImageRef

Make = Callable[[str, int, int, str], list[Example]]
"""``(task, count, seed, split)`` to that many examples."""

BACKGROUND_GRAYS = (108, 132)
"""Darkest and lightest grey of a background.

Image processors subtract a mean near (123, 117, 104), so such a background is nearly zero and
what is drawn on it is all that a vision tower sees. Trained from scratch on white paper, the
embedded model ignored the words for 2,000 steps; on slate it reads after 200.
"""


def make_rng(*key: object) -> random.Random:
    """A random generator that depends on ``key`` alone.

    A text seed goes through SHA-512 in ``random``, so the draws are the same in every process
    and on every machine, whatever ``PYTHONHASHSEED`` says.
    """
    return random.Random("/".join(map(str, key)))


def encode_png(image: Image.Image, name: str) -> ImageRef:
    """The image as PNG bytes in memory; the model is expected to see it at its own size."""
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return ImageRef(name=name, size=image.size, resized_size=image.size, data=buffer.getvalue())


@contextmanager
def atomic_folder(out: Path) -> Iterator[Path]:
    """A folder aside to write into; it becomes ``out`` when the block ends without an error.

    Raises:
        FileExistsError: ``out`` is a file, or a folder that is not empty.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise FileExistsError(f"{out} exists and is not an empty folder; name another --out")
    out.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        yield aside
        aside.chmod(0o755)  # mkdtemp makes private folders
        os.replace(aside, out)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def write_examples(examples: Iterable[Example], out: Path, file_name: str) -> Path:
    """Write examples as canonical JSONL with their images beside it, all or nothing.

    Args:
        examples: examples whose images hold their bytes.
        out: the folder to make; it is also the rows' ``image_root``.
        file_name: name of the JSONL file in ``out``.

    Returns:
        The path of the JSONL file.

    Raises:
        FileExistsError: ``out`` is a file, or a folder that is not empty.
    """
    with atomic_folder(out) as aside:
        (aside / "images").mkdir()
        with (aside / file_name).open("w", encoding="utf-8") as file:
            for example in examples:
                file.write(json.dumps(_row(example, aside), ensure_ascii=False) + "\n")
    return out / file_name


def _row(example: Example, root: Path) -> dict[str, object]:
    paths = []
    for image in example.images:
        path = f"images/{image.name}.png"
        (root / path).write_bytes(image.data or b"")
        paths.append(path)
    return {
        "id": example.id,
        "images": paths,
        "question": example.question,
        "answer": example.answer,
        "meta": dict(example.meta),
    }


def run_maker(
    make: Make, tasks: Sequence[str], description: str, argv: Sequence[str] | None
) -> int:
    """The command line of a maker: draw ``--count`` examples of ``--task`` into ``--out``."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--task", choices=tasks, default=tasks[0], help="which task's examples")
    parser.add_argument("--count", type=int, required=True, help="how many examples")
    parser.add_argument("--seed", type=int, default=0, help="same seed, same examples")
    parser.add_argument("--split", default="train", help="another split shares no example")
    parser.add_argument("--out", type=Path, required=True, help="folder to make")
    arguments = parser.parse_args(argv)
    try:
        rows = make(arguments.task, arguments.count, arguments.seed, arguments.split)
        path = write_examples(rows, arguments.out, f"{arguments.task}.jsonl")
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"wrote {len(rows)} examples to {path}")
    return 0
