"""Recipes: YAML files of settings, with overrides from the command line or Python."""

import json
import logging
import numbers
import os
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from itertools import takewhile
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from vlm_grpo.config.optim import fit_optim
from vlm_grpo.config.run import Settings
from vlm_grpo.config.section import GONE, describe_missing, describe_problems, flatten, merge
from vlm_grpo.errors import UserError, bullets, nearest
from vlm_grpo.task.registry import get_short_name
from vlm_grpo.utils import trust

logger = logging.getLogger(__name__)

# Of text that is not YAML, or has a number of 5,000 digits, a list in the place of a mapping, or a
# thousand nested lists.
PARSE_ERRORS = (OmegaConfBaseException, yaml.YAMLError, ValueError, TypeError, RecursionError)

Overrides = Sequence[str] | Mapping[str, Any]
"""Settings as ``key=value``, or as a mapping of dotted or nested keys."""


def recipe_names() -> list[str]:
    folder = resources.files("vlm_grpo.configs")
    return sorted(f.name.removesuffix(".yaml") for f in folder.iterdir() if f.name[-5:] == ".yaml")


def describe_recipe(name: str) -> str:
    """Return the first sentence of the comment above one of the package's recipes."""
    lines = takewhile(lambda line: line.startswith("#"), _read_package_recipe(name).split("\n"))
    return " ".join(line.removeprefix("#").strip() for line in lines).partition(". ")[0].rstrip(".")


def _read_package_recipe(name: str) -> str:
    return resources.files("vlm_grpo.configs").joinpath(f"{name}.yaml").read_text("utf-8")


def load_settings(recipe: str | Path, overrides: Overrides = (), **values: Any) -> Settings:
    """Load the settings of a run.

    Args:
        recipe: name of a recipe of the package, or path to a recipe or to a task's ``.py`` file.
        overrides: ``key=value`` with dotted keys, such as ``optim.lr=1e-6``, or a mapping of
            dotted or nested keys; later ones win.
        values: settings by name, which override ``overrides``: ``optim={"lr": 1e-6}``.

    Raises:
        UserError: the recipe or its values are wrong; the message lists every problem.
    """
    if not isinstance(recipe, str | Path):
        raise UserError(
            f"recipe must be the name or the path of a recipe, not {type(recipe).__name__}"
        )
    recipe = str(recipe)
    try:
        content = _read_recipe(recipe)
    except (OSError, *PARSE_ERRORS) as error:
        raise UserError(f"recipe {recipe} cannot be read: {_explain(error)}") from error
    is_own = recipe.endswith(".py") or recipe in recipe_names()
    return build_settings(recipe, content, overrides, values, None if is_own else recipe)


def build_settings(
    recipe: str,
    content: Any,
    overrides: Overrides = (),
    values: Mapping[str, Any] | None = None,
    origin: str | None = None,
) -> Settings:
    """Build settings from a recipe's content, an OmegaConf mapping, as ``load_settings`` does.

    Code that only the content names is not run if it is of a file, ``origin``.
    """
    texts, python_values = _split_overrides(overrides)
    merge(python_values, values or {})
    wrong = [text for text in texts if text.find("=") < 1]
    if wrong:
        raise UserError(f"{wrong[0]!r} is not an override: write key=value, such as optim.lr=1e-6")
    try:
        changes = parse_overrides(texts)
        merged = OmegaConf.merge(content, changes)
        given_keys = flatten(python_values)
        missing = sorted(
            key
            for key in OmegaConf.missing_keys(merged)
            if not any(given == key or given.startswith(f"{key}.") for given in given_keys)
        )
        if missing:
            problems = bullets(map(describe_missing, missing))
            raise UserError(f"recipe {recipe} is incomplete:\n{problems}")
        given: Any = OmegaConf.to_container(merged, resolve=True)
        texts_given: Any = OmegaConf.to_container(changes)
        user_keys = {*given_keys, *flatten(texts_given)}
    except PARSE_ERRORS as error:
        raise UserError(f"recipe {recipe} cannot be read: {_explain(error)}") from error
    merge(given, python_values)
    trust.allow([texts_given, python_values])
    if origin is not None:
        trust.note(given, origin)
    policy = given.get("policy")
    if isinstance(policy, dict) and policy.get("trust_remote_code"):
        code = [f"{trust.REMOTE_CODE}{text}" for text in trust.find_texts(given)]
        if "policy.trust_remote_code" in user_keys:
            trust.allow(code)
        elif origin is not None:
            trust.note(code, origin)
    if isinstance(checkpoint := given.get("checkpoint"), dict):
        checkpoint.pop(GONE.rpartition(".")[2], None)
    warning = fit_optim(given, user_keys)
    if given.get("name") is None:
        is_other_task = "task" in user_keys
        given["name"] = get_short_name(given["task"]) if is_other_task else Path(recipe).stem
        if isinstance(start := given.get("warm_start"), dict) and start.get("steps") == "all":
            given["name"] += "-sft"
    try:
        settings = _validate(given)
    except ValidationError as error:
        raise UserError(
            f"recipe {recipe} has wrong settings:\n{bullets(describe_problems(error, Settings))}"
        ) from error
    if warning is not None and os.environ.get("RANK", "0") == "0":
        logger.warning(warning)
    return settings


