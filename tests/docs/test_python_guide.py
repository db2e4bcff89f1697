"""Every Python snippet of docs/python.md runs, in order and as it is written."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from PIL import Image

PAGE = Path(__file__).parents[2] / "docs/python.md"


def test_the_snippets_run_in_order(tmp_path, monkeypatch, capsys):
    text = PAGE.read_text("utf-8")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}

    for block in re.finditer(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        line = text[: block.start(1)].count("\n")
        exec(compile("\n" * line + block[1], str(PAGE), "exec"), names)

    printed = capsys.readouterr().out
    assert "before, " in printed
    assert "fits       yes" in printed
    assert names["result"].checkpoint == Path("runs/dots/checkpoints/step-6")
    assert names["scores"].n == 12
    assert len(names["answers"]) == 3
    assert (names["folder"] / "model.safetensors").is_file()
    Image.open("answer.png").close()
    config = Path("runs/dots/config.yaml").read_text("utf-8")
    # What the page says about objects in saved settings; a class of a file has the file's path.
    assert "train: python" in config
    assert "task: <class Dots>" in config
    assert "tolerance: 4" in config
