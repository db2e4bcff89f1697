"""Tests of whole steps: ``plain_step`` computes the Trainer's gradients again, from the completions
and their rewards."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gradients import relative_distance
from plain_step import PlainModel, PlainStep, compute_gradient
from recorded import record_calls
from small_environments import Peek
from small_runs import save_tiny_model, small_run
from steps import capture_step, let_first_differ, record_updates
from tiny_models import noise_example
from torch import Tensor

from vlm_grpo import Settings, Task, Trainer, load_policy, reward
from vlm_grpo.config.section import merge
from vlm_grpo.training.methods.distillation import Distillation
from vlm_grpo.training.methods.revision import is_revised
from vlm_grpo.training.step_batch import build_slices
from vlm_grpo.types import Example, Group

LORA = {"policy.lora": {"r": 2, "alpha": 8, "target": ["q_proj", "up_proj"]}}
MASKED = {"objective.mask_truncated_completions": True}
ONCE = {"objective.num_iterations": 1}
HALVES = {"optim.mini_batches": 2}
KL_LOSS = {"objective.beta": 0.5}
KL_REWARD = {"objective.beta": 0.3, "objective.kl_in": "reward", "objective.kl_estimator": "k1"}
EPISODES = {"rollout.max_completion_length": 16}
CASES: dict[str, dict[str, Any]] = {
    "grpo, KL in the loss, masked, one completion in each micro-batch": {
        **KL_LOSS, **MASKED, "optim.max_tokens_per_batch": 1, "rollout.temperature": 0.6,
    },
    "bnpo, LoRA, KL in the loss, masked, in micro-batches": {
        **LORA, **KL_LOSS, **MASKED, "optim.max_tokens_per_batch": 60,
        "objective.loss_type": "bnpo", "objective.scale_rewards": "batch",
        "objective.use_bias_correction_kl": False,
    },
    "dr_grpo, KL in the reward, reference refreshed": {
        **KL_REWARD, "objective.loss_type": "dr_grpo", "objective.reference_refresh_every": 2,
        "objective.advantage_estimator": "rloo", "objective.scale_rewards": "none",
        "objective.importance_sampling_level": "sequence",
    },
    "cispo, truncated sampler, entropy, three updates, in micro-batches": {
        **LORA, "objective.loss_type": "cispo", "objective.epsilon_high": 1.0,
        "objective.entropy_coef": 0.05, "objective.num_iterations": 3, "rollout.top_k": 150,
        "objective.sampler_correction": "token", "objective.sampler_correction_cap": 1.05,
        "optim.max_tokens_per_batch": 60,
    },
    "dapo, LoRA, two mini-batches, one iteration, masked, KL in the reward": {
        **LORA, **ONCE, **MASKED, **KL_REWARD, **HALVES, "objective.loss_type": "dapo",
        "objective.epsilon_high": 0.3,
    },
    "REINFORCE++ with advantages of tokens, two mini-batches, masked, KL in the reward": {
        **LORA, **ONCE, **MASKED, **KL_REWARD, **HALVES, "objective.advantage_clip": 0.7,
        "objective.advantage_estimator": "reinforce_plus_plus_baseline",
    },
    "a teacher beside the rewards, two updates, masked": {
        **MASKED, "objective.distillation": {"teacher": "other", "coef": 2.0},
    },
    "the policy's average that sees a crop, LoRA, masked, in micro-batches": {
        **LORA, **MASKED, "optim.max_tokens_per_batch": 60, "optim.prompts_per_step": 3,
        "objective.distillation": {
            "teacher_prompt": "crop", "margin": 0, "teacher_update_rate": 0.4, "coef": 2.0,
            "loss": "jensen_shannon", "topk": 20, "alpha": 0.3, "is_clip": 1.0005,
            "high_share": 0.3,
        },
    },
    "the first policy that sees a part, alone": {
        "optim.prompts_per_step": 3, "objective.distillation": {
            "teacher_prompt": "mask", "margin": 0, "teacher_update_rate": 0.0, "only": True,
        },
    },
    "episodes that fork, the policy sees a crop, in micro-batches": {
        **EPISODES, **ONCE, "task_options.environment": "zoom", "rollout.forks": 2,
        "optim.max_tokens_per_batch": 400, "objective.distillation": {
            "teacher_prompt": "crop", "margin": 0, "teacher_update_rate": 0.5,
            "loss": "jensen_shannon",
        },
    },
    "images with noise, truncated sampler, two mini-batches": {
        **HALVES, "objective.sampler_correction": "token", "objective.epsilon": 0.9,
        "objective.epsilon_high": 9.0, "rollout.noise": {"strength": 800, "share": 0.25},
        "rollout.top_k": 150,
    },
    "crops in place of images, LoRA, masked, two mini-batches": {
        **LORA, **MASKED, **HALVES, "objective.sampler_correction": "token",
        "methods": [{"file": "crop_rollouts", "options": {"share": 0.25, "margin": 0}}],
        "optim.prompts_per_step": 4,
    },
    "masked images: PAPO, VPPO and less entropy, two mini-batches, masked completions": {
        **LORA, **ONCE, **MASKED, **HALVES, "objective.perception": {
            "kl_coef": 0.3, "top_share": 0.4, "min_scale": 0.5, "patch_size": 7,
        },
        "objective.entropy_coef": -0.05, "objective.top_entropy_quantile": 0.8,
        "objective.advantage_clip": 0.7,
    },
    "wide groups that begin alike, passed once, in micro-batches": {
        **KL_LOSS, **ONCE, **MASKED, "optim.max_tokens_per_batch": 40, "rollout.temperature": 0.1,
        "rollout.num_generations": 16, "rollout.max_completion_length": 4,
    },
    "episodes with observed images, LoRA, masked, KL in the loss, in micro-batches": {
        **LORA, **KL_LOSS, **ONCE, **MASKED, **HALVES, **EPISODES, "optim.max_tokens_per_batch": 60,
    },
    "episodes that fork, dapo, masked, in micro-batches": {
        **KL_LOSS, **MASKED, **EPISODES, "objective.loss_type": "dapo", "rollout.forks": 2,
        "optim.max_tokens_per_batch": 400,
        "task_options.environment": "zoom",  # in the settings; the task has Peek
    },
    "revised groups and others, LoRA, masked, KL in the loss, two mini-batches": {
        **LORA, **KL_LOSS, **ONCE, **MASKED, **HALVES, "rollout.max_completion_length": 9,
        "methods": [{"file": "revision", "options": {"below": 0.2, "text": "No."}}],
        "optim.max_tokens_per_batch": 60, "optim.prompts_per_step": 4,
    },
}  # fmt: skip
"""Settings under which the gradient of every update is compared with plain transformers."""
ENDS = range(0, 256, 3)
"""Tokens that end a completion, a third of all: some completions end, others are truncated."""


class Letters(Task):
    """Two rewards of different weight; most random completions earn a part of each."""

    primary_metric = "letters"

    def parse(self, text: str, example: Example) -> str:
        return text

    def write(self, answer: Any, example: Example) -> str:
        return str(answer)

    @reward()
    def letters(self, answer: str, example: Example) -> float:
        return sum(character.isalpha() for character in answer) / 8

    @reward(weight=-0.5)
    def codes(self, answer: str, example: Example) -> float:
        return sum(map(ord, answer)) % 7 / 7


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, beside ``other``, which has one with other weights."""
    root = tmp_path_factory.mktemp("models")
    for name, seed in (("model", 0), ("other", 7)):
        save_tiny_model(root / name, seed=seed, ends=ENDS, layers=3)
    return root / "model"


