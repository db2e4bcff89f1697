"""``vlm-grpo export``: wrong arguments. tests/deploy/test_export.py covers the exported models."""

from __future__ import annotations

import pytest
from commands import fails


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--step", "best"], "write embedded@best"),
        (["--dtype", "int8"], "dtype is 'int8'; it must be float32 or bfloat16"),
        ([], "there are no trained weights to export"),
        (["--dry-run"], "--public and --dry-run have no effect without --push NAME"),
        (["--push", "a/b/c"], "--push a/b/c is not a name on the hub (OWNER/NAME)"),
    ],
)
def test_wrong_arguments_are_one_message(capsys, tmp_path, arguments, message):
    assert message in fails(capsys, "export", "embedded", tmp_path / "out", *arguments)
    assert not (tmp_path / "out").exists()
