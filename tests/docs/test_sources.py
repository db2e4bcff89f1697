"""Every statement of the guides to other trainers has a source."""

from __future__ import annotations

import re

from guide_commands import ROOT

COMPARISON, COMING_FROM = (
    (ROOT / "docs" / f"{name}.md").read_text("utf-8") for name in ("comparison", "coming-from")
)


def read_sources(page: str) -> dict[str, tuple[str, str]]:
    """Return the repository and commit of each link of a page, by its label."""
    found = re.findall(
        r"^\[([\w.-]+)\]: https://github\.com/([\w.-]+/[\w.-]+)/(?:blob|tree)/([\w.]+)/\S+",
        page,
        re.MULTILINE,
    )
    return {label: (repository, commit) for label, repository, commit in found}


def test_every_statement_about_another_trainer_is_a_link_to_its_source():
    commits = set(re.findall(r"\[`([\w./-]+)`\]\(https://\S+\) ([\w.]+) \|", COMPARISON))
    used: list[str] = []
    for question in COMPARISON.partition("\n## Differences")[0].split("\n## ")[1:]:
        for trainer, text in re.findall(r"^- \*\*(.+)\*\*: (.+)$", question, re.MULTILINE):
            labels = re.findall(r"\]\[([\w-]+)\]", text)
            assert labels or trainer == "vlm-grpo", f"{question.splitlines()[0]}: {trainer}"
            used += labels
    sources = read_sources(COMPARISON)
    assert set(used) == set(sources)
    assert len(used) > 16 * 5 + 13 * 4  # every question, for the trainers and the frameworks
    assert set(sources.values()) == commits


def test_every_name_of_another_trainer_has_its_file():
    rows = [
        line.strip("|").split(" | ")
        for line in COMING_FROM.partition("\n## Score")[0].splitlines()
        if line.startswith("| ")
    ]
    rows = [cells for cells in rows if len(cells) == 3]
    used = {label for cells in rows for label in re.findall(r"\]\[(.+?)\]", cells[2])}
    assert all("][" in cells[2] for cells in rows if "`" in cells[0])
    assert used == set(read_sources(COMING_FROM))
    assert len(rows) > 100
