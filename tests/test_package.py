"""The distribution: its files, the pinned versions, and a run from the wheel in an empty folder."""

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
from subprocess import PIPE, STDOUT
from typing import Any

import pytest
import torch
import yaml
from guide_commands import read_commands
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

UNLOCKED = ("openenv", "verifiers")  # extras that ask for older versions of Pillow and each other
# Package directories in the checkout, and their paths in the wheel.
INSTALLED_AS = {
    "vlm_grpo": "vlm_grpo",
    "tasks": "vlm_grpo/tasks",
    "environments": "vlm_grpo/environments",
    "configs": "vlm_grpo/configs",
    "data_scripts": "vlm_grpo/data_scripts",
}

# Addresses and options that tie an install to one package index; joined here so that this file does
# not contain them.
HOSTS = "pypi:org files:pythonhosted:org download:pytorch:org registry:npmjs:org"
OPTIONS = "--index:url --extra:index --find:links"
PACKAGE_INDEXES = [*HOSTS.replace(":", ".").split(), *OPTIONS.replace(":", "-").split()]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the wheel of a source distribution, built from a copy: the checkout gets no files."""
    source, built = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("built")
    for name in INSTALLED_AS:
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, source / name, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = f"from setuptools.build_meta import build_sdist; build_sdist({str(built)!r})"
    _run([sys.executable, "-c", build], source)
    (sdist,) = map(str, built.glob("vlm_grpo-*.tar.gz"))
    _pip("wheel", "--no-build-isolation", "--no-deps", "--wheel-dir", str(built), sdist)
    (found,) = built.glob("vlm_grpo-*.whl")
    return found


def test_wheel_contains_every_file_in_one_top_level_package(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    expected = {
        f"{target}/{path.relative_to(ROOT / source).as_posix()}"
        for source, target in INSTALLED_AS.items()
        for path in (ROOT / source).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {"vlm_grpo/tasks/counting.py", "vlm_grpo/configs/quickstart.yaml"} <= expected
    assert expected <= names, f"missing from the wheel: {sorted(expected - names)}"
    # A top-level package `tasks` would conflict with any tasks.py of a user.
    version = PROJECT["project"]["version"]
    assert {name.split("/")[0] for name in names} == {"vlm_grpo", f"vlm_grpo-{version}.dist-info"}


def test_constraints_and_lock_pin_every_library_as_it_is_required():
    given = (line.split("==") for line in (ROOT / "constraints.txt").read_text().split())
    pins = {canonicalize_name(name): version for name, version in given}
    assert len(pins) > 50  # torch, transformers, the tools and their dependencies are about 150
    missing = {name for name in _find_closure(_list_requirements()) if name not in pins}
    assert not missing, f"not in constraints.txt: {sorted(missing)}; run make lock"
    for text in _list_requirements():
        requirement = Requirement(text)
        version = pins[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), f"{text} against {version}; run make lock"
        assert "+" not in version, f"{text}: a local version is not in every index"
    lock = (ROOT / "requirements.lock").read_text()
    locked = re.findall(r"^([\w.-]+)==([^ ;]+)", lock, re.MULTILINE)
    assert pins == {canonicalize_name(name): pin for name, pin in locked}
    unhashed = re.findall(r"^[\w.-]+==.*[^\\]$", lock, re.MULTILINE)
    assert not unhashed, "these requirements have no hash"


def test_no_tracked_file_names_a_package_index():
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    patterns = [word for address in PACKAGE_INDEXES for word in ("-e", address)]
    _run(["git", "grep", "-nIF", *patterns, "--", "."], ROOT, status=1)  # it found nothing


def test_makefile_names_the_required_python(tmp_path):
    old = tmp_path / "python-old"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    home = tmp_path / "venv"
    made = _run(["make", "quickstart", f"PYTHON={old}", f"VENV={home}"], ROOT, status=2)
    assert "needs Python 3.11, 3.12 or 3.13" in made
    assert not home.exists()


def test_dockerfile_runs_the_commands_of_the_readme():
    commands = set(read_commands(ROOT / "README.md"))
    steps = re.findall(r"^RUN (.*)", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert steps
    assert set(steps) <= commands


def test_versions_agree():
    version = PROJECT["project"]["version"]
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == version
    releases = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert releases[0] == version


@pytest.mark.slow
def test_an_installed_wheel_lists_its_tasks_and_trains_in_an_empty_folder(wheel, tmp_path):
    """In a new environment that has the wheel and the libraries used here."""
    home, folder = tmp_path / "venv", tmp_path / "empty"
    folder.mkdir()
    venv.create(home, with_pip=False)
    _pip("--python", str(home / "bin/python"), "install", "--no-deps", "--no-index", str(wheel))
    # The libraries follow the wheel on the path. Their .pth files are not processed there, so the
    # checkout's editable install is not importable. PEFT imports bitsandbytes, an extra, where
    # it is installed; the import takes a second, so it is hidden.
    (site,) = home.glob("lib/python*/site-packages")
    libraries = {str(Path(module.__file__ or "").parents[1]) for module in (pytest, torch)}
    lines = [*sorted(libraries), "import sys; sys.modules['bitsandbytes'] = None"]
    (site / "libraries.pth").write_text("\n".join(lines) + "\n")
    python, program = str(home / "bin/python"), str(home / "bin/vlm-grpo")
    where = _run([python, "-c", "import vlm_grpo; print(vlm_grpo.__file__)"], folder)
    assert Path(where.splitlines()[-1]).is_relative_to(home)
    assert {"counting", "grounding", "ocr"} <= {
        *re.findall(r"\w+", _run([program, "tasks"], folder))
    }
    settings = ["optim.max_steps=2", "optim.warmup_steps=0", "data.eval_limit=8"]
    settings += ["data.train_limit=40", "optim.prompts_per_step=2", "rollout.num_generations=2"]
    output = _run([program, "train", "quickstart", *settings], folder)
    assert re.search(r"^after +exact .*\(n = 8\)$", output, re.MULTILINE), output
    assert (folder / "runs/quickstart/report.html").is_file()


def _pip(*arguments: str) -> None:
    _run([sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments])


def _run(command: list[str], folder: Path | None = None, status: int = 0) -> str:
    """Run a command, which must end with this status, and return what it prints."""
    hidden = {"PYTHONPATH", "COV_CORE_SOURCE"}
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    given: Any = {"cwd": folder, "env": environment, "stdout": PIPE, "stderr": STDOUT, "text": True}
    done = subprocess.run(command, check=False, **given)
    assert done.returncode == status, f"{' '.join(command)}\n{done.stdout}"
    return done.stdout


def _list_requirements() -> list[str]:
    """Return the declared requirements, including those of all extras that are locked."""
    found = PROJECT["project"]["optional-dependencies"].items()
    extras = [requirements for name, requirements in found if name not in UNLOCKED]
    return [*PROJECT["project"]["dependencies"], *(text for extra in extras for text in extra)]


def _find_closure(declared: list[str]) -> set[str]:
    """Return the names of all libraries installed here for the declared requirements."""
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
            except PackageNotFoundError:  # a library of an extra that is not installed here
                continue
            found.add(name)
            for need in map(Requirement, needs):
                if need.marker is None or need.marker.evaluate({"extra": extra}):
                    todo.append(need)
    return found
