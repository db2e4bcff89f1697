"""Draw the plots of docs/objective.md with the package's functions, into the folder of this file.

Run from the root of the repository: ``python docs/plots/objective.py``. Every curve is the value or
the gradient of ``policy_loss``; expectations are sums over all outcomes.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from torch import Tensor

from vlm_grpo.config.objective import ObjectiveSettings
from vlm_grpo.training.objective.advantages import group_advantages
from vlm_grpo.training.objective.kl import KL_ESTIMATORS
from vlm_grpo.training.objective.losses import policy_loss
from vlm_grpo.training.objective.token_batch import StepTotals, TokenBatch

FOLDER = Path(__file__).parent
FIXED_REFERENCE: dict[str, Any] = {"beta": 1.0, "reference_refresh_every": "never"}
# Four updates per rollout, and clip bounds so wide that only the KL has an effect.
UNCLIPPED: dict[str, Any] = {"num_iterations": 4, "epsilon": 0.999, "epsilon_high": 1e6}
KL_CHOICES: dict[str, dict[str, Any]] = {
    "k3 · ρ (default)": {},
    "k3 alone": {"use_bias_correction_kl": False},
    "k2 · ρ": {"kl_estimator": "k2"},
    "k2 alone": {"kl_estimator": "k2", "use_bias_correction_kl": False},
}


def one_token_completions(
    logprobs: Tensor,
    advantages: Tensor,
    *,
    old: Tensor | None = None,
    reference: Tensor | None = None,
) -> TokenBatch:
    """Return a batch in which every completion has one token."""
    return TokenBatch(
        logprobs,
        torch.arange(len(logprobs)),
        advantages,
        torch.ones(len(logprobs), dtype=torch.long),
        old_logprobs=old,
        reference_logprobs=reference,
    )


def compute_token_gradients(batch: TokenBatch, settings: ObjectiveSettings) -> Tensor:
    """Return minus the gradient of each token's log-probability, before averaging."""
    tokens = len(batch.logprobs)
    loss = policy_loss(batch, StepTotals(tokens, tokens, 1), settings).loss
    return -tokens * torch.autograd.grad(loss, batch.logprobs)[0]


def plot_kl_estimators() -> None:
    """Plot k1, k2, k3, and the factor on ∇log π of each in the loss at ρ = 1."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4))
    difference = torch.linspace(-2.5, 2.5, 201)
    zero = torch.zeros_like(difference)
    for name, estimator in KL_ESTIMATORS.items():
        left.plot(difference, estimator(difference, zero), label=name)
    left.set(title="value", xlabel="d = log π − log π_ref", ylim=(-2.5, 6))
    left.legend()
    for name, fields in KL_CHOICES.items():
        batch = one_token_completions(
            difference.clone().requires_grad_(), zero, reference=zero.clone()
        )
        pull = -compute_token_gradients(batch, ObjectiveSettings(**FIXED_REFERENCE, **fields))
        right.plot(difference, pull, "--" if name == "k2 alone" else "-", label=name)
    right.set(
        title="factor c in  A − β·c  on ∇log π, at ρ = 1",
        xlabel="d = log π − log π_ref",
        ylim=(-6, 6),
    )
    right.legend()
    save(figure, "kl_estimators")


def plot_kl_bias() -> None:
    """Plot the error of the KL's expected gradient over the updates on one rollout."""
    generator = torch.Generator().manual_seed(1)
    old = torch.randn(6, generator=generator, dtype=torch.float64)
    reference = torch.randn(6, generator=generator, dtype=torch.float64)
    direction = torch.randn(6, generator=generator, dtype=torch.float64)
    moves = torch.linspace(0, 2, 41, dtype=torch.float64)
    figure, axes = plt.subplots(figsize=(5.5, 3.4))
    for name, fields in KL_CHOICES.items():
        settings = ObjectiveSettings(loss_type="dr_grpo", **FIXED_REFERENCE, **UNCLIPPED, **fields)
        errors = []
        for move in moves:
            logits = (old + move * direction).requires_grad_()
            logprobs = logits.log_softmax(-1)
            batch = one_token_completions(
                logprobs,
                torch.zeros_like(logits),
                old=old.log_softmax(-1),
                reference=reference.log_softmax(-1),
            )
            push = -compute_token_gradients(batch, settings) * old.softmax(-1)
            found = torch.autograd.grad(logprobs, logits, push, retain_graph=True)[0]
            kl = (logprobs.exp() * (logprobs - reference.log_softmax(-1))).sum()
            true = torch.autograd.grad(kl, logits)[0]
            errors.append(((found - true).norm() / true.norm()).item())
        axes.plot(moves, errors, label=name)
    axes.set(
        title="bias of the gradient of KL(π ‖ π_ref)",
        xlabel="how far π has moved from π_old (in logits)",
        ylabel="|expected − true| / |true|",
        ylim=(-0.05, 2),
    )
    axes.legend()
    save(figure, "kl_bias")


