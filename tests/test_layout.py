"""CONTRIBUTING.md and the import contract describe the rooms that exist."""

import configparser
import re
from fnmatch import fnmatch
from pathlib import Path

from mutants import find_mutants

ROOT = Path(__file__).parents[1]


def test_contract_and_guide_list_the_rooms_and_files_that_exist():
    contract = configparser.ConfigParser()
    contract.read(ROOT / ".importlinter")
    text = contract["importlinter:contract:rooms"]["layers"]
    layers = [re.findall(r"\w+", line) for line in text.strip().splitlines()]
    guide = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    table = guide.partition("| room | content |")[2].partition("\n\n")[0]
    rows = [row.split("|") for row in table.strip().splitlines()[1:]]
    assert [re.findall(r"`(\w+)`", row[1]) for row in rows] == layers
    walk = guide.partition("| what it becomes |")[2].partition("\n\n")[0]
    files = re.findall(r"`([\w/]+\.py)`", walk)
    assert len(files) > 12
    assert [file for file in files if not (ROOT / "vlm_grpo" / file).is_file()] == []


def test_mutants_change_code_that_exists():
    mutants = find_mutants()  # a ValueError names a written mutant whose text is gone
    assert len({mutant.name for mutant in mutants}) == len(mutants) > 250


def test_every_folder_of_tests_is_collected(pytestconfig):
    folders = {path.parent.name for path in (ROOT / "tests").rglob("test_*.py")}
    patterns = pytestconfig.getini("norecursedirs")
    assert [name for name in folders for pattern in patterns if fnmatch(name, pattern)] == []
