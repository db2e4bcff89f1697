"""``vlm-grpo doctor``: wrong arguments. tests/model/test_doctor.py covers the report."""

from __future__ import annotations

import pytest
from commands import fails


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dtype", "int8"], "--dtype is 'int8'; it is float32 or bfloat16"),
        (["--image", "none.png"], "image none.png cannot be read"),
    ],
)
def test_wrong_arguments_are_one_message(capsys, arguments, message):
    assert message in fails(capsys, "doctor", "embedded", *arguments)
