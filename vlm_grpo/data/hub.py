"""Datasets from the Hugging Face Hub or a local folder. Imported on demand: it loads slowly."""

import glob
import logging
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
from pyarrow.parquet import read_metadata

from vlm_grpo.data.files import CAPTION_QUESTION, CLASS_QUESTION
from vlm_grpo.data.images import IMAGE_SUFFIXES, VIDEO_SUFFIXES
from vlm_grpo.data.rows import Row
from vlm_grpo.errors import UserError

_DEFAULT_SPLITS = {"train": "train", "eval": "test"}
_TEXTS = ("txt", "cls", "cap", "caption", "text")  # suffixes of the text of a WebDataset sample


def read_hub(spec: str, split: str) -> Iterator[Row]:
    """Return the rows of a dataset; of a class label, its name.

    ``spec`` is ``NAME[:SPLIT[:CONFIG]]``, with a name on the hub or a local folder that
    ``load_dataset`` or ``load_from_disk`` reads. If it names no split, ``split`` ("train" or
    "eval") selects ``train`` or ``test``.
    """
    name, _, rest = spec.partition(":")
    split_name, _, config = rest.partition(":")
    if not name:
        raise UserError(f"hf:{spec} names no dataset: write hf:NAME[:SPLIT[:CONFIG]]")
    split_name = split_name or _DEFAULT_SPLITS[split]
    _hide_progress()
    try:
        dataset = _load(name, split_name, config or None)
    except Exception as error:  # the library raises many types for user mistakes
        remedy = ""
        if not Path(name).exists():
            remedy = (
                f"; is {name} its name on huggingface.co/datasets, and the network there? Private "
                "ones need hf auth login; the path of a file or folder needs no hf:"
            )
        elif not rest:
            remedy = f"; for another split write hf:{name}:SPLIT"
        raise UserError(
            f"dataset {name} (split {split_name}) cannot be loaded: {type(error).__name__}: {error}"
            f"{remedy}"
        ) from error
    return read_dataset(dataset, f"hf:{spec}")


def _hide_progress() -> None:
    if not sys.stderr.isatty():  # in a log, each refresh of a progress bar would be a line
        datasets.disable_progress_bars()


def _load(name: str, split_name: str, config: str | None) -> datasets.Dataset:
    folder = Path(name)
    if (folder / "dataset_dict.json").is_file() or (folder / "dataset_info.json").is_file():
        loaded = datasets.load_from_disk(name)
        if not isinstance(loaded, datasets.DatasetDict):
            return loaded
        if split_name not in loaded:
            raise ValueError(f"its splits are {', '.join(map(str, loaded))}: write hf:{name}:SPLIT")
        return loaded[split_name]
    return datasets.load_dataset(name, config, split=split_name)


def read_parquet(path: Path) -> Iterator[Row]:
    """Return the rows of a Parquet file, which ``datasets`` converts to a memory-mapped table."""
    return read_dataset(_load_file("parquet", path), str(path))


def read_tar(path: Path) -> Iterator[Row]:
    """Yield the samples of a WebDataset tar file, which ``datasets`` converts, too.

    The object in a sample's ``.json`` holds the columns; without one, its text is the answer.
    """
    dataset = _load_file("webdataset", path)
    media = {
        kind: [name for name in dataset.column_names if f".{name}".lower().endswith(suffixes)]
        for kind, suffixes in (("images", IMAGE_SUFFIXES), ("videos", VIDEO_SUFFIXES))
    }
    alone = {names[0]: kind for kind, names in media.items() if len(names) == 1}
    for row in read_dataset(dataset.rename_columns(alone), str(path)):
        values, question = dict(row.values), None
        key, columns, _ = (values.pop(name, None) for name in ("__key__", "json", "__url__"))
        for kind, names in media.items():
            if len(names) > 1:
                values[kind] = [v for name in names if (v := values.pop(name)) is not None]
            if names and columns:
                columns.pop(kind.removesuffix("s"), None)  # the name that it had elsewhere
        if columns is None:
            question = CLASS_QUESTION if "cls" in values else CAPTION_QUESTION
            texts = [str(values[n]).strip() for n in _TEXTS if values.get(n) is not None]
            values |= {"answer": texts[0]} if texts else {}
        values = {"id": f"{path.stem}/{key}", **(columns or {}), **values}
        location = f"{path}: sample {key}"
        yield replace(row, location=location, values=values, question=question)


def _load_file(kind: str, path: Path) -> datasets.Dataset:
    _hide_progress()
    # It logs the reason of a failure, which the error below states, too.
    logging.getLogger("datasets.packaged_modules").setLevel(logging.CRITICAL)
    try:
        if kind == "parquet" and not read_metadata(path).num_rows:  # which it does not convert
            return datasets.Dataset.from_dict({})
        return datasets.load_dataset(kind, data_files=glob.escape(str(path)), split="train")
    except Exception as error:  # the library raises many types
        reason = error.__cause__ or error
        raise UserError(f"data file {path} cannot be read: {reason}") from error


def read_dataset(dataset: datasets.Dataset, name: str) -> Iterator[Row]:
    """Yield the rows of a dataset, whose images are read again when they are needed."""
    dataset = _without_decoding(dataset)
    # Reading a cell takes 50 µs from a dataset of one column, and milliseconds from others.
    columns = {name: dataset.select_columns([name]) for name in dataset.column_names}
    labels = {
        name: feature
        for name, feature in dataset.features.items()
        if isinstance(feature, datasets.ClassLabel)
    }
    for number, row in enumerate(dataset, start=1):
        values = dict(row)
        for column, feature in labels.items():
            value = values[column]
            values[column] = None if value is None or value < 0 else feature.int2str(value)
        yield Row(f"{name} row {number}", number, values, cells=(columns, number - 1))


def _without_decoding(dataset: datasets.Dataset) -> datasets.Dataset:
    """Return a dataset that leaves images encoded: decoded, they would fill the memory.

    Its rows hold Python objects: a format such as "torch" is reset, a user's transform is kept.
    """
    try:
        if dataset.format["type"] != "custom":
            dataset = dataset.with_format(None)
        for name, feature in dataset.features.items():
            if (encoded := _as_encoded(feature)) != feature:
                dataset = dataset.cast_column(name, encoded)
        return dataset
    except Exception as error:  # the library raises many types
        raise UserError(
            f"the columns of the Dataset cannot be read: {type(error).__name__}: {error}"
        ) from error


def _as_encoded(feature: Any) -> Any:
    if hasattr(feature, "decode"):  # an image, or what a row has besides
        return replace(feature, decode=False)
    if isinstance(feature, datasets.List):
        return datasets.List(_as_encoded(feature.feature), length=feature.length)
    return feature
