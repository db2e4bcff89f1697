"""The updates of a step: their metrics, their schedule, and lack of memory."""

import contextlib
import functools
import math
import warnings
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from gpu_standins import GpuMemory
from groups import make_advantages, make_group
from meta_device import SIZES, build_policy, no_host_tensors, use_gpu_kernels
from recorded import record_calls
from small_runs import LORA, make_trainer
from tiny_models import add_lora, image_prompts, tiny_policy
from work_counts import count_work

from vlm_grpo.config.methods import WarmStartSettings
from vlm_grpo.config.objective import ObjectiveSettings
from vlm_grpo.config.recipes import load_settings
from vlm_grpo.errors import UserError
from vlm_grpo.model.engine import activations
from vlm_grpo.model.engine.forwards import has_forward
from vlm_grpo.model.engine.logprobs import TokenScores
from vlm_grpo.model.engine.packing import MicroBatch
from vlm_grpo.training import methods as methods_module
from vlm_grpo.training import update as update_module
from vlm_grpo.training.methods import build_methods
from vlm_grpo.training.objective.token_batch import MetricAccumulator
from vlm_grpo.training.out_of_memory import TokenBudget
from vlm_grpo.training.step_batch import Rollout, StepBatch, TokenLayout
from vlm_grpo.training.trainer import Trainer
from vlm_grpo.training.update import Updater, build_updater, pack_step