EXAMPLES = [
    replace(noise_example("a", [(56, 28)], seed=1), meta={"evidence": [[14, 0, 42, 28]]}),
    noise_example("b", [(28, 28), (56, 56)], "And these two?", seed=2),
    noise_example("c", [], "And without an image?"),
]
"""Prompts with one, two and no images, of sizes that the model's resize does not change."""


@pytest.fixture
def make_settings(model_folder: Path, tmp_path: Path) -> Any:
    """Return a function that builds the settings of a small run; its arguments change them."""

    def make(*blocks: Mapping[str, Any], **changes: Any) -> Settings:
        values: dict[str, Any] = {
            "rollout": {"num_generations": 4, "max_completion_length": 5, "min_new_tokens": 2},
            "optim": {"lr": 1e-3, "prompts_per_step": 2, "max_steps": 4},
            "logging": {"samples_every": 0},
        }
        for block in (*blocks, changes):
            merge(values, block)
        teaching = values.get("objective", {}).get("distillation", {})
        if "teacher" in teaching:
            teaching["teacher"] = str(model_folder.with_name("other"))
        return small_run(tmp_path, model_folder, **values)

    return make


def make_trainer(settings: Settings, environment: Any = None, **weights: float) -> Trainer:
    """Build a trainer whose model computes in float64: a difference is then one of formulas."""
    torch.manual_seed(1)  # of the adapters, so that a test does not depend on those before it
    policy = load_policy(settings)
    policy.model.double()
    trainer = Trainer(settings, policy, Letters(weights=weights, environment=environment), EXAMPLES)
    for method in trainer.methods.values():
        if isinstance(method, Distillation) and method.teacher is not None:
            method.teacher.model.double()
    return trainer


