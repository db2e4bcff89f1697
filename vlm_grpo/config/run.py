"""Settings: frozen, validated where they are built, one YAML for each recipe.

``load_settings("counting", ["optim.lr=1e-5"])`` reads a recipe, puts the overrides over it and
returns the ``Settings`` of the run. Every field says beside it what 0 and None mean. A setting
that would have no effect beside the others is an error.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import Field, ValidationError, model_validator

from vlm_grpo.config.base import Frozen, describe_problems, no_value
from vlm_grpo.config.objective import ObjectiveSettings
from vlm_grpo.config.policy import PolicySettings, RolloutSettings
from vlm_grpo.errors import UserError, bullets, nearest
from vlm_grpo.utils.atomic_io import write_atomic

Column = Literal["id", "images", "question", "answer"]

RUNS = Path("runs")
"""Folder of all runs unless ``output_dir`` says otherwise."""
PILLOW_WARNS_AT = 89_478_485
"""Pixels from which Pillow takes an image for a decompression bomb, and warns."""


class DataSettings(Frozen):
    """Where the examples come from, and what to do with the bad ones.

    A source is a path to a ``.jsonl`` or ``.parquet`` file, ``hf:NAME[:SPLIT[:CONFIG]]`` (a
    dataset on the Hugging Face hub or in a local folder), or ``embedded:counting``,
    ``embedded:grounding`` or ``embedded:ocr`` (drawn on the spot).
    """

    train: str
    """Source of the training examples."""
    eval: str | None = None
    """Source of the held-out examples; None: no evaluation."""
    image_root: Path | None = None
    """Folder that image paths are relative to and may not leave; None: the source's folder."""
    eval_image_root: Path | None = None
    """The same for the held-out examples; None: ``image_root``."""
    columns: dict[Column, str] = Field(default_factory=dict)
    """Names of a table's columns where they differ from ours, as ``{answer: solution}``."""
    train_limit: int | None = Field(default=None, ge=1)
    """Use the first so many training examples; None: all (embedded data: 4096)."""
    eval_limit: int | None = Field(default=None, ge=1)
    """Use the first so many held-out examples; None: all (embedded data: 500)."""
    on_bad_row: Literal["error", "skip"] = "error"
    """A row that cannot be used: report all such rows and stop, or log how many and go on."""
    max_image_pixels: int = Field(default=PILLOW_WARNS_AT, ge=1, le=2 * PILLOW_WARNS_AT)
    """Refuse images of more pixels; Pillow itself refuses to decode twice the default."""

    @model_validator(mode="after")
    def _no_idle_settings(self) -> DataSettings:
        sources = [source for source in (self.train, self.eval) if source is not None]
        if self.image_root is not None and all(s.startswith("embedded:") for s in sources):
            raise ValueError("data.image_root has no effect on embedded data: leave it out")
        if self.eval is None and self.eval_limit is not None:
            raise ValueError("data.eval_limit has no effect without data.eval")
        if self.eval_image_root is not None and (self.eval or "embedded:").startswith("embedded:"):
            raise ValueError("data.eval_image_root has no effect without data.eval from a file")
        return self


class OptimSettings(Frozen):
    """The optimizer (AdamW), its schedule, and how much goes into one step."""

    lr: float = Field(default=1e-6, ge=0)
    """Peak learning rate."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay; 0: none."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's decay rates of the first and second moment."""
    eps: float = Field(default=1e-8, gt=0)
    """AdamW's term against division by zero."""
    schedule: Literal[
        "constant",
        "constant_with_warmup",
        "linear",
        "cosine",
        "cosine_with_restarts",
        "polynomial",
        "inverse_sqrt",
    ] = "constant_with_warmup"
    """Shape of the learning rate over the steps, by transformers' ``lr_scheduler_type`` name."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the learning rate rises to its peak; 0: none."""
    max_grad_norm: float = Field(default=1.0, ge=0)
    """Gradients are scaled down to this norm; 0: never."""
    max_steps: int = Field(default=500, ge=1)
    """Steps of the run; one step is one rollout and its update."""
    prompts_per_step: int = Field(default=16, ge=1)
    """Prompts of one step over all devices, each with num_generations completions."""
    max_tokens_per_batch: int = Field(default=16_384, ge=1)
    """Tokens of one micro-batch of the update; the step's gradient does not depend on it."""

    @model_validator(mode="after")
    def _no_idle_settings(self) -> OptimSettings:
        if self.schedule == "constant" and self.warmup_steps:
            raise ValueError(
                "optim.warmup_steps has no effect with optim.schedule=constant: "
                "use constant_with_warmup"
            )
        if self.warmup_steps > self.max_steps:
            raise ValueError(
                f"optim.warmup_steps={self.warmup_steps} exceeds optim.max_steps={self.max_steps}: "
                "lower it too"
            )
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"optim.betas={list(self.betas)}: each must be in [0, 1)")
        return self


