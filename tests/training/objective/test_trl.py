# ruff: noqa: SLF001 (TRL's own arithmetic is in private methods)
"""Advantages, losses, gradients and metrics against TRL's own GRPOTrainer, in float64. Its methods
run unchanged: in place of a trainer they get an object with the attributes they read."""

import itertools
from collections import defaultdict
from types import SimpleNamespace
from typing import Any, cast, get_args

import pytest
import torch
from gradients import gradient
from torch import Tensor
from trl.trainer.grpo_trainer import GRPOTrainer

from vlm_grpo.config.objective import LossType, ObjectiveSettings, SamplerCorrection
from vlm_grpo.training.objective.advantages import group_advantages, per_reward_advantages
from vlm_grpo.training.objective.losses import policy_loss
from vlm_grpo.training.objective.token_batch import StepTotals, TokenBatch

pytestmark = [pytest.mark.usefixtures("float64"), pytest.mark.no_shapes]
TOLERANCE = 1e-10  # float64: far above rounding (1e-16), far below any difference in formula
LENGTHS = (5, 3, 1, 4, 5, 2)  # unequal: one completion has one token, two have the full length
MAX_LENGTH = 7  # longer than any completion, so that dr_grpo's normalizer differs


def make_case(settings: ObjectiveSettings, inactive: tuple[int, ...] = ()) -> Any:
    """Return padded tensors (completions, tokens) in TRL's layout, None where they are not used."""
    shape = (len(LENGTHS), max(LENGTHS))
    mask = (torch.arange(shape[1]) < torch.tensor(LENGTHS)[:, None]).long()
    mask[list(inactive)] = 0
    logps = -3 * torch.rand(shape)
    # Differences of 0.4 nats: ratios from about 0.5 to 2, on both sides of every clip used here.
    near = [logps + 0.4 * torch.randn(shape) for _ in range(3)]
    return SimpleNamespace(
        logps=logps.requires_grad_(),
        mask=mask,
        advantages=torch.randn(shape[0]),
        entropies=torch.rand(shape).requires_grad_(),
        old=near[0] if settings.num_iterations > 1 else None,
        ref=near[1] if settings.beta > 0 else None,
        sampler=near[2] if settings.sampler_correction != "none" else None,
    )


class Attributes(SimpleNamespace):
    """What TRL's methods read of a trainer; all that is not given is off."""

    def __getattr__(self, name: str) -> None:
        return None


def make_trl_trainer(settings: ObjectiveSettings) -> SimpleNamespace:
    named = settings.model_dump()  # the settings have TRL's names
    return Attributes(
        **named | {"epsilon_high": settings.upper_epsilon},
        model=SimpleNamespace(training=True),
        args=SimpleNamespace(**named, steps_per_generation=1),
        accelerator=SimpleNamespace(
            num_processes=1, reduce=lambda x, reduction: x, gather=lambda x: x, sync_gradients=True
        ),
        epsilon_low=settings.epsilon,
        use_vllm=settings.sampler_correction != "none",
        vllm_importance_sampling_correction=True,
        get_gamma_weights=GRPOTrainer.get_gamma_weights,
        current_gradient_accumulation_steps=1,
        max_completion_length=MAX_LENGTH,
        _entropy_bonus_enabled=settings.entropy_coef > 0,
        _metrics={"train": defaultdict(list)},
    )


def run_trl_loss(case: Any, settings: ObjectiveSettings) -> tuple[Tensor, dict[str, list[float]]]:
    """Compute the step's loss by TRL's ``_compute_loss``."""
    trainer, result = make_trl_trainer(settings), (case.logps, case.entropies, None)
    trainer._get_per_token_logps_and_entropies = lambda *a, **k: result
    blank = torch.zeros_like(case.mask)
    inputs = {
        "prompt_ids": blank[:, :1],
        "prompt_mask": blank[:, :1],
        "completion_ids": blank,
        "completion_mask": case.mask,
        "advantages": case.advantages,
        "num_items_in_batch": case.mask.sum(),
    }
    known = {"old_per_token_logps": case.old, "ref_per_token_logps": case.ref}
    if case.sampler is not None:
        rewards = torch.zeros(len(case.mask), 1)
        scores, _ = run_trl_scoring(rewards, case=case, settings=settings)
        known["importance_sampling_ratio"] = scores["importance_sampling_ratio"]
    inputs |= {name: values for name, values in known.items() if values is not None}
    return GRPOTrainer._compute_loss(cast(Any, trainer), None, inputs), trainer._metrics["train"]


