"""Datasets of the Hugging Face hub or a local folder. Imported where one is named."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets

from vlm_grpo.data.rows import Row
from vlm_grpo.errors import UserError

_DEFAULT_SPLITS = {"train": "train", "eval": "test"}


def read_hub(spec: str, split: str) -> tuple[Iterator[Row], Path | None]:
    """The rows of a dataset, and the folder it lies in if it is a local one.

    Args:
        spec: ``NAME[:SPLIT[:CONFIG]]``; NAME is a hub name or a local folder that
            ``load_dataset`` or ``load_from_disk`` reads.
        split: "train" or "eval", for a spec without SPLIT: its split ``train`` or ``test``.

    Raises:
        UserError: there is no such dataset, split or configuration, or it cannot be had.
    """
    name, _, rest = spec.partition(":")
    part, _, config = rest.partition(":")
    part = part or _DEFAULT_SPLITS[split]
    try:
        dataset = _load(name, part, config or None)
        encoded = dataset.cast(_without_decoding(dataset.features))
    except Exception as error:  # the library raises a dozen kinds for what a user can get wrong
        raise UserError(
            f"dataset {name} (split {part}) cannot be loaded: {type(error).__name__}: {error}"
        ) from error
    return _rows(encoded, spec), Path(name) if Path(name).is_dir() else None


def _load(name: str, part: str, config: str | None) -> datasets.Dataset:
    folder = Path(name)
    if (folder / "dataset_dict.json").is_file() or (folder / "dataset_info.json").is_file():
        found = datasets.load_from_disk(name)
        return found[part] if isinstance(found, datasets.DatasetDict) else found
    return datasets.load_dataset(name, config, split=part)


def _rows(dataset: datasets.Dataset, spec: str) -> Iterator[Row]:
    for number, values in enumerate(dataset, start=1):
        yield Row(f"hf:{spec} row {number}", number, dict(values))


def _without_decoding(features: datasets.Features) -> datasets.Features:
    """The same columns with images left as encoded bytes: decoding all would fill the memory."""
    return datasets.Features({name: _encoded(feature) for name, feature in features.items()})


def _encoded(feature: Any) -> Any:
    if isinstance(feature, datasets.Image):
        return datasets.Image(decode=False)
    if isinstance(feature, datasets.List):
        return datasets.List(_encoded(feature.feature), length=feature.length)
    return feature