def make_batch(trainer: Trainer) -> StepBatch:
    """Sample a step, and give its completions alternating advantages."""
    rollout = trainer.sampler.sample(0)
    count = sum(len(group.completions) for group in rollout.groups)
    advantages = torch.tensor([1.0, -1.0]).repeat(count // 2)
    return pack_step(rollout, {}, make_advantages(advantages), {}, trainer.settings)


def test_updates_run_in_training_mode_and_schedules_advance_once_a_step(settings, monkeypatch):
    """Gradient checkpointing needs this mode."""
    run = settings(objective={"num_iterations": 3}, optim={"schedule": "linear", "lr": 4e-3})
    trainer = make_trainer(run)
    step, batch, modes = trainer.strategy.step, make_batch(trainer), []
    norms = iter([3.0, math.nan, 2.0])
    monkeypatch.setattr(trainer.strategy, "step", lambda: [step(), next(norms)][1])
    score, model = trainer.policy.score, trainer.policy.model.eval()
    monkeypatch.setattr(
        trainer.policy, "score", lambda *x: modes.append(model.training) or score(*x)
    )
    metrics = trainer.updater.update(batch)
    assert modes == [True] * 3
    assert (metrics["grad_norm"], metrics["skipped_updates"]) == (2.0, 1)
    assert trainer.updater.scheduler.get_last_lr()[0] == pytest.approx(3e-3)  # 3/4 of lr


def test_running_out_of_memory_recomputes_more_before_small_micro_batches(
    settings, monkeypatch, caplog
):
    """``auto``: feed-forward layers, then all, then halves; the gradient stays the same."""
    freed = list[int]()

    def compute_norm(fails: int, checkpointing: str) -> tuple[float, Updater]:
        torch.manual_seed(0)
        trainer = make_trainer(settings(policy={"gradient_checkpointing": checkpointing}))
        trainer.policy.sharing_check = None  # also calls ``score``
        score, left = trainer.policy.score, iter(range(fails))

        def fail_first(*given: Any) -> Any:
            for _ in left:
                raise torch.OutOfMemoryError("out of memory")
            return score(*given)

        monkeypatch.setattr(trainer.policy, "score", fail_first)
        monkeypatch.setattr(trainer.policy.engine, "release", lambda: freed.append(fails))
        return trainer.step()["grad_norm"], trainer.updater

    expected, _ = compute_norm(0, "none")
    for fails, recomputed in enumerate(("none", "mlp", "full", "full")):
        norm, updater = compute_norm(fails, "auto")
        assert norm == pytest.approx(expected, rel=1e-5)
        assert updater.recomputed == recomputed
        assert (updater.budget.limit < 16_384) == (fails == 3)
        layer = updater.policy.model.get_decoder().layers[0]
        assert has_forward(layer.mlp, activations._recompute) == (recomputed == "mlp")  # noqa: SLF001
    assert [freed.count(fails) for fails in range(4)] == [2, 2, 3, 4]  # by each rollout, too
    assert "set policy.gradient_checkpointing=full to start with this value" in caplog.text
    assert "set optim.max_tokens_per_batch=100 to start with this value" in caplog.text
    _, updater = compute_norm(0, "none")
    assert updater.recomputed is None


@pytest.mark.parametrize(
    ("size", "expected"),
    # Four fifths in thousands of 1,024 tokens, the most, and the least.
    [(41, 32 * 1024), (1000, 65_536), (1, 1024)],
)
def test_a_gpu_finds_the_size_of_micro_batches_once(settings, capsys, size, expected):
    trainer = make_trainer(settings(policy=LORA))
    updater, token = trainer.updater, 2**20
    with GpuMemory(updater, size * 2**30, token)() as memory:
        metrics = trainer.step()
        found = updater.budget.limit
        assert found == expected
        assert metrics["memory/max_tokens_per_batch"] == found
        memory.token *= 2  # not measured again
        trainer.step()
        assert updater.budget.limit == found
    printed = capsys.readouterr().out
    assert printed.count(f"optim.max_tokens_per_batch={found} from now on") == 1
    assert "1.00 MiB per token measured, 0.01 planned" in printed


def test_a_rank_without_micro_batches_takes_what_others_found(settings, monkeypatch, capsys):
    trainer = make_trainer(settings())
    gather = "vlm_grpo.training.memory_probe.gather_object"
    monkeypatch.setattr(gather, lambda own: [*own, 2048])
    with GpuMemory(trainer.updater, 2**40, 2**20)():
        probe: Any = trainer.updater.probe
        probe.end(1024)
        assert (probe.budget.tokens, probe.budget.is_found) == (2048, True)
    assert "from now on: unknown MiB per token measured, unknown planned" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("size", "part", "expected"),
    [
        # The plan of this model has 14,009 bytes per token, and a fifth is left.
        (100_000_000, "none", 5 * 1024),
        (1_000_000_000, "none", 16_384),  # what runs on a CPU, whatever else would fit
        (30_000_000, "none", 1024),
        (30_000_000, "auto", 4096),  # below it more is recomputed instead
    ],
)
def test_the_first_update_on_a_gpu_begins_with_what_is_planned(settings, size, part, expected):
    policy = {**LORA, "gradient_checkpointing": part}
    trainer = make_trainer(settings(policy=policy, rollout={"max_completion_length": 64}))
    with GpuMemory(trainer.updater, size, token=1)():
        trainer.updater.update(make_batch(trainer))
        probe: Any = trainer.updater.probe
        assert (probe.started, trainer.updater.budget.limit) == (expected, 65_536)


def test_memory_for_gradients_and_optimizer_is_not_given_to_micro_batches(settings):
    trainer = make_trainer(settings(rollout={"max_completion_length": 64}))
    weights = sum(weight.numel() for _, weight in trainer.strategy.trainable)
    size = 12 * weights + 60_000_000  # in float32: gradients and Adam's two moments
    with GpuMemory(trainer.updater, size, token=1)() as memory:
        trainer.updater.update(make_batch(trainer))
    probe: Any = trainer.updater.probe
    (tokens,) = memory.tokens
    assert probe.started == int(0.8 * 60_000_000 / probe.planned) // 1024 * 1024 > 1024
    # The gradients have replaced what a single pass saved: it was no more than they are, nor, as
    # far as is known, less than planned.
    token = min(probe.planned, 4 * weights / tokens)
    assert trainer.updater.budget.limit == int(0.8 * (size - 4 * weights) / token) // 1024 * 1024


