"""Reading Parquet files in batches. Imported on demand: pyarrow loads slowly."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pyarrow import ArrowException
from pyarrow.parquet import ParquetFile

from vlm_grpo.data.rows import Row
from vlm_grpo.errors import UserError


def read_parquet(path: Path) -> Iterator[Row]:
    """Yield the file's rows.

    Raises:
        UserError: the file is not a complete Parquet file.
    """
    number = 0
    try:
        with ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=64):
                for values in batch.to_pylist():
                    number += 1
                    yield Row(f"{path} row {number}", number, values)
    except (ArrowException, OSError) as error:
        raise UserError(f"data file {path} cannot be read: {error}") from error