def parse_overrides(texts: Iterable[str]) -> Any:
    """Parse ``key=value`` with dotted keys and values in YAML, or raise one of ``PARSE_ERRORS``."""
    words = []
    for text in texts:
        key, equals, value = text.partition("=")
        if ("{{" in value or "{%" in value) and value.lstrip()[0] not in "'\"":
            value = json.dumps(value, ensure_ascii=False)
        words.append(f"{key}{equals}{value}")
    return OmegaConf.from_dotlist(words)


def _explain(error: Exception) -> str:
    if isinstance(error, UnicodeDecodeError):
        return "it is not a text file: name a recipe or a .yaml file"
    return "it is nested too deeply" if isinstance(error, RecursionError) else str(error)


def _split_overrides(overrides: Any) -> tuple[list[str], dict[str, Any]]:
    if isinstance(overrides, Mapping):
        values: dict[str, Any] = {}
        merge(values, overrides)
        return [], values
    if isinstance(overrides, Iterable) and not isinstance(overrides, str):
        texts = list(overrides)
        if all(isinstance(text, str) for text in texts):
            return texts, {}
    raise UserError('overrides must be a list: ["optim.lr=1e-5"], or a mapping: {"optim.lr": 1e-5}')


def _validate(given: dict[str, Any]) -> Settings:
    """Validate nested values as JSON, in which pydantic's strict mode accepts lists for tuples."""

    def convert(value: Any) -> Any:
        if isinstance(value, os.PathLike):
            return os.fspath(value)
        if isinstance(value, numbers.Real):  # NumPy's
            return getattr(value, "item", value.__float__)()
        values = ((k, v if isinstance(v, list | tuple) else [v]) for k, v in flatten(given).items())
        keys = (k for k, items in values if any(item is value for item in items))
        key = next(keys, "a setting")
        remedy = _REMEDIES.get(key.partition(".")[0], "")
        raise UserError(f"{key} must be text, not {type(value).__name__}{remedy}")

    return Settings.model_validate_json(json.dumps(given, default=convert), strict=True)


_REMEDIES = {
    "task": ": give an object as an argument, train(settings, task=…)",
    "task_options": ": give the task itself as an argument, train(settings, task=…)",
    "data": ": give rows as an argument, train(settings, data=rows)",
}


def _read_recipe(recipe: str) -> Any:
    if recipe.endswith(".py"):
        return OmegaConf.create({"task": recipe})
    if recipe in recipe_names():
        text = _read_package_recipe(recipe)
    else:
        path = Path(recipe)
        if (path / "config.yaml").is_file():
            raise UserError(f"{recipe} is the folder of a run: its recipe is {path}/config.yaml")
        if not path.is_file():
            names = recipe_names()
            raise UserError(
                f"there is no recipe {recipe!r}{nearest(recipe, names)}: "
                f"give the path of a .yaml file or one of {', '.join(names)}"
            )
        if path.suffix in (".jsonl", ".parquet", ".csv", ".tsv", ".tar"):
            raise UserError(f"{recipe} holds data: name a recipe, and set data.train={recipe}")
        text = path.read_text("utf-8")
    if not isinstance(yaml.safe_load(text), dict):
        raise UserError(f"recipe {recipe} has no settings: it must be a mapping of keys")
    return OmegaConf.create(text)