def run_trl_scoring(
    rewards: Tensor,
    *,
    weights: Tensor | None = None,
    each: bool = False,
    case: Any = None,
    settings: ObjectiveSettings | None = None,
    **named: Any,
) -> tuple[dict[str, Tensor], dict[str, list[float]]]:
    """Run TRL's ``_generate_and_score_completions`` on rewards (completions, functions)."""
    count, functions = rewards.shape
    settings = settings or ObjectiveSettings()
    correction = settings.sampler_correction
    lengths = LENGTHS[:count] if case is not None else (1,) * count
    ids = [[7] * length for length in lengths]
    sampled = old = None
    if case is not None:
        old = case.logps.detach() if case.old is None else case.old
    if case is not None and case.sampler is not None:
        sampled = [row[:n].tolist() for row, n in zip(case.sampler.detach(), lengths, strict=True)]
    names = [f"reward{i}" for i in range(functions)]
    trainer = Attributes(
        accelerator=Attributes(device=torch.device("cpu"), process_index=0, gather=lambda x: x),
        model=Attributes(training=True),
        args=Attributes(
            per_device_train_batch_size=count, steps_per_generation=1, gradient_accumulation_steps=1
        ),
        _generate=lambda prompts: ([[1]] * count, ids, None, [""] * count, sampled, {}, None, None),
        _get_per_token_logps_and_entropies=lambda *a, **k: (old, None, None),
        _tokenizer=SimpleNamespace(pad_token_id=0),
        num_iterations=1,
        use_vllm=correction != "none",
        vllm_importance_sampling_correction=True,
        vllm_importance_sampling_mode=correction + "_truncate" * ("_mask" not in correction),
        vllm_importance_sampling_clip_min=settings.sampler_correction_floor,
        vllm_importance_sampling_clip_max=settings.sampler_correction_cap,
        beta=0.0,
        _calculate_rewards=lambda *a: rewards,
        reward_weights=torch.ones(functions) if weights is None else weights,
        reward_funcs=names,
        reward_func_names=names,
        _metrics={"train": defaultdict(list)},
        _logs=defaultdict(list, rewards=defaultdict(list), extra=defaultdict(list)),
        _pending_extra_logs={},
        _pending_metrics={},
        multi_objective_aggregation="normalize_then_sum" if each else "sum_then_normalize",
        **{"num_generations": 1, "scale_rewards": "group"} | named,
    )
    inputs = [{"prompt": "?"} for _ in range(count)]
    output = GRPOTrainer._generate_and_score_completions(cast(Any, trainer), inputs)
    return output, trainer._metrics["train"]


def build_batch(case: Any) -> TokenBatch:
    """Flatten the completions; a fully masked row becomes an inactive completion."""
    lengths = torch.tensor(LENGTHS[: len(case.mask)])
    real = torch.arange(case.mask.shape[1]) < lengths[:, None]

    def flatten(padded: Tensor | None) -> Tensor | None:
        return None if padded is None else padded[real]

    return TokenBatch(
        logprobs=case.logps[real],
        completion=torch.arange(len(lengths)).repeat_interleave(lengths),
        advantages=case.advantages,
        lengths=lengths,
        old_logprobs=flatten(case.old),
        reference_logprobs=flatten(case.ref),
        sampler_logprobs=flatten(case.sampler),
        entropies=case.entropies[real],
        active=case.mask.any(dim=1),
    )


def count_totals(batch: TokenBatch) -> StepTotals:
    assert batch.active is not None
    return StepTotals.from_lengths(batch.lengths, batch.active, MAX_LENGTH)


def assert_equal(settings: ObjectiveSettings, inactive: tuple[int, ...] = ()) -> None:
    case = make_case(settings, inactive)
    theirs, their_metrics = run_trl_loss(case, settings)
    batch = build_batch(case)
    ours = policy_loss(batch, count_totals(batch), settings)
    assert abs(ours.loss.item() - theirs.item()) < TOLERANCE
    inputs = case.logps, case.entropies
    mine, other = (gradient(loss, *inputs) for loss in (ours.loss, theirs))
    assert (mine - other).abs().max() < TOLERANCE
    metrics = ours.metrics.values()
    shared = set(metrics) & set(their_metrics)
    assert shared >= {"entropy"}
    if settings.importance_sampling_level == "sequence":
        shared -= {"kl"}  # TRL logs the trained KL; here the logged KL stays unbiased
        if inactive:  # TRL counts masked completions as unclipped; here they are not counted
            shared = {name for name in shared if "clip" not in name}
    if not settings.use_bias_correction_kl:
        shared -= {"kl"}  # as above
    for name in shared:
        # TRL counts clipped tokens in float32.
        assert metrics[name] == pytest.approx(their_metrics[name][0], abs=1e-7)


HIGHER, FIXED = {"epsilon_high": 0.28}, {"beta": 0.3, "reference_refresh_every": "never"}
BOUNDS = ({}, HIGHER, {"delta": 1.5}, {"epsilon": 0.1, "delta": 1.5, **HIGHER})
KLS = ({}, FIXED, {**FIXED, "use_bias_correction_kl": False})
LEVELS = ("token", "sequence")
LOSS_TYPES = get_args(LossType)
CORRECTIONS = [name for name in get_args(SamplerCorrection) if name != "none"]