def test_running_out_of_memory_in_the_first_update_lowers_what_is_found(settings):
    """The update is repeated before any weight changes, with the same gradient."""
    norms = []
    for room in (10**6, 110):
        torch.manual_seed(0)
        trainer = make_trainer(settings(policy=LORA))
        with GpuMemory(trainer.updater, room * 2**20, 2**20)() as memory:
            norms.append(trainer.step()["grad_norm"])
        assert (trainer.updater.budget.limit < 110) == (room == 110)
        assert (len(memory.tokens) > 1) == (room == 110)
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)


def test_the_size_is_found_in_the_first_update_with_a_micro_batch(settings, monkeypatch):
    """With sharded weights it is no more than this one had: no rank could repeat an update that ran
    out of memory."""
    for may_retry, limit in ((True, 65_536), (False, 16_384)):
        trainer = make_trainer(settings())
        assert trainer.updater.probe is None  # on a CPU
        updater, batch = trainer.updater, make_batch(trainer)
        monkeypatch.setattr(trainer.strategy, "may_retry", may_retry)
        with GpuMemory(updater, 10**12, 2000)():
            updater.update(replace(batch, mini_batches=((),)))
            assert (updater.budget.is_found, updater.budget.limit) == (False, 16_384)
            updater.update(batch)
            assert (updater.budget.is_found, updater.budget.limit) == (True, limit)
    fixed = settings(optim={"max_tokens_per_batch": 300})
    assert make_trainer(fixed).updater.budget.limit == 300


def test_sharded_weights_recompute_all_from_the_start(settings, monkeypatch):
    """A rank of them cannot repeat an update alone."""
    trainer = make_trainer(settings())
    monkeypatch.setattr(trainer.strategy, "may_retry", False)
    monkeypatch.setattr(update_module, "build_strategy", lambda *_: trainer.strategy)
    model, ranks = trainer.policy.model, trainer.accelerator
    for checkpointing in ("none", "auto"):
        run = settings(policy={"gradient_checkpointing": checkpointing})
        assert build_updater(trainer.policy, run, ranks).recomputed is None
        assert model.is_gradient_checkpointing == (checkpointing == "auto")


@pytest.mark.parametrize(("kl_in", "counts"), [("reward", [12, 12]), ("loss", [12, 8])])
def test_later_mini_batches_are_scored_once(settings, kl_in, counts, monkeypatch):
    """The reference scores all, and so does the policy for a KL in the reward."""
    kl = {"beta": 0.1, "kl_in": kl_in, "kl_estimator": "k1", "reference_refresh_every": "never"}
    trainer = make_trainer(settings(objective=kl, optim={"mini_batches": 3}))
    own = [record_calls(monkeypatch, m, "score_slices") for m in (methods_module, update_module)]
    trainer.step()
    found = [sum(len(piece.rows) for piece in call.arguments[1]) for call in chain(*own)]
    assert found == counts


def test_out_of_memory_on_one_completion_and_other_errors_are_raised(settings, monkeypatch):
    trainer = make_trainer(settings())
    batch, full = make_batch(trainer), torch.OutOfMemoryError("out of memory")
    monkeypatch.setattr(trainer.policy, "score", Mock(side_effect=full))
    with pytest.raises(UserError, match=r"single completion of \d+ tokens.*policy\.max_pixels"):
        trainer.updater.update(batch)
    monkeypatch.setattr(Updater, "_backward", Mock(side_effect=RuntimeError("shapes differ")))
    with pytest.raises(RuntimeError, match="shapes"):
        trainer.updater.update(batch)


@pytest.mark.parametrize(
    ("device", "may_retry", "message"),
    [
        ("cpu", True, "this run computes on cpu: remove it"),
        ("cuda", False, "not possible with sharded weights"),
        ("cuda", True, None),
    ],
)
def test_a_gpu_with_all_weights_can_offload(settings, monkeypatch, device, may_retry, message):
    """A strategy that only names its device stands for a GPU."""
    weights = [("weight", torch.nn.Parameter(torch.zeros(1)))]
    ranks: Any = SimpleNamespace(device=torch.device(device))
    strategy = Mock(trainable=weights, may_retry=may_retry, accelerator=ranks)
    monkeypatch.setattr(update_module, "build_strategy", lambda *_: strategy)
    run = settings(policy={"activation_offloading": True})
    with pytest.raises(UserError, match=message) if message else contextlib.nullcontext():
        offload: Any = build_updater(Mock(), run, ranks).offload
        assert offload.func is update_module.offload_activations