def plot_clipping() -> None:
    """Plot the factor on A·∇log π against the importance ratio."""
    ratio = torch.linspace(0.05, 6, 600)
    choices = {
        "epsilon=0.2": ObjectiveSettings(num_iterations=2),
        "epsilon_high=0.28": ObjectiveSettings(num_iterations=2, epsilon_high=0.28),
        "delta=4": ObjectiveSettings(num_iterations=2, delta=4.0),
        "cispo, epsilon_high=5": ObjectiveSettings(
            loss_type="cispo", num_iterations=2, epsilon_high=5.0
        ),
    }
    figure, panels = plt.subplots(1, 2, figsize=(9, 3.4), sharey=True)
    for axes, sign in zip(panels, (1.0, -1.0), strict=True):
        for shift, (name, settings) in enumerate(choices.items()):
            batch = one_token_completions(
                ratio.log().requires_grad_(),
                torch.full_like(ratio, sign),
                old=torch.zeros_like(ratio),
            )
            push = compute_token_gradients(batch, settings) / sign
            axes.plot(ratio, push + 0.04 * shift, label=name)  # offset, to keep curves apart
        axes.set(title=f"A {'>' if sign > 0 else '<'} 0", xlabel="ρ = π / π_old")
    panels[0].set_ylabel("factor on A·∇log π")
    panels[0].legend()
    save(figure, "clipping")


def plot_difficulty() -> None:
    """Plot grpo's expected gradient relative to ∇p, for a prompt solved with probability p."""
    chances = torch.linspace(0.02, 0.98, 49, dtype=torch.float64)
    figure, axes = plt.subplots(figsize=(5.5, 3.4))
    for size in (4, 8, 12):
        outcomes = torch.tensor(list(itertools.product((0.0, 1.0), repeat=size)))
        ids = [number for number in range(len(outcomes)) for _ in range(size)]
        advantages = group_advantages(outcomes.double().flatten(), ids).values.view(-1, size)
        successes = outcomes.sum(dim=1)
        # ∇log π is ∇p/p for a success and −∇p/(1−p) for a failure.
        factors = []
        for p in chances:
            chance = p**successes * (1 - p) ** (size - successes)
            score = outcomes / p - (1 - outcomes) / (1 - p)
            factors.append((chance * (advantages * score).mean(dim=1)).sum())
        axes.plot(chances, factors, label=f"grpo, G = {size}")
    axes.axhline(1.0, color="black", linewidth=0.8, label="rloo, scale_rewards=none")
    axes.set(
        title="weight of a prompt's ∇p in the expected gradient",
        xlabel="chance p that the prompt is solved",
        ylim=(0, None),
    )
    axes.legend()
    save(figure, "difficulty")


def plot_loss_and_reward() -> None:
    """Plot loss and reward on a bandit with one update per rollout."""
    generator = torch.Generator().manual_seed(0)
    arms, prompts, size = 10, 16, 8
    rewards = torch.linspace(0, 1, arms)
    logits = torch.zeros(arms, requires_grad=True)
    start = logits.detach().log_softmax(-1)
    settings = ObjectiveSettings()
    curves: dict[str, list[float]] = {"mean reward": [], "loss": [], "KL to the initial policy": []}
    for _ in range(120):
        chosen = (
            logits.detach()
            .softmax(-1)
            .multinomial(prompts * size, replacement=True, generator=generator)
        )
        ids = [number for number in range(prompts) for _ in range(size)]
        advantages = group_advantages(rewards[chosen], ids).values
        logprobs = logits.log_softmax(-1)
        batch = one_token_completions(logprobs[chosen], advantages)
        loss = policy_loss(batch, StepTotals(prompts * size, prompts * size, 1), settings).loss
        (gradient,) = torch.autograd.grad(loss, logits)
        curves["mean reward"].append(rewards[chosen].mean().item())
        curves["loss"].append(loss.item())
        kl = (logprobs.exp() * (logprobs - start)).sum()
        curves["KL to the initial policy"].append(kl.item())
        logits = (logits - 0.3 * gradient).detach().requires_grad_()
    figure, axes = plt.subplots(figsize=(5.5, 3.4))
    for name, values in curves.items():
        axes.plot(values, label=name)
    axes.set(title="num_iterations = 1, a bandit of ten arms", xlabel="step")
    axes.legend()
    save(figure, "loss_and_reward")


def save(figure: Figure, name: str) -> None:
    figure.tight_layout()
    figure.savefig(FOLDER / f"{name}.svg", metadata={"Date": None})
    plt.close(figure)


def main(names: Sequence[str] = ()) -> None:
    mpl.use("svg")
    # Make the files reproducible: no random ids, no date.
    mpl.rcParams.update({"svg.hashsalt": "vlm-grpo", "font.size": 9, "axes.grid": True})
    plots = (
        plot_kl_estimators,
        plot_kl_bias,
        plot_clipping,
        plot_difficulty,
        plot_loss_and_reward,
    )
    for plot in plots:
        if not names or plot.__name__.removeprefix("plot_") in names:
            plot()


if __name__ == "__main__":
    main()