class Recorder:
    """The groups of a trainer's steps, and the weights and gradients before its updates."""

    def __init__(self, trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
        self.trainer = trainer
        self.samples = record_calls(monkeypatch, trainer.sampler, "sample")
        self.weights, self.gradients = record_updates(monkeypatch, trainer.strategy)

    @property
    def groups(self) -> list[Sequence[Group]]:
        return [call.result.groups for call in self.samples]


@pytest.mark.parametrize("case", CASES)
def test_every_gradient_of_a_run_equals_the_one_from_its_raw_groups(
    case, make_settings, model_folder, monkeypatch
):
    """The gradient before the optimizer, in each update of two steps, or until a refresh."""
    defaults = {"num_iterations": 2, "reference_refresh_every": "never"}
    settings = make_settings({"objective": defaults}, CASES[case])
    updates, every = settings.updates_per_step, settings.objective.reference_refresh_every
    parts = settings.optim.mini_batches
    environment = Peek() if case.startswith("episodes") else None
    # What the tools are is nine tenths of these prompts.
    monkeypatch.setattr("vlm_grpo.model.prompts.TOOLS", "Look.")
    recorder = Recorder(make_trainer(settings, environment), monkeypatch)
    plain, average = PlainModel(model_folder, settings), dict[str, Tensor]()
    rewards = {"letters": 1.0, "codes": -0.5, **({"turns": 0.5} if environment else {})}
    for step in range(2 if every == "never" else every + 1):
        metrics, losses = recorder.trainer.step(), []
        before, refreshed = step * updates, 0 if every == "never" else step - step % every
        now, teaching = recorder.weights[before], settings.objective.distillation
        rate = teaching.teacher_update_rate if step and teaching is not None else 1.0
        average = {n: w + rate * (now[n] - w) for n, w in (average if step else now).items()}
        reference, groups = recorder.weights[refreshed * updates], recorder.groups[step]
        raw = PlainStep(groups, rewards, now, reference, number=step, average=average)
        for update in range(before, before + updates):
            weights, part = recorder.weights[update], (update - before) % parts
            loss, expected = compute_gradient(plain, raw, weights, settings, part)
            losses.append(loss)
            # float64, but for the rewards, the advantages and the sampler's log-probs in float32.
            assert relative_distance(recorder.gradients[update], expected) < 5e-6
        assert metrics["loss"] == pytest.approx(sum(losses) / updates, rel=1e-5, abs=1e-6)
    completions = [c for groups in recorder.groups for g in groups for c in g.completions]
    if case.startswith("wide"):
        slices = build_slices([*recorder.groups[0]], [True] * 32)
        assert any(s.parent >= 0 for piece in slices for s in piece.segments)
        assert any(len(s.members) > 1 for piece in slices for s in piece.segments)
    if case.startswith("revised"):
        revised = {g.id for groups in recorder.groups for g in groups if is_revised(g)}
        assert 0 < len(revised) < len(EXAMPLES)
    if environment is None:
        assert {c.stop for c in completions} == {"eos", "length"}
        return
    observed = [o.prompt for c in completions for o in c.observations]
    assert {len(prompt.example.images) for prompt in observed} == {0, 1}
    assert max(len(c.turns) for c in completions) == environment.max_turns
    if settings.rollout.forks == 1:
        assert all(own.trunk is None for own in completions)
        return
    for number, own in enumerate(completions):
        first, count = number // 2 * 2, own.trunk_length
        trunk = completions[first]
        assert own.trunk == first % 4  # of the groups' four completions
        assert own.logprobs[:count] == trunk.logprobs[:count]
        assert own.turns[0] == trunk.turns[0]
        assert own.observations[:1] == trunk.observations[:1]
    pairs = zip(completions[::2], completions[1::2], strict=True)
    assert any(a.observations and a.token_ids != b.token_ids for a, b in pairs)


@pytest.mark.parametrize(("loss", "iterations"), [("grpo", 1), ("dapo", 2)])
def test_replayed_groups_have_the_ratio_to_the_policy_that_sampled_them(
    loss, iterations, make_settings, model_folder, monkeypatch
):
    """A group of the second step counts as one with equal rewards, so one of the first returns."""
    objective = {"loss_type": loss, "num_iterations": iterations, "epsilon": 0.01, "replay": {}}
    settings = make_settings(objective=objective)
    recorder = Recorder(make_trainer(settings), monkeypatch)
    recorder.trainer.step()
    let_first_differ(monkeypatch, recorder.trainer)
    metrics, rollout, _ = capture_step(recorder.trainer)
    assert metrics["replay/groups"] == 1
    assert metrics["clip_ratio/region_mean"] > 0
    again = rollout.recalled
    assert [group.id for group in again] == [recorder.groups[0][1].id]
    plain, weights = PlainModel(model_folder, settings), {"letters": 1.0, "codes": -0.5}
    first, before = recorder.weights[0], recorder.weights[iterations]
    replayed = PlainStep(again, weights, first, first)
    raw = PlainStep(recorder.groups[1], weights, before, before, replayed)
    for update in range(iterations, 2 * iterations):
        _, expected = compute_gradient(plain, raw, recorder.weights[update], settings)
        assert relative_distance(recorder.gradients[update], expected) < 5e-6


LORA_OF_TEXT = {"r": 2, "alpha": 8, "target": ["q_proj", "v_proj"]}


@pytest.mark.parametrize(
    ("policy", "trains_vision"),
    # The tower's layers have other names.
    [({}, True), (LORA, True), ({"policy.lora": LORA_OF_TEXT}, False)],
    ids=["full", "adapters", "frozen"],
)
def test_the_credit_of_an_image_is_the_gradient_of_plain_transformers_at_its_tokens(
    policy, trains_vision, make_settings, model_folder, monkeypatch
):
    """In two updates of micro-batches that cut groups; gradients of weights stay the same bits."""
    settings = make_settings(policy, HALVES, {"optim.max_tokens_per_batch": 40})
    watching = Settings.model_validate({**settings.model_dump(), "methods": ["visual_credit"]})
    recorder, other = (Recorder(make_trainer(s), monkeypatch) for s in (watching, settings))
    for each in (recorder, other):
        each.trainer.step()
        engine: Any = each.trainer.policy.engine
        assert engine.encoder.is_trained == trains_vision
    for pair in zip(recorder.gradients, other.gradients, strict=True):
        assert all(torch.equal(pair[0][name], expected) for name, expected in pair[1].items())
    plain: Any = PlainModel(model_folder, settings)
    leaves = list[list[Tensor]]()
    base = plain.model.model
    encode, trained = base.get_image_features, dict(plain.trained)

    def encode_and_watch(*arguments: Any, **named: Any) -> Any:
        output = encode(*arguments, **named)
        if torch.is_grad_enabled():
            leaves.append([x.detach().requires_grad_() for x in output.pooler_output])
            plain.trained |= {f"image {len(leaves)} {n}": x for n, x in enumerate(leaves[-1])}
            output.pooler_output = leaves[-1]
        return output

    monkeypatch.setattr(base, "get_image_features", encode_and_watch)
    groups, before = recorder.groups[0], recorder.weights[0]
    raw = PlainStep(groups, {"letters": 1.0, "codes": -0.5}, before, before)
    seen = 0
    for part, group in enumerate(groups):
        plain.trained, images = dict(trained), group.prompt.example.images
        leaves.clear()
        _, found = compute_gradient(plain, raw, recorder.weights[part], settings, part)
        for number, image in enumerate(images):
            own = [v for n, v in found.items() if n.startswith("image ")][number :: len(images)]
            assert len(own) == 4  # completions
            grid = image.size[1] // 28, image.size[0] // 28
            expected = torch.stack(own).sum(0).norm(dim=-1).view(grid).numpy()
            method: Any = recorder.trainer.methods["visual_credit"]
            assert method.maps[image] == pytest.approx(expected, rel=5e-6)
            seen += 1
    assert seen > 0


def test_a_loss_of_a_file_is_trained(make_settings, tmp_path):
    (tmp_path / "nothing.py").write_text("def loss(ratio, *_):\n    return 0 * ratio\n")
    settings = make_settings(objective={"loss": f"{tmp_path}/nothing.py:loss"})
    assert make_trainer(settings).step()["grad_norm"] == 0


def test_training_raises_the_reward(make_settings):
    """The share of letters among four random characters, about a fifth at first."""
    settings = make_settings(
        rollout={"num_generations": 16, "max_completion_length": 4, "min_new_tokens": 4},
        optim={"lr": 5e-3, "max_steps": 10},
    )
    trainer = make_trainer(settings, letters=1, codes=0)  # also: weights may be integers
    means = [trainer.step()["rewards/letters/mean"] for _ in range(10)]
    assert sum(means[-3:]) - sum(means[:3]) > 0.3, means


@pytest.mark.parametrize("limit", [0.125, 0, 1e3])
def test_the_gradient_is_scaled_down_to_the_maximum_norm(limit, make_settings, monkeypatch):
    """A limit of 0 is none, and 1000 is larger than the norm."""
    settings, used = make_settings(optim={"max_grad_norm": limit}), list[Tensor]()
    recorder = Recorder(make_trainer(settings), monkeypatch)
    strategy = recorder.trainer.strategy

    def record_gradient(*_: Any) -> None:
        used.extend(w.grad.flatten() for _, w in strategy.trainable if w.grad is not None)

    strategy.optimizer.register_step_pre_hook(record_gradient)
    metrics = recorder.trainer.step()
    before = torch.cat([grad.flatten() for grad in recorder.gradients[0].values()])
    assert metrics["grad_norm"] == pytest.approx(before.norm().item(), rel=1e-6)
    if limit != 0.125:
        assert torch.equal(torch.cat(used), before)
        return
    assert before.norm() > 0.25
    # clip_grad_norm_ adds 1e-6 to the norm that it divides by.
    expected = before * limit / before.norm()
    torch.testing.assert_close(torch.cat(used), expected, rtol=1e-5, atol=0)
