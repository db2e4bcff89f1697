"""Settings of the optional methods, and what a step with each costs.

``vlm_grpo/training/methods`` has one file with the hooks of each. The settings of those that have a
block are here because commands read settings without loading torch. A method that ``methods``
names has its settings in its file.
"""

import importlib
import pkgutil
from collections.abc import Mapping
from functools import cache, lru_cache
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import Field, model_validator

from vlm_grpo.config.optim import Schedule, WarmupSteps
from vlm_grpo.config.section import FREE, Frozen
from vlm_grpo.errors import UserError, nearest
from vlm_grpo.task.registry import load_file

T = TypeVar("T")
BUILT_IN = "vlm_grpo.training.methods"
"""The package of the built-in methods."""
MAX_NOISE_STEPS = 999  # the most diffusion steps, after which little of an image is left


class MethodSettings(Frozen):
    """Settings of an optional method, and what a step with it costs."""

    extra_passes: ClassVar[int] = 0
    """Passes without gradient behind other images than the prompts' own."""
    extra_views: ClassVar[int] = 0
    """Further forms of each prompt from behind which a group is sampled."""

    extra_model: ClassVar[str | None] = None
    """A further model that scores; "": a copy of the policy; None: there is none."""
    term: ClassVar[str | None] = None
    """Name of the method's term in the loss; None: it has none."""

    @property
    def trains_all(self) -> bool:
        """Whether completions with advantage 0 have a gradient too."""
        return self.term is not None


class NoiseSettings(MethodSettings):
    """NoisyRollout (Liu et al., arXiv:2504.13055): a part of each group is sampled for images
    with Gaussian noise, and the update scores it for the clean ones. Defaults are those of the
    authors' run on Geometry3K."""

    extra_views: ClassVar[int] = 1
    share: float = Field(default=0.5, gt=0, lt=1)
    """Share of a group's completions sampled for noisy images, rounded; at least one noisy and one
    clean completion."""
    strength: int = Field(default=500, ge=1, le=MAX_NOISE_STEPS)
    """Diffusion steps of the noise at first, α₀; 500 leave 74 % of an image's variance."""
    midpoint: float = Field(default=2 / 3, gt=0)
    """Share of the run after which the strength is half, γ; well above 1: it does not fall."""
    steepness: float = Field(default=30.0, gt=0)
    """How fast the strength falls about the midpoint, λ."""


class CurriculumSettings(MethodSettings):
    """The choice of each step's prompts by the pass rates that earlier steps have shown."""

    target: float = Field(default=0.5, gt=0, lt=1)
    """Pass rate to be close to."""
    pool: int = Field(default=8, ge=2)
    """Candidates per prompt: the next ones in the shuffled order. Those that are not chosen have
    their turn again in the next pass over the data."""
    decay: float = Field(default=0.5, ge=0, le=1)
    """Share of what was known of an example that is kept when it is sampled again, since the policy
    has changed; 1: all, 0: nothing."""
    unseen: float = Field(default=0.25, ge=0, le=1)
    """Least share of the prompts whose examples have not been sampled yet, while there are any; 0
    reserves none."""


class ReplaySettings(MethodSettings):
    """The replay of earlier groups in steps in which some groups have equal rewards."""

    size: int = Field(default=64, ge=1)
    """Maximum number of groups that are kept; the oldest leave first."""
    max_age: int = Field(default=8, ge=1)
    """Number of steps after which a group is not replayed any more."""
    completions: int | None = Field(default=None, ge=2)
    """Maximum number of completions that are kept of a group: the best and the worst, so that their
    rewards vary as much as possible (PODS, arXiv:2504.13818). None: all."""


class DistillationSettings(MethodSettings):
    """On-policy distillation: a teacher scores the policy's own completions, token by token.

    ``teacher_prompt=crop loss=jensen_shannon only=true`` is Vision-OPD (arXiv:2605.18740), whose
    values are the defaults."""

    term: ClassVar[str | None] = "distillation"
    teacher: str | None = None
    """Model whose distribution the policy approaches, as the setting ``model``; one of the policy's
    family, with its tokens. None: the policy itself, with weights as in ``teacher_update_rate``."""
    teacher_update_rate: float = Field(default=0.05, ge=0, lt=1)
    """Share of the policy's weights in the moving average after each step that is the teacher. 0:
    it stays the initial policy."""
    teacher_prompt: Literal["same", "crop", "mask"] = "same"
    """What the teacher sees of the image: ``same`` all of it; ``crop`` the part around the boxes in
    the row's column ``evidence``, from the original pixels; ``mask`` the image, black beyond these
    boxes, or beyond those of the answer, which keeps the frame of coordinates. With both, rows
    without such boxes have no teacher."""
    boxes: Literal["gold", "own"] = "gold"
    """Whose boxes ``mask`` shows: ``gold`` the row's; ``own`` those of the answer with the highest
    reward in the group, for answers that are boxes."""
    margin: float = Field(default=0.1, ge=0)
    """Share of the sides of the boxes by which ``crop`` and ``mask`` extend them on each side."""
    loss: Literal["reverse_kl", "jensen_shannon"] = "reverse_kl"
    """``reverse_kl``: the KL of the policy to the teacher, from the sampled tokens;
    ``jensen_shannon``: the divergence of both to their mixture, over the teacher's likeliest tokens
    and the rest as one."""
    alpha: float = Field(default=0.5, gt=0, lt=1)
    """Share of the teacher in the mixture of ``jensen_shannon``, and of its divergence."""
    topk: int = Field(default=100, ge=1)
    """Number of the teacher's likeliest tokens that ``jensen_shannon`` compares."""
    is_clip: float = Field(default=2.0, gt=0)
    """Upper bound of the importance ratio that multiplies ``jensen_shannon``."""
    high_share: float = Field(default=0.0, ge=0, lt=1)
    """Share of the step's tokens with the largest visual advantage, whose mean loss counts as much
    as that of all others: by how much the teacher finds a token likelier than the policy did
    (after VA-OPD, arXiv:2605.21924). 0: one mean over all tokens."""
    coef: float = Field(default=1.0, gt=0.0)
    """Weight of the loss, a mean over the step's active tokens."""
    only: bool = False
    """True: train on the teacher alone; rewards are measured, but not trained on. False: on both.
    """

    @property
    def extra_model(self) -> str:
        return self.teacher or ""


