"""CONTRIBUTING.md describes the code as it is: its layers, its root and its tests."""

from __future__ import annotations

import configparser
import re
from pathlib import Path

import pytest
from mutations import find_mutants, list_test_files

ROOT = Path(__file__).parents[1]
GUIDE = (ROOT / "CONTRIBUTING.md").read_text("utf-8")


def test_table_of_layers_matches_the_contract() -> None:
    contract = configparser.ConfigParser()
    contract.read(ROOT / ".importlinter")
    text = contract["importlinter:contract:layers"]["layers"]
    layers = [re.findall(r"\w+", line) for line in text.strip().splitlines()]
    table = GUIDE.partition("| modules | content |")[2].partition("\n\n")[0]
    rows = [row.split("|") for row in table.strip().splitlines()[1:]]
    assert [re.findall(r"`(\w+)`", row[1]) for row in rows] == layers
    assert all(row[2].strip() for row in rows)


def test_every_module_belongs_to_a_layer() -> None:
    contract = configparser.ConfigParser()
    contract.read(ROOT / ".importlinter")
    layers = re.findall(r"\w+", contract["importlinter:contract:layers"]["layers"])
    folders = {path.parent.name for path in ROOT.glob("vlm_grpo/*/__init__.py")}
    modules = {path.stem for path in ROOT.glob("vlm_grpo/*.py")} - {"__init__"}
    assert folders | modules == set(layers)


def test_package_root_holds_few_modules() -> None:
    # The interface for tasks and the trainer; anything else belongs in a package.
    modules = {path.stem for path in ROOT.glob("vlm_grpo/*.py")} - {"__init__"}
    assert len(modules) <= 10


def test_the_trainer_is_short() -> None:
    # The parts of a step belong in vlm_grpo/grpo, and everything around it in the other packages.
    lines = (ROOT / "vlm_grpo/trainer.py").read_text("utf-8").splitlines()
    assert len(lines) <= 300
    assert sum(line.startswith("from vlm_grpo") for line in lines) <= 15


@pytest.mark.parametrize("folder", ["vlm_grpo", "tasks", "data_scripts", "perf", "tests"])
def test_no_file_is_long(folder: str) -> None:
    files = {
        path: len(path.read_text("utf-8").splitlines()) for path in ROOT.glob(f"{folder}/**/*.py")
    }
    assert files
    assert [path for path, count in files.items() if count > 400] == []


def test_every_module_has_tests() -> None:
    table = GUIDE.partition("| test file | modules |")[2].partition("\n\n")[0]
    listed = set()
    for row in table.strip().splitlines()[1:]:
        test, *modules = re.findall(r"`([\w/]+\.py)`", row)
        assert (ROOT / test).is_file(), f"CONTRIBUTING lists {test}, which does not exist"
        listed |= set(modules)
    modules = {
        path.relative_to(ROOT / "vlm_grpo" if folder == "vlm_grpo" else ROOT).as_posix()
        for folder in ("vlm_grpo", "tasks", "data_scripts")
        for path in (ROOT / folder).rglob("*.py")
        if not path.stem.startswith("__")
    }
    tested = {
        module
        for module in modules
        if (ROOT / "tests" / module).with_name(f"test_{Path(module).name}").is_file()
    }
    assert modules - tested <= listed, "add a test file, or a line in CONTRIBUTING's table of tests"
    assert listed <= modules, "CONTRIBUTING's table of tests lists modules that do not exist"


def test_mutants_change_code_that_exists() -> None:
    mutants = find_mutants()  # a ValueError names a written mutant whose text is gone
    assert len({mutant.name for mutant in mutants}) == len(mutants) > 250
    assert all((ROOT / file).is_file() for mutant in mutants for file in list_test_files(mutant))
