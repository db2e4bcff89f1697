"""IIIT 5K-word: cropped words, 3,000 for testing and 2,000 for training.

--source: the folder with testdata.mat and traindata.mat. --images: the same folder.
"""

from pathlib import Path
from typing import Any

from scipy.io import loadmat

from vlm_grpo.data_scripts.converter import ConvertedRow, Request, Rows, converter
from vlm_grpo.errors import UserError

_QUESTION = "What is the word in the image?"


def _read_entries(path: Path, split: str) -> Any:
    try:
        return loadmat(path, simplify_cells=True)[f"{split}data"]
    except Exception as error:  # SciPy raises many types on a damaged file
        raise UserError(f"{path} is corrupt, truncated or not a file of IIIT5K: {error}") from error


@converter(tasks=("ocr",), splits={"test": 3_000, "train": 2_000})
def convert(request: Request) -> Rows:
    """Yield one row per word; the lexicons are not used."""
    for entry in _read_entries(request.find_file(f"{request.split}data.mat"), request.split):
        name = str(entry["ImgName"])
        # MATLAB reads some words as numbers.
        yield ConvertedRow(f"iiit5k-{name}", (name,), _QUESTION, [str(entry["GroundTruth"])])
