"""GRPO in one file: sample, score, advantages, loss, backward.

`vlm_grpo.Trainer` does the same with a reference policy, several updates per step, evaluations,
checkpoints, several processes and recovery from errors. This loop shows the algorithm without them:

    python docs/examples/loop.py
"""

from __future__ import annotations

from dataclasses import replace

import torch

from vlm_grpo import load_policy, load_settings, load_task
from vlm_grpo.data.loading import load_examples
from vlm_grpo.data.prompt_order import ExampleStream
from vlm_grpo.eval.evaluate import evaluate_model
from vlm_grpo.eval.models import LocalModel
from vlm_grpo.model.engine.packing import MicroBatch, pack
from vlm_grpo.model.engine.sampling import build_sampling_settings
from vlm_grpo.task.scorer import RewardScorer
from vlm_grpo.training.objective.advantages import group_advantages
from vlm_grpo.training.objective.losses import policy_loss
from vlm_grpo.training.objective.token_batch import StepTotals, TokenBatch
from vlm_grpo.training.step_batch import build_slices, score_groups

SETTINGS = load_settings("counting")
PROMPTS, COMPLETIONS, MAX_TOKENS = 32, 8, 16_384


def micro_loss(
    policy, micro: MicroBatch, advantages: torch.Tensor, totals: StepTotals
) -> torch.Tensor:
    """Return the GRPO loss of the completions in a micro-batch."""
    lengths = torch.tensor([len(tokens) for tokens in micro.completions])
    batch = TokenBatch(
        logprobs=policy.score(micro).logprobs,
        completion=torch.arange(len(lengths)).repeat_interleave(lengths),
        advantages=advantages[list(micro.rows)],
        lengths=lengths,
    )
    return policy_loss(batch, totals, SETTINGS.objective).loss


def train(steps: int, seed: int = 0) -> tuple[float, float]:
    """Train the embedded model to count; return the held-out accuracy before and after."""
    torch.manual_seed(seed)
    policy = load_policy(SETTINGS)
    task = replace(load_task("counting"), frame=policy.prompts.frame)
    stream = ExampleStream(load_examples("embedded:counting", task, split="train"), seed)
    held_out = load_examples("embedded:counting", task, split="eval")
    scorer = RewardScorer()
    sampling = build_sampling_settings(policy.distribution, SETTINGS.rollout)
    weights = [weight for _, weight in policy.trainable_parameters()]
    optimizer = torch.optim.AdamW(weights, lr=2e-4, betas=(0.9, 0.99), weight_decay=0.0)

    def accuracy() -> float:
        return evaluate_model(LocalModel(policy, SETTINGS), task, held_out, scorer).value

    before = accuracy()
    for step in range(steps):
        indices = range(step * PROMPTS, (step + 1) * PROMPTS)

        # Sample a group of completions for each prompt, and score them.
        examples = [policy.prompts.with_resized_sizes(stream[index]) for index in indices]
        prompts = [policy.prompts.build(example, task) for example in examples]
        seeds = [(seed, index) for index in indices]
        completions = policy.sample(prompts, sampling, COMPLETIONS, seeds, MAX_TOKENS)
        groups = score_groups(scorer, task, prompts, completions)

        # The advantage of a completion is its reward relative to the mean of its group.
        rewards = torch.tensor([score.total for group in groups for score in group.scores])
        group_ids = [number for number in range(PROMPTS) for _ in range(COMPLETIONS)]
        advantages = group_advantages(rewards, group_ids).values

        # Backpropagate the loss; groups whose rewards are all equal have no gradient.
        lengths = torch.tensor([len(c.token_ids) for group in groups for c in group.completions])
        totals = StepTotals.from_lengths(lengths, None, sampling.max_completion_length)
        policy.model.train()
        for micro in pack(build_slices(groups, (advantages != 0).tolist()), MAX_TOKENS):
            micro_loss(policy, micro, advantages, totals).backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        policy.engine.clear_image_features()
        if step % 10 == 9:
            print(f"step {step + 1}: reward {rewards.mean():.3f}")
    return before, accuracy()


if __name__ == "__main__":
    print("held-out accuracy: {:.1%} before, {:.1%} after".format(*train(steps=100)))