def test_the_effective_sample_size_is_the_share_of_equal_weights():
    """Weights of 3 and 1: (3 + 1)² / (2 · (9 + 1)), from the sums of two micro-batches."""
    name = "sampling/importance_sampling_ratio"
    parts = [
        MetricAccumulator({f"{name}/mean": (w, 1), f"{name}/mean_square": (w * w, 1)})
        for w in (3.0, 1.0)
    ]
    _, metrics = update_module.sum_metrics(0.0, parts[0] + parts[1])
    assert metrics["sampling/effective_sample_size"] == pytest.approx(0.8)
    assert metrics[f"{name}/mean"] == 2.0
    assert f"{name}/mean_square" not in metrics


KL: dict[str, Any] = {"beta": 0.1, "reference_refresh_every": 5}
CORRECTED: dict[str, Any] = {"loss_type": "dapo", "sampler_correction": "token"}
OBJECTIVES: dict[str, dict[str, Any]] = {
    **{name: {"loss_type": name} for name in ("grpo", "bnpo", "dr_grpo", "dapo", "sapo", "vespo")},
    "cispo": {"loss_type": "cispo", "epsilon_high": 2.0},
    "luspo": {"loss_type": "luspo", "importance_sampling_level": "sequence"},
    "gspo": {"importance_sampling_level": "sequence", "delta": 2.0, **KL},
    **{name: {**KL, "kl_estimator": name} for name in ("k1", "k2", "k3")},
    "fresh reference": {"beta": 0.1, "entropy_coef": 0.1, "mask_truncated_completions": True},
    **{
        f"{kind} {form}": {**CORRECTED, "loss_type": kind, "sampler_correction": form}
        for kind in ("dapo", "vespo")
        for form in ("token", "sequence", "token_mask", "sequence_mask")
    },
    "distillation": {"distillation": {"teacher": "model", "only": True}, **CORRECTED},
    "perception": {"perception": {"kl_coef": 0.1, "top_share": 0.4}},
}


get_policy = functools.cache(functools.partial(build_policy, "qwen2_5_vl"))


def make_step(policy: Any, objective: ObjectiveSettings, num_iterations: int) -> StepBatch:
    """Build three groups with every optional input. The third comes from the replay buffer."""
    group, scores = make_group({}, {}, {}, lengths=(3, 2, 1)), dict[str, torch.Tensor]()
    noisy = replace(group.completions[0], variant=("noise", 1))
    group = replace(group, completions=(noisy, *group.completions[1:]))
    *groups, again = (replace(group, prompt=prompt) for prompt in image_prompts(policy, SIZES))
    on_device, on_host = torch.zeros(18, device=policy.device), torch.ones(18)
    if objective.needs_reference:
        scores["reference_logprobs"] = on_device
    if objective.distillation is not None:
        scores["teacher_logprobs"] = on_device
    if objective.perception is not None:
        scores |= {"perception": on_device, "token_factors": on_host}
    tokens = on_host if objective.loss_type == "dapo" else None
    settings = load_settings("counting").model_copy(update={"objective": objective})
    methods, rollout = build_methods(settings), Rollout((*groups,), recalled=(again,))
    batch = pack_step(rollout, scores, make_advantages(torch.ones(9), tokens), methods, settings)
    return replace(batch, num_iterations=num_iterations)


def make_updater(policy: Any, objective: ObjectiveSettings) -> Updater:
    strategy: Any = SimpleNamespace(policy=policy, passes=iter, gathered=contextlib.nullcontext)
    settings: Any = SimpleNamespace(objective=objective)
    methods = build_methods({"objective": objective, "warm_start": WarmStartSettings(steps=1)})
    return Updater(strategy, None, settings, TokenBudget(100, ""), methods=methods)


