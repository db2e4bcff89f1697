"""The settings of a run: frozen, and validated when they are built.

The docstring of each field states what 0 and None mean. A setting that has no effect
in combination with the others is an error.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Literal

import yaml
from pydantic import Field, NonNegativeInt, model_validator

from vlm_grpo.config.data import DataSettings, is_mixture
from vlm_grpo.config.objective import ObjectiveSettings
from vlm_grpo.config.optim import OptimSettings
from vlm_grpo.config.policy import PolicySettings, RolloutSettings
from vlm_grpo.config.prompt import PromptSettings
from vlm_grpo.config.section import Frozen, describe_missing
from vlm_grpo.config.sources import TaskOptions, TaskSetting, split_task
from vlm_grpo.config.warm_start import WarmStartSettings
from vlm_grpo.errors import UserError
from vlm_grpo.media.image_noise import DiffusionNoise
from vlm_grpo.task.names import get_short_name, get_task_name
from vlm_grpo.utils.atomic_io import write_atomic

MIXED = "mixed"
"""The setting ``task`` of a run whose sources all have tasks of their own."""
EMBEDDED = "embedded"
"""The setting ``model`` of the package's tiny model."""
EMBEDDED_TASKS = ("counting", "grounding", "ocr")
"""The tasks that the tiny model has learned, on synthetic images."""
DDP_TIMEOUT = 1800
"""Default of ``ddp_timeout``: that of transformers and accelerate."""
RUNS = Path("runs")
"""Default of ``output_dir``."""


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

    @model_validator(mode="after")
    def _check_combinations(self) -> EvaluationSettings:
        if self.samples > 1 and not self.temperature:
            raise ValueError(
                f"evaluation.samples={self.samples} needs evaluation.temperature, such as 1: "
                "greedy decoding gives equal completions"
            )
        return self


class CheckpointSettings(Frozen):
    """The checkpoints in ``checkpoints/step-N``, always including one of the last step."""

    every: int = Field(default=0, ge=0)
    """Steps between checkpoints; 0: only after the last step."""
    keep_last: int = Field(default=2, ge=0)
    """Number of newest checkpoints to keep; 0: all."""
    max_hours: float | None = Field(default=None, gt=0)
    """Hours after which the run saves and exits with status 75, for clusters with a time limit;
    ``resume=true`` continues it. None: no limit."""
    asynchronous: bool = False
    """Copy the state to host memory, kept with a GPU for the next copy, and write it in the
    background; a crash while writing loses this checkpoint but not the one before. False: training
    waits for the write."""
    sharded: bool = False
    """Every process writes a part of the weights (FSDP2 and DeepSpeed), as a model in several
    files. False: the first process writes all of them. A run resumes from either form."""
    keep_best: bool = False
    """Also keep the checkpoint with the best held-out value of the primary metric, or of the
    official metric of ``evaluation.benchmark``."""


class LoggingSettings(Frozen):
    """The records of a run besides ``metrics.jsonl``."""

    trackers: tuple[Literal["tensorboard", "wandb", "trackio", "mlflow"], ...] = ("tensorboard",)
    """Services that also receive the metrics and sample images; empty: none."""
    samples_every: int = Field(default=10, ge=0)
    """Steps between records of sampled completions; 0: none."""
    samples_per_step: int = Field(default=4, ge=1)
    """Number of groups in each record."""
    profile_steps: tuple[NonNegativeInt, ...] = ()
    """Steps to profile, numbered as in ``metrics.jsonl``: the first process writes a trace and, on
    CUDA, a memory snapshot to ``profile`` in the run's folder; empty: none."""


