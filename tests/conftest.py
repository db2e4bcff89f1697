"""What every test runs under: one thread, no network, fixed seeds, and checked tensor shapes."""

import contextlib
import gc
import os
import random
import re
import sys
import tempfile
import threading
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

# Set before torch and the hub's client are imported, for they read these once. One thread a
# process: the tests run in several processes, and their small tensors gain nothing from more.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("HF_DATASETS_CACHE", os.path.join(tempfile.gettempdir(), "vlm-grpo-tests"))

import jaxtyping
import numpy as np
import pytest
from forked import leave_writes_to_the_system
from hypothesis import settings
from jaxtyping import install_import_hook

leave_writes_to_the_system()

# A machine may be busy: no example has a time limit.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")

jaxtyped = jaxtyping.jaxtyped


def decorate_if_checked(**options: Any) -> Any:
    """Return jaxtyping's decorator, which leaves inner functions as they are in tests that do not
    check shapes: they are decorated anew at each call of the function around them."""
    decorate = jaxtyped(**options)

    def choose(function: Any) -> Any:
        is_inner = "<locals>" in function.__qualname__
        return function if is_inner and jaxtyping.config.jaxtyping_disable else decorate(function)

    return choose


# Checks the annotations of these packages: a tensor of a wrong shape or type fails where it enters.
# The hook must be installed before they are imported.
jaxtyping.jaxtyped = decorate_if_checked
install_import_hook(["vlm_grpo.training.objective", "vlm_grpo.model"], "type_checks.check_types")


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps of the embedded model, evaluated after each, with another budget."""
    root = tmp_path_factory.mktemp("runs")
    overrides = [
        f"output_dir={root}", "name=run", "optim.max_steps=3", "optim.prompts_per_step=4",
        "optim.warmup_steps=0", "optim.lr=1e-3", "evaluation.every=1", "checkpoint.every=1",
        "data.train_limit=40", "data.eval_limit=40", "policy.lora.r=8", "checkpoint.keep_last=0",
        "policy.max_pixels=3136",
    ]  # fmt: skip
    load_settings = import_module("vlm_grpo.config.recipes").load_settings
    import_module("vlm_grpo.training.trainer").train(load_settings("counting", overrides))
    return root / "run"


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small random model, which no test changes."""
    return import_module("small_runs").save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def _seeds() -> None:
    """Every test starts from the same random states, whatever ran before it."""
    random.seed(0)
    np.random.seed(0)
    # manual_seed of torch itself formats the stack for devices that are not here.
    torch = import_module("torch")
    (torch if torch.cuda.is_available() else torch.default_generator).manual_seed(0)


@pytest.fixture(autouse=True)
def _form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare the first samples of a run with transformers in tests that check shapes only; it is a
    tenth of a small run, and always has the same result for the same model."""
    if request.node.get_closest_marker("no_shapes"):

        def choose(policy: Any, prompts: Any) -> None:
            if policy.sharing_check is not None and prompts:
                policy.sharing_check.choose(prompts)

        monkeypatch.setattr("vlm_grpo.model.policy.Policy.check_sharing", choose)


@contextlib.contextmanager
def untraced() -> Iterator[None]:
    """Pause the tracers of coverage, which double the time. With several processes (-n) pytest-cov
    starts two, and its marker ``no_cover`` stops only one."""
    trace, trace_of_threads = sys.gettrace(), threading.gettrace()
    sys.settrace(None)
    threading.settrace(None)
    try:
        yield
    finally:
        threading.settrace(trace_of_threads)
        sys.settrace(trace)


def run_phase(item: pytest.Item) -> Iterator[Any]:
    """Run a phase of a test with the tracers and the checks of shapes only if the test has them."""
    jaxtyping.config.update("jaxtyping_disable", bool(item.get_closest_marker("no_shapes")))
    with untraced() if item.get_closest_marker("no_cover") else contextlib.nullcontext():
        return (yield)


pytest_runtest_setup = pytest.hookimpl(wrapper=True)(run_phase)
pytest_runtest_call = pytest.hookimpl(wrapper=True, trylast=True)(run_phase)


LONG = (
    *("test_guides.py", "test_ranks.py", "test_examples.py", "test_wiring.py", "test_perf.py"),
    *("test_plan.py", "test_graphs.py", "test_shared.py", "test_steps_ahead.py"),
    *("test_trainer.py", "test_every_family.py", "test_reward_hacking.py", "test_export.py"),
)
"""Files that take longest, and start first."""

MEASURED = re.compile(
    r"(training/objective/(?!test_brute)|config/test_objective|tasks/graders/|test_types"
    r"|task/test_(?!registry|drawing)|data/test_(images|videos))"
)
"""Test files of the modules whose coverage is measured; ``pyproject.toml`` lists these modules."""


CHECKED = re.compile(r"(training/objective|model)/|training/test_trainer_chats")
"""Test files of the packages whose annotations are checked, and a run that joins them."""


def find_path(node: pytest.Item | pytest.Collector) -> str:
    """Return the path of a test file relative to this folder."""
    return os.path.relpath(node.path, Path(__file__).parent)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[Any]:
    """Import the test files untraced, but for those by which coverage is measured, and after its
    modules; PyTorch first here: a process that only hands out tests (-n) starts without it."""
    with untraced():
        import_module("torch").set_num_threads(1)
    formulas = (f"training.objective.{name}" for name in ("advantages", "custom", "losses"))
    graders = (f"tasks.graders.{name}" for name in ("average_precision", "tables"))
    for module in (*formulas, "config.objective", "task", "task.scores", *graders):
        import_module(f"vlm_grpo.{module}")
    with contextlib.nullcontext() if MEASURED.match(find_path(collector)) else untraced():
        return (yield)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run files with slow tests first; skip ``gpu`` tests on CPUs. Coverage and shapes are measured
    and checked by own tests: tracing adds a third to a test's time, and checks double it."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    has_gpu = import_module("torch").cuda.is_available()
    for item in items:
        if item.get_closest_marker("gpu") and not has_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        path = find_path(item)
        if item.get_closest_marker("slow") or not MEASURED.match(path):
            item.add_marker(pytest.mark.no_cover)
        if item.get_closest_marker("slow") or not CHECKED.match(path):
            item.add_marker(pytest.mark.no_shapes)
    # Each process runs whole files (pyproject.toml). The long ones come first, so that all
    # processes end at about the same time.
    items.sort(key=lambda item: (item.path.name not in LONG, item.path not in slow))


def pytest_collection_finish() -> None:
    """Leave the millions of objects of the imported libraries out of later collections, which would
    take a third of a small run to visit them."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # what is left at the end of Python would be reported as leaked