class EvaluationSettings(Frozen):
    """Evaluation on the held-out examples: before training, after it, and in between."""

    every: int = Field(default=0, ge=0)
    """Steps between evaluations; 0: only before the first step and after the last."""
    benchmark: str | None = None
    """Ask and score the held-out examples as this benchmark does, by name or ``.yaml`` file: its
    prompt, its official metric, which then tells the best checkpoint; None: as the task does."""
    temperature: float = Field(default=0.0, ge=0)
    """Sampling temperature; 0: the likeliest token each time (greedy)."""
    max_tokens_per_batch: int = Field(default=65_536, ge=1)
    """Tokens, prompts and completions, that are generated at once."""


class CheckpointSettings(Frozen):
    """When the run's state is written to ``checkpoints/step-N``; after the last step always."""

    every: int = Field(default=0, ge=0)
    """Steps between checkpoints; 0: only after the last step."""
    keep_last: int = Field(default=2, ge=0)
    """Newest checkpoints to keep; 0: all of them."""
    max_hours: float | None = Field(default=None, gt=0)
    """Save and exit (status 75) after so many hours, for clusters with a time limit; None: never.
    ``resume=true`` goes on."""
    asynchronous: bool = False
    """Copy the state to host memory and write it while training goes on; a crash meanwhile goes
    back to the checkpoint before. False: training waits while it is written."""
    sharded: bool = False
    """Of weights that are cut over processes (FSDP2) each process writes a part, as a model in
    several files. False: the first one gathers and writes all of them. Either resumes anywhere."""
    keep_best: bool = False
    """Keep the checkpoint with the best held-out primary metric value besides (with
    ``evaluation.benchmark`` its official metric; the least one where that is an error)."""


class LoggingSettings(Frozen):
    """What is recorded besides ``metrics.jsonl``."""

    trackers: tuple[Literal["tensorboard", "wandb", "trackio", "mlflow"], ...] = ("tensorboard",)
    """Services that get the metrics and sample pictures too; empty: none."""
    samples_every: int = Field(default=10, ge=0)
    """Steps between records of what the model wrote; 0: never."""
    samples_per_step: int = Field(default=4, ge=1)
    """Groups in each such record."""


class Settings(Frozen):
    """One run: everything that is needed to repeat it."""

    name: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Folder of the run inside ``output_dir``; None: the name of the recipe, or of the task where
    the command line chose another task."""
    task: str
    """Name of a task, or path to a ``.py`` file that defines one."""
    task_options: dict[str, Any] = Field(default_factory=dict)
    """Options of the task, such as ``tags``, ``thinking`` and ``weights``."""
    model: str = "embedded"
    """Folder or Hugging Face hub name of the model; ``embedded``: the tiny one in the package."""
    model_revision: str | None = None
    """Commit, tag or branch on the hub; None: the default branch."""
    seed: int = Field(default=0, ge=0, lt=2**32)
    """Decides the order of the examples, the sampling and the adapters' first weights."""
    output_dir: Path = RUNS
    """Folder of all runs."""
    resume: bool = False
    """Go on from the run's newest complete checkpoint."""
    data: DataSettings
    policy: PolicySettings = PolicySettings()
    rollout: RolloutSettings = RolloutSettings()
    objective: ObjectiveSettings = ObjectiveSettings.model_validate({})
    optim: OptimSettings = OptimSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    logging: LoggingSettings = LoggingSettings()

    @property
    def run_dir(self) -> Path:
        """``output_dir/name``: the folder that everything of the run is written to."""
        return self.output_dir / (self.name or Path(self.task).stem)

    @model_validator(mode="after")
    def _no_idle_settings(self) -> Settings:
        problems = []
        if self.data.eval is None and self.evaluation.every:
            problems.append("evaluation.every has no effect without data.eval")
        if self.data.eval is None and self.evaluation.benchmark is not None:
            problems.append("evaluation.benchmark needs its examples as data.eval")
        if self.data.eval is None and self.checkpoint.keep_best:
            problems.append("checkpoint.keep_best needs data.eval to tell which is best")
        if self.checkpoint.keep_best and not self.checkpoint.keep_last:
            problems.append("checkpoint.keep_best has no effect where keep_last=0 keeps them all")
        if self.checkpoint.sharded and self.checkpoint.asynchronous:
            problems.append("checkpoint.sharded and checkpoint.asynchronous exclude each other")
        if self.checkpoint.sharded and self.policy.lora is not None:
            problems.append("checkpoint.sharded has no effect on adapters, which are never cut")
        if self.model == "embedded" and self.model_revision is not None:
            problems.append("model_revision has no effect on the embedded model")
        problems += self._overlong_problems()
        try:
            self.objective.check_sampling(
                top_p=self.rollout.top_p, top_k=self.rollout.top_k, min_p=self.rollout.min_p or 0.0
            )
        except ValueError as error:
            problems.append(f"rollout: {error} (in objective)")
        if problems:
            raise ValueError("\n".join(problems))
        return self

    def _overlong_problems(self) -> list[str]:
        """What makes the reward ``overlong`` pointless, where the task's weights name it."""
        weights = self.task_options.get("weights")
        if not (isinstance(weights, dict) and weights.get("overlong")):
            return []
        problems = []
        cache, limit = self.task_options.get("overlong_cache"), self.rollout.max_completion_length
        if isinstance(cache, int) and cache > limit:
            problems.append(
                f"task_options.overlong_cache={cache} exceeds "
                f"rollout.max_completion_length={limit}: every completion would be penalised"
            )
        if self.objective.mask_truncated_completions:
            problems.append(
                "the reward overlong penalises truncated completions, which "
                "objective.mask_truncated_completions leaves out of the loss: choose one of the two"
            )
        return problems

    def save(self, path: Path) -> None:
        """Write the settings as YAML that ``load_settings`` reads back equal."""
        text = yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        # A literal "${" in a value must not come back as a reference to another setting.
        write_atomic(path, text.replace("${", "\\${").encode())


