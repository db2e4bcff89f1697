"""What is installed: the wheel's files, the pinned versions, and a run outside the checkout."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

# Package directories in the checkout, and where the wheel has them.
INSTALLED_AS = {
    "vlm_grpo": "vlm_grpo",
    "tasks": "vlm_grpo/tasks",
    "configs": "vlm_grpo/configs",
    "data_scripts": "vlm_grpo/data_scripts",
}

# Addresses and options that tie an install to one place; put together here so that this file
# does not hold them itself.
TIED_TO_A_PLACE = [
    ".".join(parts)
    for parts in [
        ("pypi", "org"),
        ("files", "pythonhosted", "org"),
        ("download", "pytorch", "org"),
        ("registry", "npmjs", "org"),
    ]
] + ["--" + "-".join(words) for words in [("index", "url"), ("extra", "index"), ("find", "links")]]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy, so that no build folder is left in the checkout."""
    source = tmp_path_factory.mktemp("source")
    for name in INSTALLED_AS:
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, source / name, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    built = tmp_path_factory.mktemp("wheel")
    _pip("wheel", "--no-build-isolation", "--no-deps", "--wheel-dir", str(built), str(source))
    (found,) = built.glob("vlm_grpo-*.whl")
    return found


def test_the_wheel_holds_every_file_of_the_package(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    expected = {
        f"{target}/{path.relative_to(ROOT / source).as_posix()}"
        for source, target in INSTALLED_AS.items()
        for path in (ROOT / source).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert "vlm_grpo/tasks/counting.py" in expected
    assert "vlm_grpo/configs/quickstart.yaml" in expected
    assert expected <= names, f"missing from the wheel: {sorted(expected - names)}"


def test_the_wheel_installs_one_top_level_package(wheel: Path) -> None:
    # A top-level `tasks` would be shadowed by anybody's tasks.py, and shadow it in turn.
    top = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    version = PROJECT["project"]["version"]
    assert top == {"vlm_grpo", f"vlm_grpo-{version}.dist-info"}


def test_every_package_directory_is_listed_for_setuptools() -> None:
    listed = set(PROJECT["tool"]["setuptools"]["packages"])
    found = {
        ".".join([*target.split("/"), *path.parent.relative_to(ROOT / source).parts])
        for source, target in INSTALLED_AS.items()
        for path in (ROOT / source).rglob("__init__.py")
    }
    assert found == listed


def test_every_installed_library_is_pinned() -> None:
    pins = _pins()
    assert len(pins) > 50  # the closure of torch, transformers and the test tools is about 110
    declared = PROJECT["project"]["dependencies"]
    declared = declared + PROJECT["project"]["optional-dependencies"]["dev"]
    missing = {name for name in _closure(declared) if name not in pins}
    assert not missing, f"not in constraints.txt: {sorted(missing)}"


def test_the_pins_satisfy_the_declared_dependencies() -> None:
    pins = _pins()
    project = PROJECT["project"]
    for text in project["dependencies"] + project["optional-dependencies"]["dev"]:
        requirement = Requirement(text)
        version = pins[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), f"{text} against {version}"
        assert "+" not in version, f"{text}: a local version is not in every index"


@pytest.mark.parametrize("place", TIED_TO_A_PLACE)
def test_no_tracked_file_is_tied_to_a_package_index(place: str) -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    found = subprocess.run(
        ["git", "grep", "-nIF", "-e", place, "--", "."],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 1, found.stdout + found.stderr  # 1: git grep found nothing


def test_the_makefile_names_the_python_it_needs(tmp_path: Path) -> None:
    old = tmp_path / "python-old"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    made = subprocess.run(
        ["make", "quickstart", f"PYTHON={old}", f"VENV={tmp_path / 'venv'}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode != 0
    assert "needs Python 3.11, 3.12 or 3.13" in made.stderr
    assert not (tmp_path / "venv").exists()


def test_the_installed_wheel_works_outside_the_checkout(wheel: Path, tmp_path: Path) -> None:
    home = tmp_path / "venv"
    venv.create(home, with_pip=False)
    python = home / "bin" / "python"
    (site,) = home.glob("lib/python*/site-packages")
    _pip("--python", str(python), "install", "--no-deps", "--no-index", str(wheel))
    # The libraries are those of this environment, after the wheel on the path. Its .pth files
    # are not read from there, so the editable install of the checkout stays out.
    libraries = Path(pytest.__file__).parents[1]
    (site / "libraries.pth").write_text(f"{libraries}\n")
    empty = tmp_path / "empty"
    empty.mkdir()
    where = _run([str(python), "-c", "import vlm_grpo; print(vlm_grpo.__file__)"], empty)
    assert Path(where.strip()).is_relative_to(home)
    tasks = _run([str(home / "bin" / "vlm-grpo"), "tasks"], empty)
    assert {"counting", "grounding", "ocr"} <= set(re.findall(r"\w+", tasks))


def _pip(*arguments: str) -> None:
    _run([sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments])


def _run(command: list[str], folder: Path | None = None) -> str:
    hidden = {"PYTHONPATH", "COV_CORE_SOURCE"}
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
    return done.stdout


def _pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().split()
    pins = dict(line.split("==") for line in lines)
    return {canonicalize_name(name): version for name, version in pins.items()}


def _closure(declared: list[str]) -> set[str]:
    """Names of what is installed here on behalf of the declared requirements, extras included."""
    found: set[str] = set()
    seen: set[tuple[str, str]] = set()
    todo = [Requirement(text) for text in declared]
    while todo:
        requirement = todo.pop()
        name = canonicalize_name(requirement.name)
        for extra in {"", *requirement.extras} - {e for n, e in seen if n == name}:
            seen.add((name, extra))
            try:
                needs = requires(name) or []
            except PackageNotFoundError:  # an extra's library that this machine does without
                continue
            found.add(name)
            for need in map(Requirement, needs):
                if need.marker is None or need.marker.evaluate({"extra": extra}):
                    todo.append(need)
    return found
