"""Charades-STA: sentences and the intervals of videos in which they happen.

A line of the annotations is ``VIDEO START END##SENTENCE``, in seconds. Intervals without a length
are left out; ends after the end of the video are kept, as in Time-R1's evaluation.

--source: charades_sta_test.txt or charades_sta_train.txt, or a folder with them.
--images: the folder of Charades' videos (Charades_v1 or Charades_v1_480, VIDEO.mp4).
"""

import re
from pathlib import Path

from vlm_grpo.data_scripts.converter import ConvertedRow, RefusedRow, Request, Rows, converter

_LINE = re.compile(r"(\w+) (\d+(?:\.\d+)?) (\d+(?:\.\d+)?)\s*##(.+)")


@converter(tasks=("temporal",), splits={"test": 3_720, "train": 12_408})
def convert(request: Request) -> Rows:
    path = Path(request.source)
    path = path / f"charades_sta_{request.split}.txt" if path.is_dir() else path
    for number, line in enumerate(path.read_text("utf-8").splitlines()):
        name, found = f"{request.split}-{number}", _LINE.fullmatch(line.strip())
        if found is None:
            raise ValueError(f"line {number + 1} is not VIDEO START END##SENTENCE")
        video, start, end, sentence = found.groups()
        if float(start) >= float(end):
            yield RefusedRow(name, "its interval has no length", line.strip(), "excluded")
            continue
        question = sentence.strip().removesuffix(".")
        interval, meta = [float(start), float(end)], {"video_id": video}
        yield ConvertedRow(name, (), question, interval, meta, (f"{video}.mp4",))
