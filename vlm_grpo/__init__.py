"""Fine-tune vision-language models with GRPO on tasks whose answers a rule can check.

The names below are imported when they are first used, so that ``import vlm_grpo`` and the task
interface load neither torch nor transformers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vlm_grpo.config.recipes import load_settings
    from vlm_grpo.config.run import Settings
    from vlm_grpo.errors import Stopped, UserError
    from vlm_grpo.eval.evaluate import evaluate
    from vlm_grpo.eval.predict import predict
    from vlm_grpo.model.policy import load_policy
    from vlm_grpo.planning.plan import plan
    from vlm_grpo.task import Task, metric, reward
    from vlm_grpo.task.registry import load_task
    from vlm_grpo.training.export import export
    from vlm_grpo.training.summary import TrainResult
    from vlm_grpo.training.trainer import Trainer, train
    from vlm_grpo.types import Batch, Candidate, Example
    from vlm_grpo.utils.trust import trust_code

    __version__: str

__all__ = [
    "Batch",
    "Candidate",
    "Example",
    "Settings",
    "Stopped",
    "Task",
    "TrainResult",
    "Trainer",
    "UserError",
    "__version__",
    "evaluate",
    "export",
    "load_policy",
    "load_settings",
    "load_task",
    "metric",
    "plan",
    "predict",
    "reward",
    "train",
    "trust_code",
]

_MODULES = {
    "Batch": "types",
    "Candidate": "types",
    "Example": "types",
    "Settings": "config.run",
    "Stopped": "errors",
    "Task": "task",
    "TrainResult": "training.summary",
    "Trainer": "training.trainer",
    "UserError": "errors",
    "evaluate": "eval.evaluate",
    "export": "training.export",
    "load_policy": "model.policy",
    "load_settings": "config.recipes",
    "load_task": "task.registry",
    "metric": "task",
    "plan": "planning.plan",
    "predict": "eval.predict",
    "reward": "task",
    "train": "training.trainer",
    "trust_code": "utils.trust",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module("importlib.metadata").version("vlm-grpo")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
