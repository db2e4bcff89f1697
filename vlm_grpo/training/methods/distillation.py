"""On-policy distillation: a second model, the teacher, scores the policy's completions."""

from jaxtyping import Float
from torch import Tensor

from vlm_grpo.config.methods import DistillationSettings
from vlm_grpo.config.objective import ObjectiveSettings
from vlm_grpo.config.policy import PolicySettings
from vlm_grpo.config.run import Settings
from vlm_grpo.errors import UserError
from vlm_grpo.model.policy import Policy, load_policy
from vlm_grpo.training.batch import Values
from vlm_grpo.training.methods import Method, Passes, Run
from vlm_grpo.training.objective import LossInputs, Shares, TokenBatch, k3

_IMAGE_SETTINGS = (
    *("patch_size", "temporal_patch_size", "merge_size", "image_mean", "image_std"),
    *("do_normalize", "do_rescale", "rescale_factor"),
)
"""What the teacher's image processor must share with the policy's, which prepares the images."""


class Distillation(Method):
    """The reverse KL of the policy to a teacher, on the policy's completions."""

    name, phase, block = "distillation", "teacher", "objective.distillation"
    own: DistillationSettings
    teacher: Policy

    def start(self, run: Run) -> None:
        super().start(run)
        self.teacher = load_teacher(run.settings, self.own.teacher, run.policy)

    def score(self, passes: Passes) -> Values:
        logprobs = passes.logprobs(model=self.teacher)
        self.teacher.engine.clear_image_features()
        return {"teacher_logprobs": logprobs}

    def add_weights(
        self, weights: dict[str, Tensor], shares: Shares, objective: ObjectiveSettings
    ) -> None:
        if self.own.only:
            del weights["policy"]
        weights["distillation"] = self.own.coef * shares.kept / shares.tokens

    def term(self, inputs: LossInputs) -> Float[Tensor, " M"]:
        """Compute ρ·(log π_old − log π_teacher) of each token, whose gradient is through ρ alone.

        At ρ = 1 the expected gradient is that of the reverse KL(policy ‖ teacher) of each token,
        given the tokens before it: log π_old − log π_teacher is a reward of the token itself (Lu
        and Thinking Machines Lab, "On-Policy Distillation", 2025; Gu et al., MiniLLM,
        arXiv:2306.08543).
        """
        teacher = inputs.batch.scores.get("teacher_logprobs")
        if teacher is None:
            raise ValueError("distillation needs teacher_logprobs in the batch")
        values = (inputs.batch.logprobs - inputs.old).exp() * (inputs.old - teacher)
        return values if inputs.correction is None else values * inputs.correction

    def metrics(self, batch: TokenBatch, old: Tensor) -> dict[str, Tensor]:
        teacher = batch.scores.get("teacher_logprobs")
        if teacher is None:
            return {}
        return {"distillation/kl": k3(batch.logprobs, teacher) * (batch.logprobs - old).exp()}


def load_teacher(settings: Settings, name: str, policy: Policy) -> Policy:
    """Load a model as the teacher, frozen, on the policy's device."""
    same = {key: getattr(settings.policy, key) for key in ("dtype", "engine", "trust_remote_code")}
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