def levels_of(loss_type: str) -> tuple[str, ...]:
    """Return the levels of ratios that a loss type takes."""
    return {"luspo": ("sequence",), "vespo": ("token",)}.get(loss_type, LEVELS)


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo", "luspo"])
def test_clipped_losses_equal_trl(loss_type):
    for level, bounds, kl in itertools.product(levels_of(loss_type), BOUNDS, KLS):
        fields = {"loss_type": loss_type, "importance_sampling_level": level, **bounds, **kl}
        assert_equal(ObjectiveSettings(num_iterations=2, **fields))
        if not bounds:
            assert_equal(ObjectiveSettings(**fields))  # without old log-probs the ratio is 1


@pytest.mark.parametrize(
    "fields",
    [
        *({"loss_type": "cispo", "epsilon_high": bound} for bound in (1.0, 1.3, 5.0)),
        {"loss_type": "sapo"},
        {"loss_type": "sapo", "sapo_temperature_pos": 2.0, "sapo_temperature_neg": 0.7},
        {"loss_type": "vespo"},
        {"loss_type": "vespo", "vespo_k_pos": 1.0, "vespo_lambda_pos": 0.5, "vespo_k_neg": 0.2},
        {"loss_type": "vespo", "vespo_lambda_neg": 4.0},
    ],
)
@pytest.mark.parametrize("num_iterations", [1, 2])
def test_other_losses_equal_trl(fields, num_iterations):
    for level, kl in itertools.product(levels_of(fields["loss_type"]), KLS):
        own = {"importance_sampling_level": level, **fields, **kl}
        assert_equal(ObjectiveSettings(num_iterations=num_iterations, **own))


def make_settings(loss_type: str, **fields: Any) -> ObjectiveSettings:
    bound = 5.0 if loss_type == "cispo" else None
    return ObjectiveSettings(**{"loss_type": loss_type, "epsilon_high": bound, **fields})


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_entropy_bonus_and_masked_completions_equal_trl(loss_type):
    both = {"num_iterations": 2, "entropy_coef": 0.05, "mask_truncated_completions": True}
    for level, kl in itertools.product(levels_of(loss_type), KLS):
        settings = make_settings(loss_type, importance_sampling_level=level, **both, **kl)
        assert_equal(settings, inactive=(1, 4))


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("num_iterations", [1, 2])
def test_sampler_correction_equals_trl(loss_type, correction, num_iterations):
    bounds = ((1.2, None), (1.2, 0.9), (None, 0.9))
    # Each pair of bounds meets each KL in some of the cases.
    first = LOSS_TYPES.index(loss_type) + CORRECTIONS.index(correction)
    cases = itertools.product(levels_of(loss_type), KLS)
    for number, (level, kl) in enumerate(cases, first):
        cap, floor = bounds[number % len(bounds)]
        own = {"sampler_correction_cap": cap, "sampler_correction_floor": floor, **kl}
        own |= {"num_iterations": num_iterations, "importance_sampling_level": level}
        assert_equal(make_settings(loss_type, sampler_correction=correction, **own))


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_metrics_of_the_sampler_equal_trl(correction):
    bounds = {"sampler_correction_cap": 1.5, "sampler_correction_floor": 0.5}
    case = make_case(settings := ObjectiveSettings(sampler_correction=correction, **bounds))
    rewards = torch.zeros(len(case.mask), 1)
    _, theirs = run_trl_scoring(rewards, case=case, settings=settings)
    batch = build_batch(case)
    ours = policy_loss(batch, count_totals(batch), settings).metrics.values()
    shared = {name for name in theirs if name.startswith("sampling/")}
    assert len(shared) == 5  # mean and max of the difference; min, mean and max of the weight
    assert {name: ours[name] for name in shared} == pytest.approx(
        {name: theirs[name][0] for name in shared}, abs=TOLERANCE
    )
    # Both beyond a bound: some of the weights, and not all of them.
    form = "rejected" if correction.endswith("_mask") else "capped"
    assert 0 < ours[f"sampling/importance_sampling_ratio/{form}"] < 1


GROUPS, SIZE = 3, 4
IDS = [str(i // SIZE) for i in range(GROUPS * SIZE)]


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_advantages_equal_trl(scale):
    rewards = torch.rand(GROUPS * SIZE)
    rewards[1] = rewards[6] = torch.nan  # every reward function returned None: unscorable in both
    theirs, metrics = run_trl_scoring(rewards[:, None], num_generations=SIZE, scale_rewards=scale)
    ours = group_advantages(rewards, IDS, scale_rewards=scale)
    assert (ours.values - theirs["advantages"]).abs().max() < TOLERANCE
    assert ours.unscorable == 2
    assert ours.frac_reward_zero_std == metrics["frac_reward_zero_std"][0] == 0.0


def test_advantages_normalized_per_reward_equal_trl():
    rewards = torch.rand(GROUPS * SIZE, 3)
    weights = torch.tensor([1.0, 0.5, 2.0])
    theirs, _ = run_trl_scoring(rewards, num_generations=SIZE, weights=weights, each=True)
    ours = per_reward_advantages(rewards, weights, IDS)
    assert (ours.values - theirs["advantages"]).abs().max() < TOLERANCE
