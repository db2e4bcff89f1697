"""Random commands that run no model: each ends in a result or one message (helpers/fuzz.py)."""

from commands import run
from fuzz import MODEL_FREE, try_command, write_template
from report_runs import make_run


def test_random_commands_end_in_a_result_or_one_message(capsys, tmp_path, monkeypatch):
    template = write_template(tmp_path / "template", runs=())
    for name in ("mine", "counting"):
        make_run(template / "runs", steps=2, overrides={"name": name})

    def run_here(words, folder, environment):
        with monkeypatch.context() as patch:
            patch.chdir(folder)
            for name, value in environment.items():
                patch.setenv(name, value)
            status, out, err = run(capsys, *words)
        return status, out + err

    for number in range(70):
        found = try_command(template, f"test-{number}", MODEL_FREE, run_here)
        assert found["problems"] == [], found
