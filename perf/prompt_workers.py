"""How long a step waits for its prompts, and the training process's CPU time for them.

They are prepared in the training process or by workers.

Photos of 4000 x 3000 pixels are read, resized and split into patches for Qwen2.5-VL. Between two
steps the process sleeps for ``--compute`` seconds, as one that waits for a GPU does; meanwhile the
next step's prompts are prepared. Each photo is used once. The first step, in which workers start,
is not counted.

    python perf/prompt_workers.py --workers 0 2 0 2 --out perf/results/prompt_workers.json
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from PIL import Image

from vlm_grpo.config.recipes import load_settings
from vlm_grpo.data.stream import ExampleStream
from vlm_grpo.model.policy import load_policy
from vlm_grpo.task import PlainQuestion
from vlm_grpo.training.prompt_loader import PromptLoader
from vlm_grpo.types import Example, ImageRef

SIZE = (4000, 3000)


def write_photos(folder: Path, count: int) -> list[Example]:
    """Write JPEG files of 3 to 4 MB with smooth areas and noise, as photos have."""
    random = np.random.default_rng(0)
    examples = []
    for number in range(count):
        coarse = random.integers(0, 256, (30, 40, 3), dtype=np.uint8)
        smooth = np.array(Image.fromarray(coarse).resize(SIZE, Image.Resampling.BICUBIC))
        noise = random.integers(0, 24, smooth.shape, dtype=np.uint8)
        path = folder / f"{number}.jpg"
        Image.fromarray(smooth // 2 + noise).save(path, quality=85)
        image = ImageRef(path.name, SIZE, SIZE, path)
        examples.append(Example(str(number), (image,), "What is it?", ""))
    return examples


def measure(
    examples: list[Example], workers: int, options: argparse.Namespace
) -> tuple[list[float], list[float]]:
    """Return the seconds that each step waits for its prompts, and this process's CPU seconds."""
    overrides = [f"policy.max_pixels={options.pixels**2}", "policy.min_pixels=784"]
    policy = load_policy(load_settings("counting", overrides))
    stream = ExampleStream(examples, seed=0)
    loader = PromptLoader(policy, PlainQuestion(), stream, False, workers)
    waits, used = [], []
    for start in range(0, len(examples), options.prompts):
        indices = range(start, start + options.prompts)
        began = time.perf_counter()
        loader.load(indices)
        waits.append(time.perf_counter() - began)
        used.append(time.process_time())
        if indices.stop < len(examples):
            loader.prefetch(range(indices.stop, indices.stop + options.prompts))
            time.sleep(options.compute)
    loader.close()
    return waits[1:], [after - before for before, after in itertools.pairwise(used)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 2, 0, 2])
    parser.add_argument("--steps", type=int, default=4, help="measured steps")
    parser.add_argument("--prompts", type=int, default=8, help="prompts per step")
    parser.add_argument("--pixels", type=int, default=672, help="edge of the resized images")
    parser.add_argument("--compute", type=float, default=1.0, help="seconds between two steps")
    parser.add_argument("--out", type=Path, help="JSON file for the seconds")
    options = parser.parse_args()
    results = []
    with TemporaryDirectory() as folder:
        examples = write_photos(Path(folder), options.prompts * (options.steps + 1))
        for workers in options.workers:
            waits, used = measure(examples, workers, options)
            results.append({"workers": workers, "seconds": waits, "cpu_seconds": used})
            print(
                f"{workers} workers: waits {statistics.median(waits):.2f} s ({min(waits):.2f} to "
                f"{max(waits):.2f}), CPU {statistics.median(used):.2f} s",
                flush=True,
            )
    if options.out:
        setup = {name: str(value) for name, value in vars(options).items()}
        setup["cores"] = str(os.cpu_count())
        options.out.write_text(json.dumps({"setup": setup, "waits": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
