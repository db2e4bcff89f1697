"""The settings of a run: frozen, and validated when they are built.

The docstring of each field states what 0 and None mean. A setting that has no effect
in combination with the others is an error: ``combinations.yaml`` has all combinations.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, NonNegativeInt, ValidationInfo, field_validator

from vlm_grpo.config.data import DataSettings, TaskOptions, TaskSetting, is_mixture
from vlm_grpo.config.methods import (
    MethodSettings,
    OwnMethod,
    WarmStartSettings,
    find_method_settings,
    read_own_settings,
)
from vlm_grpo.config.objective import ObjectiveSettings
from vlm_grpo.config.optim import OptimSettings
from vlm_grpo.config.policy import PolicySettings
from vlm_grpo.config.prompt import PromptSettings
from vlm_grpo.config.rollout import RolloutSettings
from vlm_grpo.config.section import FREE, Frozen
from vlm_grpo.errors import UserError, nearest
from vlm_grpo.task.registry import get_short_name, refuse_while_loading
from vlm_grpo.utils.atomic_io import write_atomic

MIXED = "mixed"  # the task of a run whose sources all have tasks of their own
EMBEDDED = "embedded"  # the package's tiny model
EMBEDDED_TASKS = ("counting", "grounding", "ocr")  # what it has learned, on synthetic images
DDP_TIMEOUT = 1800  # as in transformers and accelerate
SAVE_MINUTES = 20
RUNS = Path("runs")


class EvaluationSettings(Frozen):
    """Evaluation on the held-out examples: before, during and after training."""

    every: int = Field(default=0, ge=0)
    """Steps between evaluations; 0: only before the first step and after the last."""
    benchmark: str | None = None
    """Public benchmark, by name or ``.yaml`` file, whose prompt and official metric are used for
    the held-out examples; its metric selects the best checkpoint. None: the task's."""
    temperature: float = Field(default=0.0, ge=0)
    """Sampling temperature; 0: greedy decoding."""
    samples: int = Field(default=1, ge=1, le=4096)
    """Completions per held-out example; with k > 1, metrics are means over them, and ``mean_at_k``,
    ``pass_at_k`` and ``majority_at_k`` of the primary metric are added. Needs a temperature."""
    max_tokens_per_batch: int | None = Field(default=None, ge=1)
    """Maximum number of prompt and completion tokens in one generation batch; None: as many as fit
    into the GPU's free memory, 65,536 on a CPU."""


class CheckpointSettings(Frozen):
    """The checkpoints in ``checkpoints/step-N``, always including one of the last step."""

    every: int = Field(default=0, ge=0)
    """Steps between checkpoints; 0: they are saved by time, and after the last step."""
    every_minutes: float | None = Field(default=None, ge=0)
    """Minutes after which a finished step is saved; None: 20, or 0 if ``every`` is set. 0: none is
    saved by time."""
    keep_last: int = Field(default=2, ge=0)
    """Number of newest checkpoints to keep; 0: all."""
    max_hours: float | None = Field(default=None, gt=0)
    """Hours after which the run saves and exits with status 75, for clusters with a time limit;
    ``resume=true`` continues it. None: no limit."""
    sharded: bool = False
    """Every process writes a part of the weights (FSDP2), as a model in several files. False: the
    first process writes all of them. A run resumes from either form."""
    keep_best: bool = False
    """Also keep the checkpoint with the best held-out value of the primary metric, or of the
    official metric of ``evaluation.benchmark``."""

    @property
    def seconds(self) -> float:
        """Seconds between checkpoints; infinite if none is saved by time."""
        minutes = self.every_minutes
        if minutes is None:
            minutes = 0 if self.every else SAVE_MINUTES
        return 60 * minutes or math.inf


