"""Tasks by name, file and entry point, with real files and real package metadata."""

from __future__ import annotations

from typing import Any

import pytest

from vlm_grpo.errors import UserError
from vlm_grpo.task import Task
from vlm_grpo.task.coordinates import PERMILLE
from vlm_grpo.task.names import get_options, get_task_name
from vlm_grpo.task.registry import check_trainable, load_task, load_task_class, task_names
from vlm_grpo.types import Example

PARITY = '''
from __future__ import annotations

from vlm_grpo.task import Task, reward


class Parity(Task):
    """Is the number odd or even?"""

    primary_metric = "right"
    lenient: bool = False
    words: tuple[str, ...] = ("odd", "even")
    share: float = 0.5

    def parse(self, text, example):
        return text if text in self.words else None

    def write(self, answer, example):
        return answer

    @reward(weight=2.0)
    def right(self, answer, example):
        return float(answer == example.answer)
'''


@pytest.fixture
def parity(tmp_path):
    path = tmp_path / "parity.py"
    path.write_text(PARITY)
    return path


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Install a package with a task as an entry point, in the layout of pip."""

    def _install(package: str, name: str, module_text: str = PARITY, value: str = ":Parity"):
        site = tmp_path / f"site-{package}"
        metadata = site / f"{package}-1.0.dist-info"
        metadata.mkdir(parents=True)
        (site / f"{package}.py").write_text(module_text)
        (metadata / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n"
        )
        (metadata / "entry_points.txt").write_text(f"[vlm_grpo.tasks]\n{name} = {package}{value}\n")
        monkeypatch.syspath_prepend(site)

    return _install


def get_error(name: str, **options: object) -> str:
    with pytest.raises(UserError) as caught:
        load_task(name, **options)
    return str(caught.value)


@pytest.mark.parametrize("name", ["counting", "grounding", "ocr"])
def test_built_in_tasks_are_listed_and_load(name):
    assert name in task_names()
    assert load_task(name, tags=True).tags


def test_a_task_file_loads_and_scores(parity):
    task = load_task(str(parity), lenient=True, words=["odd", "even"])

    assert task.score("odd", Example("1", (), "3?", "odd")).total == 2.0  # its one reward's weight
    assert load_task_class(str(parity)).__name__ == "Parity"


def test_an_error_in_a_task_file_names_the_line(parity):
    parity.write_text("import math\nmath.nothing\n")

    assert "line 2: AttributeError" in get_error(str(parity))


def test_a_syntax_error_in_a_task_file_is_reported(parity):
    parity.write_text("def (:\n")

    assert f"{parity} cannot be loaded: SyntaxError" in get_error(str(parity))


def test_one_of_several_tasks_in_a_file_is_selected_by_name(parity):
    parity.write_text(PARITY + "\n\nclass Other(Parity):\n    pass\n")

    assert "defines 2 task classes" in get_error(str(parity))
    assert load_task_class(f"{parity}:Other").__name__ == "Other"
    assert "no task class Othr (did you mean Other?)" in get_error(f"{parity}:Othr")


def test_a_class_with_an_underscore_is_loaded_only_by_its_name(parity):
    parity.write_text(PARITY + "\n\nclass _Hidden(Parity):\n    pass\n")

    assert load_task_class(str(parity)).__name__ == "Parity"
    hidden = load_task_class(f"{parity}:_Hidden")
    assert load_task_class(get_task_name(hidden)).__name__ == "_Hidden"


def test_fields_that_the_constructor_does_not_take_are_no_options(parity):
    fields = "share: float = 0.5\n    total: float = field(init=False, default=1.0)"
    parity.write_text(
        PARITY.replace("share: float = 0.5", fields).replace(
            "from vlm_grpo", "from dataclasses import field\n\nfrom vlm_grpo", 1
        )
    )
    task = load_task(str(parity), share=0.25)

    assert load_task(task, lenient=True).share == 0.25  # type: ignore[attr-defined]
    assert get_options(task) == {"share": 0.25}
    assert "unknown option total" in get_error(str(parity), total=2.0)


def test_a_file_without_a_task_is_refused(parity):
    parity.write_text("from vlm_grpo.task import Task\n")

    assert f"{parity} defines 0 task classes" in get_error(str(parity))


def test_a_missing_task_file_is_refused(tmp_path):
    assert "no task file" in get_error(str(tmp_path / "none.py"))


def test_an_incomplete_task_error_lists_everything_missing(parity):
    parity.write_text(
        "from vlm_grpo.task import Task\nclass Empty(Task):\n    primary_metric = 'x'\n"
    )
    message = get_error(str(parity))

    assert "no method parse" in message
    assert "no method write" in message
    assert "@reward" in message
    assert "primary_metric = 'x'" in message


def test_a_rule_with_a_reserved_name_is_reported_with_the_line(parity):
    parity.write_text(PARITY.replace("def right", "def read"))

    message = get_error(str(parity))
    assert "line 7: TypeError: Parity.read: the base class Task has an attribute read" in message


def test_a_class_and_a_task_load_with_options(parity):
    task_class: Any = load_task_class(str(parity))

    task = load_task(task_class, lenient=True, tags=True)
    changed = load_task(task, lenient=False, share=0.25)

    assert vars(task) == vars(task_class(lenient=True, tags=True))
    assert vars(changed) == vars(task_class(tags=True, share=0.25))
    with pytest.raises(UserError, match="unknown option lenientt"):
        load_task(task, lenientt=True)


def test_an_incomplete_class_is_refused():
    class Empty(Task):
        primary_metric = "x"

    with pytest.raises(UserError, match="no method parse"):
        load_task(Empty)


def test_a_task_file_that_loads_itself_is_refused(parity):
    program = f"\n\nfrom vlm_grpo import load_task\nload_task({str(parity)!r})\n"
    parity.write_text(PARITY + program)

    assert 'under if __name__ == "__main__"' in get_error(str(parity))


def test_a_file_with_the_former_name_of_primary_metric_loads_with_a_warning(parity):
    parity.write_text(PARITY.replace("primary_metric =", "headline ="))

    with pytest.warns(FutureWarning, match=r"Parity\.headline is now called primary_metric"):
        assert load_task(str(parity)).primary_metric == "right"


def test_an_unknown_name_error_lists_the_tasks_and_suggests_the_nearest():
    message = get_error("countin")

    assert "did you mean counting?" in message
    assert ", ".join(task_names()) in message


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"tag": True}, "unknown option tag (did you mean tags?)"),
        ({"tags": "yes"}, "tags='yes' should be true or false"),
        ({"weights": {"exact": "much"}}, "should be a list or be a number"),
        ({"frame": "permille"}, "frame='permille' should"),
        ({"weights": {"exactly": 1.0}}, "no reward exactly"),
    ],
)
def test_a_wrong_option_error_names_the_option(options, expected):
    assert expected in get_error("counting", **options)


def test_all_wrong_options_are_reported_at_once():
    message = get_error("counting", tag=True, thinking=3)

    assert "unknown option tag" in message
    assert "thinking=3" in message


def test_frames_and_whole_numbers_for_floats_are_accepted(parity):
    assert load_task("grounding", frame=PERMILLE).frame is PERMILLE
    assert load_task(str(parity), share=1).share == 1.0  # type: ignore[attr-defined]


def test_a_task_of_another_package_is_found_by_its_entry_point(install):
    install("parity_package", "parity")

    assert "parity" in task_names()
    assert type(load_task("parity")).__name__ == "Parity"


def test_an_entry_point_may_name_a_module(install):
    install("parity_module", "parity", value="")

    assert type(load_task("parity")).__name__ == "Parity"


def test_a_name_of_a_built_in_task_and_a_package_is_refused(install):
    install("parity_clash", "counting")
    message = get_error("counting")

    assert "claimed more than once" in message
    assert "parity_clash" in message
    assert type(load_task("ocr")).__name__ == "OCR"  # other names still work


def test_a_name_of_two_packages_is_refused(install):
    install("parity_one", "parity")
    install("parity_two", "parity")
    message = get_error("parity")

    assert "parity_one" in message
    assert "parity_two" in message


def test_a_package_that_fails_to_import_is_named(install):
    install("parity_broken", "parity", module_text="import no_such_module_anywhere\n")

    assert "parity_broken" in get_error("parity")


def test_an_entry_point_that_is_not_a_task_is_refused(install):
    install("parity_number", "parity", module_text="Parity = 3\n")

    assert "not a subclass of Task but 3" in get_error("parity")


def test_an_option_without_a_value_is_named(parity):
    parity.write_text(PARITY.replace("lenient: bool = False", "lenient: bool"))

    assert "task_options.lenient has no value: set task_options.lenient=…" in get_error(str(parity))
    assert not load_task(str(parity), lenient=False).tags


@pytest.mark.parametrize("failure", ["KeyError('a')", "SystemExit(3)"])
def test_a_constructor_that_fails_is_reported(parity, failure):
    parity.write_text(PARITY + f"\n    def __post_init__(self):\n        raise {failure}\n")

    message = get_error(str(parity))
    assert message.startswith(f"task {parity} cannot be built: {failure.partition('(')[0]}: ")


def test_a_task_file_that_exits_is_reported(parity):
    parity.write_text("raise SystemExit\n")

    assert "cannot be loaded: line 1: SystemExit" in get_error(str(parity))


def test_an_interrupted_task_file_is_not_a_user_error(parity):
    parity.write_text("raise KeyboardInterrupt\n")

    with pytest.raises(KeyboardInterrupt):
        load_task(parity)


def test_a_task_file_loads_by_its_path_object(parity):
    assert vars(load_task(parity)) == vars(load_task(str(parity)))


@pytest.mark.parametrize("task", [None, 3, {"task": "counting"}, int])
def test_a_task_of_another_type_is_refused(task):
    assert get_error(task).startswith("task must be a name, a path, a subclass of Task or a task")


def test_a_task_without_a_weighted_reward_cannot_be_trained():
    task = load_task("counting")
    assert check_trainable(task) is task
    zeros = dict.fromkeys(task.reward_weights(), 0.0)

    with pytest.raises(UserError, match="no reward has a weight: set task_options"):
        check_trainable(load_task(task, weights=zeros))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("    tags: str = 'no'", "it declares the option tags, which every task has, with another"),
        ("    more: Wrods = ()", "the type of an option cannot be read: name 'Wrods' is not def"),
    ],
)
def test_an_option_with_a_wrong_annotation_is_refused(parity, line, message):
    parity.write_text(PARITY.replace("    lenient: bool = False", line))
    with pytest.raises(UserError, match=message):
        load_task_class(str(parity))


def test_an_option_of_every_task_may_have_another_default(parity):
    parity.write_text(PARITY.replace("    lenient: bool = False", "    tags: bool = True"))
    assert load_task(str(parity)).tags


def test_attributes_that_the_library_sets_are_not_listed_as_options():
    with pytest.raises(UserError, match="unknown option tagz") as caught:
        load_task("counting", tagz=True)
    options = str(caught.value).rpartition("it has ")[2].split(", ")
    assert "tags" in options
    assert not {"frame", "progress", "token_limit"} & {*options}
