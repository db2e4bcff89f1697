"""Run a command in this process, as a user would from a shell."""

from __future__ import annotations

import pytest

from vlm_grpo import cli


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of one command."""
    with pytest.raises(SystemExit) as caught:
        cli.main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return int(caught.value.code or 0), out, err


def fails(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The one message of a command that fails as it should: status 2, no traceback."""
    status, _, err = run(capsys, *arguments)
    assert status == 2
    assert "Traceback" not in err
    return err