class PerceptionSettings(MethodSettings):
    """Methods that score each completion once more, behind images with masked patches: PAPO
    (arXiv:2507.06448) with ``kl_coef``, and VPPO (arXiv:2510.09285) with ``top_share`` and
    ``min_scale``. The mask is PAPO's; VPPO masks half of the patches."""

    extra_passes: ClassVar[int] = 1
    mask_ratio: float = Field(default=0.6, gt=0.0, le=1.0)
    """Probability of each patch to be black."""
    patch_size: int = Field(default=14, ge=1)
    """Side of a patch, in pixels of the resized image."""
    kl_coef: float = Field(default=0.0, ge=0.0)
    """Weight of the KL of the policy to itself behind the masked images, which is raised; PAPO has
    0.01 to 0.02. 0 disables it."""
    top_share: float | None = Field(default=None, gt=0.0, lt=1.0)
    """Share of the tokens of each completion, rounded up, that the policy gradient keeps: those
    that depend most on the image. VPPO has 0.4; None: it keeps all."""
    min_scale: float | None = Field(default=None, gt=0.0, lt=1.0)
    """Scale of the advantages of the completion that depends least on its image; those of the
    others are higher, with mean 1. VPPO has 0.9; None: all are 1."""

    @property
    def weighs_tokens(self) -> bool:
        return self.top_share is not None or self.min_scale is not None

    @property
    def term(self) -> str | None:
        return "perception" if self.kl_coef else None

    @property
    def trains_all(self) -> bool:
        return True


class WarmStartSettings(MethodSettings):
    """Supervised steps before the first rollout: cross-entropy on gold answers; by default none.

    A row with a text ``completion`` among its columns is trained on that text; for any other row
    the task writes its gold answer.
    """

    steps: int | Literal["all"] = Field(union_mode="left_to_right")
    """Number of supervised steps, which ``optim.max_steps`` includes; ``all``: every step, as with
    ``vlm-grpo sft``."""
    lr: Annotated[float, FREE] = Field(default=2e-5, ge=0)
    """Peak learning rate of the supervised steps; ``optim.lr`` is that of the steps after them."""
    schedule: Annotated[Schedule, FREE] = "linear"
    """Learning rate schedule over the supervised steps. ``optim.schedule`` and its warmup begin
    after them."""
    warmup_steps: Annotated[WarmupSteps, FREE] = 0
    """Number of supervised steps in which the learning rate rises to its peak; below 1: as a share
    of them; 0: no warmup."""

    def count(self, max_steps: int) -> int:
        return max_steps if self.steps == "all" else self.steps


class OwnMethod(Frozen):
    """A method by its file: one with a subclass of ``Method``, and perhaps one of
    ``MethodSettings``."""

    file: Path
    """A Python file of the user's, which this setting runs; or the name of a built-in method that
    has its settings in its file."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Values of the settings that the method declares."""

    @model_validator(mode="before")
    @classmethod
    def _read_path(cls, value: Any) -> Any:
        return {"file": value} if isinstance(value, str | Path) else value


def load_method_file(entry: OwnMethod) -> ModuleType:
    """Load a method's file; raise a ``UserError`` if it fails."""
    if (name := str(entry.file)).isidentifier():
        found = load_built_in().items()
        named = {known: module for known, module in found if find_classes(module, MethodSettings)}
        if name not in named:
            raise UserError(
                f"methods: there is no method {name}{nearest(name, named)}: give "
                f"{', '.join((*named, 'the path of a .py file'))}; others have blocks of settings"
            )
        return named[name]
    file = entry.file.expanduser()
    return _load_version(file, file.stat().st_mtime_ns if file.is_file() else 0)


@lru_cache(maxsize=8)
def _load_version(file: Path, changed: int) -> ModuleType:
    return load_file(file, "method")


@cache
def load_built_in() -> dict[str, ModuleType]:
    """Load the files of the built-in methods, by name."""
    found = pkgutil.iter_modules(importlib.import_module(BUILT_IN).__path__)
    return {m.name: importlib.import_module(f"{BUILT_IN}.{m.name}") for m in found}


def find_classes(module: ModuleType, base: type[T]) -> list[type[T]]:
    """Return the subclasses that a module defines."""
    classes = (value for value in vars(module).values() if isinstance(value, type))
    return [c for c in classes if issubclass(c, base) and c.__module__ == module.__name__]


def read_own_settings(entry: OwnMethod) -> MethodSettings:
    """Return the settings of a file's method; raise a ``UserError`` if they are wrong."""
    found = find_classes(load_method_file(entry), MethodSettings)
    return (found[0] if found else MethodSettings)(**entry.options)


def find_method_settings(*blocks: Frozen | Mapping[str, Any]) -> list[MethodSettings]:
    fields = (value for block in blocks for _, value in dict(block).items())
    return [value for value in fields if isinstance(value, MethodSettings)]
