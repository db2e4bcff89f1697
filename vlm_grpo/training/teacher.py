"""The teacher of on-policy distillation: a second model that scores the policy's completions."""

from __future__ import annotations

from vlm_grpo.config.policy import PolicySettings
from vlm_grpo.config.run import Settings
from vlm_grpo.errors import UserError
from vlm_grpo.model.policy import Policy, load_policy

_IMAGE_SETTINGS = (
    *("patch_size", "temporal_patch_size", "merge_size", "image_mean", "image_std"),
    *("do_normalize", "do_rescale", "rescale_factor"),
)
"""What the teacher's image processor must share with the policy's, which prepares the images."""


def load_teacher(settings: Settings, policy: Policy) -> Policy | None:
    """Load the teacher that the settings name, frozen, on the policy's device; None: there is none.

    Raises:
        UserError: it cannot be loaded, or reads other tokens or images than the policy.
    """
    if settings.objective.distillation is None:
        return None
    name, own = settings.objective.distillation.teacher, settings.policy
    same = {key: getattr(own, key) for key in ("dtype", "engine", "trust_remote_code")}
    changed = {"model": name, "model_revision": None, "policy": PolicySettings(**same)}
    teacher = load_policy(settings.model_copy(update=changed), training=False)
    for what, is_equal in (
        ("family", type(teacher.family) is type(policy.family)),
        ("vocabulary", teacher.tokenizer.get_vocab() == policy.tokenizer.get_vocab()),
        ("preparation of images", _describe_images(teacher) == _describe_images(policy)),
    ):
        if not is_equal:
            raise UserError(
                f"objective.distillation.teacher={name}: its {what} is not that of model "
                f"{settings.model}, so it cannot score the policy's tokens: choose a model of the "
                "same family"
            )
    teacher.model.to(policy.device).eval().requires_grad_(False)
    return teacher


def _describe_images(policy: Policy) -> list[object]:
    processor = policy.processor.image_processor
    return [getattr(processor, name, None) for name in _IMAGE_SETTINGS]
