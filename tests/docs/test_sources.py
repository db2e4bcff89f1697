"""Sources in the guides to other trainers: every cell has one, and a wrong one is found."""

from __future__ import annotations

import re
import subprocess

import pytest
from check_sources import DOCS, Source, find_missing_names, find_problem, read_names, read_sources

COMPARISON = (DOCS / "comparison.md").read_text("utf-8")
COMING_FROM = (DOCS / "coming-from.md").read_text("utf-8")


def read_tables(page: str) -> list[tuple[list[str], list[list[str]]]]:
    tables = re.findall(r"((?:^\|.*\n)+)", page, re.MULTILINE)
    parsed = [
        [[c.strip() for c in line[1:-1].split("|")] for line in t.splitlines()] for t in tables
    ]
    return [(rows[0], rows[2:]) for rows in parsed]


def test_every_cell_of_another_trainer_is_a_link_to_its_source():
    commits = dict(re.findall(r"\[`([\w./-]+)`\]\(https://\S+\) (\w+) \|", COMPARISON))
    sources = read_sources(COMPARISON)
    used: list[str] = []
    for head, rows in read_tables(COMPARISON)[:2]:
        for row in rows:
            for trainer, cell in zip(head, row, strict=True):
                labels = re.findall(r"\]\[([\w-]+)\]", cell)
                assert labels or trainer in ("", "vlm-grpo"), f"{row[0]}: {trainer}"
                used += labels
    assert set(used) == set(sources)
    assert len(used) > 16 * 5 + 13 * 4  # the cells of both tables
    assert all(commits[source.repository] == source.commit for source in sources.values())


def test_every_name_of_another_trainer_has_its_file():
    sources = read_sources(COMING_FROM)
    used: set[str] = set()
    rows = list(read_names(COMING_FROM.partition("\n## Score")[0]))
    for names, labels in rows:
        assert labels or not names, names
        used.update(labels)
    assert used == set(sources)
    assert len(rows) > 100


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("clone")
    (folder / "a").mkdir()
    (folder / "a" / "config.py").write_text("use_vllm: bool = False\n")
    git = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "a"]):
        subprocess.run([*git, *command], check=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True)
    return str(folder), commit.stdout.decode().strip()


@pytest.mark.parametrize(
    ("path", "text", "absent", "problem"),
    [
        ("a/config.py", "use_vllm: bool", False, None),
        ("a", None, False, None),
        ("a", "load_in_4bit", True, None),
        ("a/config.py", "use_sglang", False, "a/config.py lacks the text 'use_sglang'"),
        ("a", "USE_VLLM", True, "a has the text 'USE_VLLM'"),
        ("b", None, False, "x/y has no b at "),
    ],
)
def test_a_wrong_source_is_found(clone, path, text, absent, problem):
    found = find_problem(Source("x/y", clone[1], path, text, absent), clone[0])
    assert found == problem or (found is not None and found.startswith(problem or "?"))


def test_a_name_that_its_file_lacks_is_found(clone):
    page = "| `--use_vllm`, `grpo.vllm` | none | [config.py][x] |\n"
    sources = {"x": Source("x/y", clone[1], "a/config.py", None, False)}
    missing = list(find_missing_names(page, sources, {"x/y": clone[0]}))
    assert missing == ["vllm is in none of a/config.py"]
