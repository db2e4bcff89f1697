"""Tests of all converters: common arguments, help texts and broken sources."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

import vlm_grpo.data_scripts
from vlm_grpo.data_scripts.converter import Converter

FOLDER = Path(vlm_grpo.data_scripts.__file__).parent
MODULES = sorted(p.stem for p in FOLDER.glob("*.py") if "CONVERTER = " in p.read_text("utf-8"))


def test_the_guide_lists_every_converter():
    guide = Path(__file__).parents[2] / "docs" / "benchmarks.md"
    listed = [name for name in MODULES if f"`{name}`" in guide.read_text(encoding="utf-8")]
    assert listed == MODULES


@pytest.mark.parametrize("name", MODULES)
def test_help_lists_the_common_arguments(name, capsys):
    converter = importlib.import_module(f"vlm_grpo.data_scripts.{name}").CONVERTER
    assert isinstance(converter, Converter)
    with pytest.raises(SystemExit, match="0"):
        converter.main(["--help"])
    output = capsys.readouterr().out
    for option in ("--source", "--images", "--split", "--out", "--limit", "--seed"):
        assert option in output
    assert "--source:" in converter.description, "the docstring must describe --source"
    assert "--images:" in converter.description


@pytest.mark.parametrize("name", MODULES)
def test_a_missing_source_is_one_message(name, tmp_path, capsys):
    converter = importlib.import_module(f"vlm_grpo.data_scripts.{name}").CONVERTER
    source, out = str(tmp_path / "nowhere"), str(tmp_path / "out" / "x.jsonl")
    argv = ["--source", source, "--images", str(tmp_path / "images"), "--out", out]
    assert converter.main(argv) == 1
    message = capsys.readouterr().err
    assert message.startswith("error: ")
    assert "nowhere" in message
    assert not Path(out).exists()


BROKEN = {
    "source.json": b'{"data": [{"id": 1, "im',  # truncated
    "source.jsonl": b"[1, 2, 3]\n",
    "source.parquet": b"\x00\xff\x13no parquet" * 50,
    "source.p": b"\x80\x04\x95\x10\x00\x00",  # a pickle's first bytes
    "source.txt": b"",
}


@pytest.mark.parametrize("file", BROKEN)
@pytest.mark.parametrize("name", MODULES)
def test_a_broken_source_is_one_message_and_no_output(name, file, tmp_path, capsys):
    converter = importlib.import_module(f"vlm_grpo.data_scripts.{name}").CONVERTER
    source, out = tmp_path / file, tmp_path / "out"
    source.write_bytes(BROKEN[file])
    argv = ["--source", str(source), "--images", str(tmp_path / "images")]
    assert converter.main([*argv, "--out", str(out / "x.jsonl")]) == 1
    message = capsys.readouterr().err
    assert message.startswith("error: ")
    assert "Traceback" not in message
    assert not out.exists() or list(out.iterdir()) == []