def accumulate(updater: Updater, batch: StepBatch, guard: Any = no_host_tensors) -> None:
    """Do what ``Updater.update`` does in a step, up to the gradients."""
    with guard():
        old = updater._start_old(batch)  # noqa: SLF001
        for number in range(batch.num_updates):
            losses, metrics = updater._accumulate(batch, number, old, None)  # noqa: SLF001
            assert len(losses) > 1
            assert losses[0].device == updater.policy.device
            assert metrics.means


@pytest.mark.parametrize(
    ("name", "lora"), [("gspo", False), ("perception", True), ("supervised", True)]
)
def test_gradients_are_accumulated_without_waiting_for_the_device(name, lora, monkeypatch):
    use_gpu_kernels(monkeypatch)
    objective, policy = ObjectiveSettings(**OBJECTIVES.get(name, {})), get_policy(lora)
    batch = make_step(policy, objective, 1 if name == "supervised" else 2)
    if name == "supervised":
        weights = {"warm_start": torch.ones(9)}
        batch = replace(batch, weights=weights, recalled=None, is_written=True)
    accumulate(make_updater(policy, objective), batch)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_no_loss_waits_for_the_device(name, monkeypatch):
    """With log-probs that do not come from a model."""
    policy, objective = get_policy(True), ObjectiveSettings.model_validate(OBJECTIVES[name])

    def score(batch: MicroBatch, with_entropy: bool, *_: Any) -> TokenScores:
        count = sum(map(len, batch.completions))
        values = torch.zeros(count, device=policy.device, requires_grad=True)
        return TokenScores(values, values * 2 if with_entropy else None)

    step = make_step(policy, objective, 2)
    monkeypatch.setattr(policy, "score", score)
    accumulate(make_updater(policy, objective), step)


@contextlib.contextmanager
def refuse_waiting() -> Iterator[None]:
    """Raise an error inside wherever the host waits for a GPU."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns once that it is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["gspo", "perception"])
def test_gradients_are_accumulated_on_a_gpu_without_waiting(name):
    objective = ObjectiveSettings.model_validate(OBJECTIVES[name])
    policy = tiny_policy("qwen2_5_vl", dtype=torch.bfloat16)
    add_lora(policy, ["q_proj", "down_proj"])
    policy.model.to("cuda")
    updater, batch = make_updater(policy, objective), make_step(policy, objective, 2)
    accumulate(updater, batch, contextlib.nullcontext)  # libraries prepare themselves
    accumulate(updater, batch, refuse_waiting)
    grads = [w.grad for _, w in policy.trainable_parameters()]
    assert all(grad is not None and grad.isfinite().all() for grad in grads)


def test_an_update_reads_its_loss_and_its_norm_once(settings):
    """On one prompt without images, whose sizes would be read on the host."""
    reads = []
    for limit in (10**6, 1):
        trainer = make_trainer(settings())
        batch = make_step(trainer.policy, trainer.settings.objective, 1)
        batch = replace(batch, mini_batches=((batch.mini_batches[0][-1],),), recalled=None)
        trainer.updater.budget.tokens = limit
        with count_work() as counts:
            trainer.updater.update(batch)
        reads.append(counts["host_reads"])
    assert reads[0] == reads[1]


def test_log_probs_that_a_method_scored_replace_those_of_sampled_groups_alone():
    """Recalled groups keep those of the policy that sampled them."""
    policy = SimpleNamespace(device=torch.device("cpu"), model=SimpleNamespace(dtype=torch.float32))
    layout, sampled = TokenLayout.of([2, 1]), torch.tensor([-1.0, -2.0, -3.0])
    batch = SimpleNamespace(
        num_updates=1, recalled=2, layout=layout, scored=torch.full((3,), -9.0),
        values={"sampler_logprobs": sampled}, mini_batches=((), ()),
    )  # fmt: skip
    own: Any = SimpleNamespace(policy=policy)
    old = Updater._start_old(own, batch)  # type: ignore[arg-type]  # noqa: SLF001
    assert old is not None
    assert old.tolist() == [-9, -9, -3]