class Settings(Frozen):
    """All settings of a run.

    In Python, ``task`` may be a subclass of ``Task`` or a task object, whose options that differ
    from the defaults become ``task_options``.
    """

    name: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Folder of the run inside ``output_dir``; None: the name of the recipe, or of the task if an
    override sets the task."""
    task: TaskSetting = MIXED
    """Task: its name, the path to its ``.py`` file, ``package.module:Class``, or its class. It may
    be left out if every source of ``data.train`` has its own."""
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
    output_dir: Path = RUNS
    """Folder of all runs."""
    resume: bool = False
    """Continue from the run's newest complete checkpoint."""
    ddp_timeout: float = Field(default=DDP_TIMEOUT, gt=0)
    """Seconds that processes wait for a slow one before the run ends with status 2 and a message
    that names it."""
    data: DataSettings
    policy: PolicySettings = PolicySettings()
    prompt: PromptSettings = PromptSettings()
    rollout: RolloutSettings = RolloutSettings()
    objective: ObjectiveSettings = ObjectiveSettings.model_validate({})
    optim: OptimSettings = OptimSettings()
    warm_start: WarmStartSettings | None = None
    """Supervised steps before the first rollout; None: there are none."""
    evaluation: EvaluationSettings = EvaluationSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    logging: LoggingSettings = LoggingSettings()

    @property
    def run_dir(self) -> Path:
        """The run's folder, ``output_dir/name``."""
        return self.output_dir / (self.name or get_short_name(self.task))

    @property
    def task_name(self) -> str:
        """The task as text: as given, or the name that loads its class."""
        return get_task_name(self.task)

    @property
    def task_names(self) -> tuple[str, ...]:
        """The tasks of all training sources, as text."""
        names: list[str] = []
        for source in self.data.get_sources("train"):
            task = self.task if source.task is None else source.task
            names += source.tasks or [get_task_name(task)]
        return tuple(dict.fromkeys(names))

    @property
    def supervised_steps(self) -> int:
        """The number of steps at the start that train on gold answers, without a rollout."""
        return 0 if self.warm_start is None else self.warm_start.count(self.optim.max_steps)

    def with_steps(self, num_examples: int) -> Settings:
        """Return the settings with the number of steps that ``num_train_epochs`` amounts to.

        Args:
            num_examples: number of training examples.

        Raises:
            UserError: other settings need more steps.
        """
        if self.optim.num_train_epochs is None:
            return self
        given = {name: getattr(self, name) for name in self.model_fields_set}
        return Settings(**{**given, "optim": self.optim.with_steps(num_examples)})

    def is_supervised(self, step: int) -> bool:
        """Return whether a step, numbered from 0, trains on gold answers."""
        every = self.warm_start is not None and self.warm_start.steps == "all"
        return every or step < self.supervised_steps

    def noise_at(self, step: int) -> DiffusionNoise | None:
        """Return the noise on images in a step, numbered from 0; None: there is none."""
        noise, first = self.rollout.noise, self.supervised_steps
        if noise is None or self.is_supervised(step):
            return None
        steps = noise.anneal((step + 1 - first) / (self.optim.max_steps - first))
        return DiffusionNoise(steps, (self.seed,)) if steps else None

    @property
    def updates_per_step(self) -> int:
        """The number of updates on the completions of one rollout."""
        return self.optim.mini_batches * self.objective.num_iterations

    @model_validator(mode="after")
    def _split_task(self) -> Settings:
        split_task(self)
        return self

    @property
    def is_mixture(self) -> bool:
        """Whether the run has a list of sources."""
        return is_mixture(self.data.train) or is_mixture(self.data.eval)

    @property
    def exceeds_embedded_model(self) -> bool:
        """Whether the tiny model is used for a task that it has not learned."""
        return self.model == EMBEDDED and not {*self.task_names} <= {*EMBEDDED_TASKS}

    @model_validator(mode="after")
    def _check_combinations(self) -> Settings:
        problems, optim = [], self.optim
        if MIXED in self.task_names:
            sources = self.data.train if is_mixture(self.data.train) else ()
            problems += [
                f"data.train: the source {source.label} has no task: give it task, or add task=… "
                "for all sources without one"
                for source in sources
                if source.task is None and not source.tasks
            ] or [describe_missing("task")]
        elif self.task == MIXED and self.task_options:
            problems.append(
                "task_options has no effect, since every source of data.train has a task of its "
                "own: give the source task_options"
            )
        elif self.exceeds_embedded_model and "model" not in self.model_fields_set:
            problems.append(
                "model has no value: add model=… with a hub name such as "
                "Qwen/Qwen2.5-VL-3B-Instruct or a folder; the embedded model has learned only "
                f"{', '.join(EMBEDDED_TASKS)} (model=embedded uses it all the same)"
            )
        last = optim.max_steps if optim.num_train_epochs is None else math.inf
        if max(self.logging.profile_steps, default=-1) >= last:
            problems.append(
                f"logging.profile_steps={list(self.logging.profile_steps)} has a step that is "
                f"never run: steps are numbered from 0 to {last - 1}"
            )
        if self.warm_start is not None and self.optim.num_train_epochs is None:
            problem = self.warm_start.find_problem(optim.max_steps, optim.warmup_steps)
            problems += [] if problem is None else [problem]
        problems += self.objective.find_ratio_problems(self.updates_per_step)
        if self.is_supervised(optim.max_steps):
            unused = {"data.curriculum": self.data.curriculum, "rollout.noise": self.rollout.noise}
            for name in ("replay", "distillation", "perception"):
                unused[f"objective.{name}"] = getattr(self.objective, name)
            problems += [
                f"{name} has no effect in a run of supervised steps alone: set {name}=null"
                for name, value in unused.items()
                if value is not None
            ]
        own = self.objective
        others = own.beta or own.replay or own.distillation or own.perception
        if self.rollout.noise is not None and others:
            problems.append(
                "rollout.noise needs objective.beta=0, and no replay, distillation or perception: "
                "each takes a completion for one behind the clean images"
            )
        if self.rollout.noise is not None and own.top_entropy_quantile < 1:
            problems.append(
                "objective.top_entropy_quantile ranks the entropies of all tokens, and "
                "rollout.noise raises them for some completions only: remove one of them"
            )
        weighs = own.perception is not None and own.perception.weighs_tokens
        if weighs and (self.rollout.top_p < 1 or self.rollout.top_k or self.rollout.min_p):
            problems.append(
                "objective.perception.top_share and min_scale compare the sampler's log-probs with "
                "those behind masked images, and rollout.top_p, top_k and min_p change the former: "
                "remove them"
            )
        if not self.data.has_held_out and self.evaluation.every:
            problems.append("evaluation.every has no effect without data.eval")
        if not self.data.has_held_out and self.evaluation.samples > 1:
            problems.append("evaluation.samples has no effect without data.eval")
        if self.data.eval is None and self.evaluation.benchmark is not None:
            problems.append("evaluation.benchmark needs the benchmark's examples as data.eval")
        if self.evaluation.benchmark is not None and self.is_mixture:
            problems.append(
                "evaluation.benchmark is for one held-out source: with a list of sources, give "
                "benchmark to a source of data.eval"
            )
        if not self.data.has_held_out and self.checkpoint.keep_best:
            problems.append("checkpoint.keep_best needs data.eval to find the best checkpoint")
        if self.checkpoint.keep_best and not self.checkpoint.keep_last:
            problems.append("checkpoint.keep_best has no effect with keep_last=0, which keeps all")
        if self.checkpoint.sharded and self.checkpoint.asynchronous:
            problems.append("checkpoint.sharded and checkpoint.asynchronous exclude each other")
        if self.checkpoint.sharded and self.policy.lora is not None:
            problems.append("checkpoint.sharded has no effect on adapters, which are not sharded")
        if self.model == EMBEDDED and self.model_revision is not None:
            problems.append("model_revision has no effect on the embedded model")
        problems += self._overlong_problems()
        is_corrected = "sampler_correction" in self.objective.model_fields_set
        if self.rollout.sampler == "vllm" and self.policy.load_in != "none" and not is_corrected:
            problems.append(
                f"policy.load_in={self.policy.load_in} with rollout.sampler=vllm: the servers have "
                "the whole weights, so their log-probs differ from the trained ones by more than "
                "rounding: leave the sampling to the policy (rollout.sampler=policy), or choose "
                "objective.sampler_correction=token, sequence, token_mask or sequence_mask yourself"
            )
        if self.rollout.sampler == "vllm" and own.top_entropy_quantile < 1:
            problems.append(
                "objective.top_entropy_quantile needs the entropy at each token, which vLLM does "
                "not tell: set it to 1, or rollout.sampler=policy"
            )
        if self.rollout.sampler == "vllm" and self.objective.sampler_correction == "none":
            if "sampler_correction" in self.objective.model_fields_set:
                problems.append(
                    "objective.sampler_correction=none leaves the gradient biased with "
                    "rollout.sampler=vllm, whose log-probs differ from the trainer's: remove it "
                    "(sequence_mask is the default there), or choose token, sequence or token_mask"
                )
            else:
                corrected = {"sampler_correction": "sequence_mask"}
                object.__setattr__(self, "objective", self.objective.model_copy(update=corrected))
        try:
            lora = self.policy.lora
            if self.rollout.vllm is not None and lora is not None:
                self.rollout.vllm.check_adapters(lora.use_dora, lora.modules_to_save)
        except ValueError as error:
            problems.append(str(error))
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
        """Return the problems of settings that conflict with the reward ``overlong``, if used."""
        weights = self.task_options.get("weights")
        if not (isinstance(weights, dict) and weights.get("overlong")):
            return []
        problems = []
        cache, limit = self.task_options.get("overlong_cache"), self.rollout.max_completion_length
        if isinstance(cache, int) and cache > limit:
            problems.append(
                f"task_options.overlong_cache={cache} exceeds "
                f"rollout.max_completion_length={limit}: every completion would be penalized"
            )
        if self.objective.mask_truncated_completions:
            problems.append(
                "the reward overlong penalizes truncated completions, which "
                "objective.mask_truncated_completions leaves out of the loss: use one of the two"
            )
        return problems

    def save(self, path: Path) -> None:
        """Write the settings as YAML for ``load_settings``.

        Objects are written as text: a class by the name that loads it, or as ``<class Name>`` if
        none does, and rows by their number. Pass such objects to ``load_settings`` again.
        """
        values = {**self.model_dump(mode="json"), "name": self.run_dir.name}
        text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        # Without the backslash, "${" in a value would be read as a reference to another setting.
        write_atomic(path, text.replace("${", "\\${").encode())


def check_settings(value: object) -> Settings:
    """Return the value if it is ``Settings``.

    Raises:
        UserError: it is of another type.
    """
    if not isinstance(value, Settings):
        raise UserError(
            "settings must be Settings: use load_settings(…) or Settings(…), "
            f"not {type(value).__name__}"
        )
    return value
