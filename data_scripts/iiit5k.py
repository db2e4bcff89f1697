"""IIIT 5K-word: cropped words, 3,000 to test and 2,000 to train.

--source: the folder with testdata.mat and traindata.mat. --images: the same folder.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scipy.io import loadmat

from vlm_grpo.data_scripts.converter import ConvertedRow, Converter, RefusedRow, Request
from vlm_grpo.data_scripts.readers import find_file
from vlm_grpo.errors import UserError

_QUESTION = "What is the word in the image?"


def read(request: Request) -> Iterator[ConvertedRow | RefusedRow]:
    """One row for each word; the lexicons are not used."""
    for record in _records(find_file(request.source, f"{request.split}data.mat"), request.split):
        name = str(record["ImgName"])
        # MATLAB reads some words as numbers.
        yield ConvertedRow(f"iiit5k-{name}", (name,), _QUESTION, [str(record["GroundTruth"])])


def _records(path: Path, split: str) -> Any:
    try:
        return loadmat(path, simplify_cells=True)[f"{split}data"]
    except Exception as error:  # a damaged file can raise nearly anything in SciPy
        raise UserError(f"{path} is corrupt, cut off or not IIIT5K's: {error}") from error


CONVERTER = Converter(__doc__ or "", read, tasks=("ocr",), splits=("test", "train"))

if __name__ == "__main__":
    sys.exit(CONVERTER.main())