class LoggingSettings(Frozen):
    """The records of a run besides ``metrics.jsonl``."""

    trackers: tuple[Literal["tensorboard", "wandb", "trackio", "mlflow"], ...] = ("tensorboard",)
    """Services that also receive the metrics, and sample images if they take them; empty: none."""
    samples_every: int = Field(default=10, ge=0)
    """Steps between records of sampled completions; 0: none."""
    samples_per_step: int = Field(default=4, ge=1)
    """Number of groups in each record."""
    profile_steps: tuple[NonNegativeInt, ...] = ()
    """Steps to profile, numbered as in ``metrics.jsonl``: the first process writes a trace and, on
    CUDA, a memory snapshot to ``profile`` in the run's folder; empty: none."""

    @property
    def last_profile_step(self) -> int:
        return max(self.profile_steps, default=-1)  # -1: there is none


class Settings(Frozen):
    """All settings of a run: text, numbers and mappings, as in its ``config.yaml``."""

    name: Annotated[str | None, FREE] = Field(default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Folder of the run inside ``output_dir``; None: the name of the recipe, or of the task if an
    override sets the task."""
    task: TaskSetting = MIXED
    """Task: its name, the path to its ``.py`` file, or ``package.module:Class``; ``python``: an
    object that a program gives, ``train(settings, task=…)``. It may be left out if every source of
    ``data.train`` has its own."""
    task_options: TaskOptions = Field(default_factory=dict)
    """Options of the task, such as ``tags``, ``thinking`` and ``weights``."""
    model: str = EMBEDDED
    """Folder or Hugging Face hub name of the model. ``embedded``: the package's tiny model, which
    is the default of the tasks that it has learned (counting, grounding and ocr); other tasks must
    name a model."""
    model_revision: str | None = None
    """Commit, tag or branch on the hub; None: the default branch."""
    seed: int = Field(default=0, ge=0, lt=2**32)
    """Seed of the order of the examples, the sampling and the initial weights of adapters."""
    output_dir: Annotated[Path, FREE] = RUNS
    """Folder of all runs."""
    resume: Annotated[bool, FREE] = False
    """Continue from the run's newest complete checkpoint."""
    ddp_timeout: Annotated[float, FREE] = Field(default=DDP_TIMEOUT, gt=0)
    """Seconds that processes wait for a slow one before torch ends the run."""
    data: DataSettings
    policy: PolicySettings = PolicySettings()
    prompt: PromptSettings = PromptSettings()
    rollout: Annotated[RolloutSettings, FREE] = RolloutSettings()
    objective: Annotated[ObjectiveSettings, FREE] = Field(
        default=ObjectiveSettings(), validate_default=True
    )
    optim: Annotated[OptimSettings, FREE] = OptimSettings()
    warm_start: WarmStartSettings | None = None
    """Supervised steps before the first rollout; None: there are none."""
    methods: Annotated[tuple[OwnMethod, ...], FREE] = ()
    """Methods by their files: a list of Python files of your own, names of built-in methods, or
    mappings with ``file`` and ``options``, the values of the settings that the method declares.
    Empty: there are none."""
    evaluation: Annotated[EvaluationSettings, FREE] = EvaluationSettings()
    checkpoint: Annotated[CheckpointSettings, FREE] = CheckpointSettings()
    logging: Annotated[LoggingSettings, FREE] = LoggingSettings()

    @property
    def run_dir(self) -> Path:
        return self.output_dir / (self.name or get_short_name(self.task))

    @property
    def task_names(self) -> tuple[str, ...]:
        names: list[str] = []
        for source in self.data.get_sources("train"):
            task = self.task if source.task is None else source.task
            names += source.tasks or [task]
        return tuple(dict.fromkeys(names))

    @property
    def has_environment(self) -> bool:
        options = (source.task_options for source in self.data.get_sources("train"))
        return any(own.get("environment") for own in (self.task_options, *options))

    @property
    def supervised_steps(self) -> int:
        """The number of steps at the start that train on gold answers, without a rollout."""
        return 0 if self.warm_start is None else self.warm_start.count(self.optim.max_steps)

    def with_steps(self, num_examples: int) -> Settings:
        """Return the settings with the number of steps that ``num_train_epochs`` amounts to."""
        optim = self.optim
        if optim.num_train_epochs is None:
            return self
        prompts = optim.num_train_epochs * num_examples
        steps = max(1, math.ceil(prompts / optim.prompts_per_step))
        given, own = (
            {name: getattr(o, name) for name in o.model_fields_set} for o in (self, optim)
        )
        own |= {"max_steps": steps, "num_train_epochs": None}
        return Settings(**{**given, "optim": OptimSettings(**own)})

    def is_supervised(self, step: int) -> bool:
        every = self.warm_start is not None and self.warm_start.steps == "all"
        return every or step < self.supervised_steps

    def progress_at(self, step: int) -> float:
        """Return the share of the sampled steps that is done before a step, numbered from 0."""
        return (step - self.supervised_steps) / self.steps_after_warm_start

    @property
    def phase_ends(self) -> tuple[int, int]:
        return self.supervised_steps, self.optim.max_steps

    @property
    def used_methods(self) -> list[MethodSettings]:
        known = find_method_settings(self, self.data, self.rollout, self.objective)
        return [*known, *map(read_own_settings, self.methods)]

    @property
    def named_methods(self) -> list[str]:
        return [str(entry.file) for entry in self.methods]

    @property
    def can_skip_zero_advantages(self) -> bool:
        """Whether a completion with advantage 0 has no gradient, also of a file's method."""
        return self.objective.can_skip_zero_advantages and not any(
            read_own_settings(entry).trains_all for entry in self.methods
        )

    @property
    def updates_per_step(self) -> int:
        return self.optim.mini_batches * self.objective.num_iterations

    @property
    def is_mixture(self) -> bool:
        return is_mixture(self.data.train) or is_mixture(self.data.eval)

    @property
    def exceeds_embedded_model(self) -> bool:
        """Whether the tiny model is used for a task that it has not learned."""
        return self.model == EMBEDDED and not {*self.task_names} <= {*EMBEDDED_TASKS}

    @property
    def lacks_task(self) -> bool:
        return MIXED in self.task_names

    @property
    def labels_without_task(self) -> list[str]:
        sources = self.data.train if self.lacks_task and is_mixture(self.data.train) else ()
        return [source.label for source in sources if source.task is None and not source.tasks]

    @property
    def steps_after_warm_start(self) -> int:
        return self.optim.max_steps - self.supervised_steps

    @property
    def has_ratio_1(self) -> bool:
        """Whether every importance ratio is 1: each completion has one update, in its own step."""
        return self.updates_per_step == 1 and self.objective.replay is None

    @field_validator("objective")
    @classmethod
    def _choose_correction(cls, given: ObjectiveSettings, info: ValidationInfo) -> Any:
        """Correct for the log-probs of vLLM unless the user chooses how."""
        rollout, policy = info.data.get("rollout"), info.data.get("policy")
        if "sampler_correction" in given.model_fields_set or rollout is None or policy is None:
            return given
        if rollout.sampler != "vllm" or policy.load_in != "none":
            return given
        return given.model_copy(update={"sampler_correction": "sequence_mask"})

    def save(self, path: Path) -> None:
        """Write the settings as YAML for ``load_settings``."""
        values = {**self.model_dump(mode="json"), "name": self.run_dir.name}
        text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        # Without the backslash, "${" in a value would be read as a reference to another setting.
        write_atomic(path, text.replace("${", "\\${").encode())


def check_settings(value: object) -> Settings:
    """Return the settings with which a function of the Python interface was called."""
    refuse_while_loading()
    if not isinstance(value, Settings):
        raise UserError(
            "settings must be Settings: use load_settings(…) or Settings(…), "
            f"not {type(value).__name__}"
        )
    return value


def find_folder(name: str | Path) -> Path | None:
    """Return the folder of a run or a model, given by its path or by its name in ``runs``."""
    return next((path for path in (Path(name), RUNS / name) if path.is_dir()), None)


def find_run(name: str) -> Path:
    """Return the folder of a run given by its path or by its name in ``runs``."""
    if (folder := find_folder(name)) is not None:
        return folder
    known = list_runs()
    has = f"; {RUNS}/ has {', '.join(known)}" if known else ""
    raise UserError(f"there is no run {name!r}{nearest(name, known)}: give a run's folder{has}")


def list_runs() -> list[str]:
    return sorted(path.name for path in RUNS.iterdir() if path.is_dir()) if RUNS.is_dir() else []
