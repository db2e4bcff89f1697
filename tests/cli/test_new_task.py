"""``vlm-grpo new-task``: its task loads, is sound, passes its test, and overwrites no file."""

import shlex
from pathlib import Path

import pytest
from commands import run_python, write_jsonl

from vlm_grpo import UserError, load_settings, load_task
from vlm_grpo.cli.new_task import LONGEST_NAME, write_task


def run_test(test: Path) -> None:
    """Run the five tests of a file that was written."""
    options = "-q", "-W", "error", "-p", "no:cacheprovider"
    assert "5 passed" in run_python("-m", "pytest", *options, test, folder=test.parent)


def test_the_task_loads_passes_its_test_and_is_sound_and_the_next_commands_are_printed(
    tmp_path, succeed
):
    file = tmp_path / "tasks/read_clock.py"
    out = succeed("new-task", "read_clock", "--out", file.parent)
    assert f"vlm-grpo check {file} --data" in out
    recipe, *overrides = shlex.split(out.partition("vlm-grpo train ")[2].replace("\\\n", " "))
    settings = load_settings(recipe, overrides)  # nothing is missing in it
    assert settings.model == "Qwen/Qwen2.5-VL-3B-Instruct"
    task = load_task(str(file))
    assert type(task).__name__ == "ReadClock"
    assert task.primary_metric in task.reward_weights()
    assert len(file.read_text().splitlines()) < 60  # short enough to read on one screen
    run_test(file.with_name("test_read_clock.py"))  # one gold answer and four wrong texts
    rows = [{"id": a, "question": "Which color?", "answer": a} for a in ("Blue", "gray")]
    data = write_jsonl(tmp_path / "data.jsonl", *rows)
    assert "ReadClock is sound on this data" in succeed("check", file, "--data", data)


def test_the_environment_passes_its_test_and_the_check(tmp_path, succeed):
    out = succeed("new-environment", "ruler", "--out", tmp_path)
    commands = shlex.split(out.partition("next:")[2].replace("\\\n", " "))
    assert commands[:4] == ["python", "-m", "pytest", str(tmp_path / "test_ruler.py")]
    run_test(tmp_path / "test_ruler.py")
    file = tmp_path / "ruler.py"
    assert len(file.read_text().splitlines()) < 60
    out = succeed("check", "counting", f"environment={file}", "--limit", 4)
    assert "Ruler has the tools enlarge" in out
    assert "reads '<image>'" in out
    assert "the last one reads 'Error: bbox_2d must be a list of 4 numbers'" in out


@pytest.mark.parametrize("kind", ["task", "environment"])
@pytest.mark.parametrize("name", ["a", "w" * LONGEST_NAME])
def test_the_files_pass_ruff(tmp_path, name, kind):
    files = write_task(name, tmp_path, kind)
    config = Path(__file__).parents[2] / "pyproject.toml"
    for check in (["check"], ["format", "--check"]):
        run_python("-m", "ruff", *check, "--config", config, *files)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("ReadClock", "lowercase letters"),
        ("2fast", "starting with a letter"),
        ("../escape", "lowercase letters"),
        ("read__clock", "single underscores"),
        ("", "lowercase letters"),
        ("w" * 41, "40 letters at most"),
        ("class", "keyword of Python"),
        ("json", "json.py would shadow"),
        ("test_clock", "leave out test_"),
    ],
)
def test_an_unsuitable_name_is_refused(tmp_path, name, reason):
    with pytest.raises(UserError, match=reason):
        write_task(name, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("existing", ["clock.py", "test_clock.py"])
def test_no_file_is_overwritten(tmp_path, existing):
    (tmp_path / existing).write_text("mine")
    with pytest.raises(UserError, match=f"{existing} exists"):
        write_task("clock", tmp_path)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]
    with pytest.raises(UserError, match="cannot be written to"):  # its folder is a file
        write_task("sundial", tmp_path / existing)