def recipe_names() -> list[str]:
    """Names of the recipes that the package brings along."""
    folder = resources.files("vlm_grpo.configs")
    return sorted(f.name.removesuffix(".yaml") for f in folder.iterdir() if f.name[-5:] == ".yaml")


def load_settings(recipe: str, overrides: Sequence[str] = ()) -> Settings:
    """The settings of one run.

    Args:
        recipe: name of a recipe of the package, path to a recipe, or path to a task's ``.py``
            file, which takes the defaults for everything else.
        overrides: ``key=value`` with dotted keys, as ``optim.lr=1e-6``; later ones win.

    Raises:
        UserError: the recipe or its values are wrong; the message lists every problem at once.
    """
    try:
        values = _read_recipe(recipe)
    except (OmegaConfBaseException, yaml.YAMLError) as error:
        raise UserError(f"recipe {recipe} cannot be read: {error}") from error
    return build_settings(recipe, values, overrides)


def build_settings(recipe: str, values: Any, overrides: Sequence[str] = ()) -> Settings:
    """The settings of values that no file holds; ``recipe`` is what messages call them.

    Args:
        recipe: a name.
        values: a mapping as a recipe's.
        overrides: as for ``load_settings``.

    Raises:
        UserError: as ``load_settings``.
    """
    wrong = [override for override in overrides if override.find("=") < 1]
    if wrong:
        raise UserError(f"{wrong[0]!r} is no override: write key=value, as optim.lr=1e-6")
    try:
        changes = OmegaConf.from_dotlist(list(overrides))
        merged = OmegaConf.merge(values, changes)
        missing = sorted(OmegaConf.missing_keys(merged))
        if missing:
            raise UserError(f"recipe {recipe} is incomplete:\n{bullets(map(no_value, missing))}")
        given: Any = OmegaConf.to_container(merged, resolve=True)
    except (OmegaConfBaseException, yaml.YAMLError) as error:
        raise UserError(f"recipe {recipe} cannot be read: {error}") from error
    if given.get("name") is None:
        given["name"] = Path(str(given["task"]) if "task" in changes else recipe).stem
    try:
        # Through JSON, because pydantic's strict mode then takes lists where tuples are declared.
        return Settings.model_validate_json(json.dumps(given), strict=True)
    except ValidationError as error:
        raise UserError(
            f"recipe {recipe} has wrong settings:\n{bullets(describe_problems(error, Settings))}"
        ) from error


def _read_recipe(recipe: str) -> Any:
    """The recipe's values as an OmegaConf mapping, before any override."""
    if recipe.endswith(".py"):
        return OmegaConf.create({"task": recipe})
    if recipe in recipe_names():
        text = resources.files("vlm_grpo.configs").joinpath(f"{recipe}.yaml").read_text("utf-8")
    else:
        path = Path(recipe)
        if not path.is_file():
            names = recipe_names()
            raise UserError(
                f"there is no recipe {recipe!r}{nearest(recipe, names)}: "
                f"give the path of a .yaml file or one of {', '.join(names)}"
            )
        try:
            text = path.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"recipe {recipe} cannot be read: {error}") from error
    if not isinstance(yaml.safe_load(text), dict):
        raise UserError(f"recipe {recipe} holds no settings: it must be a mapping of keys")
    return OmegaConf.create(text)
