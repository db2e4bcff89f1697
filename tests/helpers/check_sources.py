"""Look up the sources that the guides to other trainers cite, in clones of their repositories.

``python tests/helpers/check_sources.py OWNER/NAME=CLONE …`` reads each cited file at its commit. A
link's title must occur in it, or must not if it starts with "without"; the names in the first
column of a table must occur in one of the files of its last column.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
_DEFINITION = re.compile(
    r"^\[([\w.-]+)\]: https://github\.com/([\w.-]+/[\w.-]+)/(?:blob|tree)/([\w.]+)/(\S+)"
    r"(?: ([\"'])(.+)\5)?$",
    re.MULTILINE,
)
_NAME = re.compile(r"`(?:--)?([\w./<>-]+)")


@dataclass(frozen=True)
class Source:
    repository: str  # owner and name
    commit: str  # or tag
    path: str
    text: str | None  # a text that occurs there; None: only the path is cited
    absent: bool  # the text does not occur there


def read_sources(page: str) -> dict[str, Source]:
    """Return the sources that a page defines, by their labels."""
    return {
        label: Source(repository, commit, path, text.removeprefix("without ") or None, absent)
        for label, repository, commit, path, _, text in _DEFINITION.findall(page)
        for absent in [text.startswith("without ")]
    }


def read_names(page: str) -> Iterator[tuple[list[str], list[str]]]:
    """Yield the names in the first column of each row with sources, and the labels in its last."""
    for line in page.splitlines():
        cells = line.strip("|").split(" | ")
        if line.startswith("| ") and len(cells) == 3:
            names = [re.split(r"[./]", name.strip("<>-"))[-1] for name in _NAME.findall(cells[0])]
            yield [name for name in names if name != "py"], re.findall(r"\]\[(.+?)\]", cells[2])


def find_problem(source: Source, clone: str) -> str | None:
    if _git(clone, "cat-file", "-e", f"{source.commit}:{source.path}") is None:
        return f"{source.repository} has no {source.path} at {source.commit}"
    if source.text is None:
        return None
    case = ["-i"] if source.absent else []
    command = ["grep", *case, "-q", "-F", "-e", source.text, source.commit, "--", source.path]
    if (_git(clone, *command) is None) == source.absent:
        return None
    return f"{source.path} {'has' if source.absent else 'lacks'} the text {source.text!r}"


def find_missing_names(
    page: str, sources: Mapping[str, Source], clones: Mapping[str, str]
) -> Iterator[str]:
    """Yield the names that occur in none of the files of their row."""
    for names, labels in read_names(page):
        cited = [sources[label] for label in labels]
        if any(source.repository not in clones for source in cited):
            continue
        texts = [_git(clones[s.repository], "show", f"{s.commit}:{s.path}") or "" for s in cited]
        for name in names:
            found = any(re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text) for text in texts)
            if cited and not found and not any(name in source.path for source in cited):
                yield f"{name} is in none of {', '.join(source.path for source in cited)}"


def _git(clone: str, *arguments: str) -> str | None:
    done = subprocess.run(["git", "-C", clone, *arguments], capture_output=True, check=False)
    return done.stdout.decode(errors="replace") if done.returncode == 0 else None


def main(arguments: list[str]) -> int:
    clones = dict(argument.split("=", 1) for argument in arguments)
    problems, checked, skipped = [], 0, set()
    for name in ("comparison.md", "coming-from.md"):
        page = (DOCS / name).read_text("utf-8")
        sources = read_sources(page)
        for source in sources.values():
            if source.repository not in clones:
                skipped.add(source.repository)
                continue
            checked += 1
            problems.append(find_problem(source, clones[source.repository]))
        problems += find_missing_names(page, sources, clones)
    wrong = [problem for problem in problems if problem is not None]
    print(*wrong, f"{checked} sources checked, {len(wrong)} wrong", sep="\n")
    if skipped:
        print("without a clone:", *sorted(skipped))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
