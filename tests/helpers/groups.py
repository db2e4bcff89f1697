"""Groups of completions without a model, and streams of examples without a file."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from vlm_grpo.config.run import Settings
from vlm_grpo.data.prompt_order import ExampleStream, build_stream
from vlm_grpo.training.objective.advantages import Advantages
from vlm_grpo.training.objective.token_batch import TokenBatch
from vlm_grpo.training.step_batch import StepAdvantages
from vlm_grpo.types import Completion, Example, Group, Prompt, Score

EXAMPLES = [Example(str(number), (), "?", number) for number in range(20)]


def build_mixture(counts: dict[str, int], seed: int = 0, **data: Any) -> ExampleStream:
    sources = {n: {"source": f"{n}.jsonl", "task": "counting", "name": n} for n in counts}
    for name, weight in data.pop("weights", {}).items():
        sources[name]["weight"] = weight
    settings = Settings(seed=seed, data={"train": [*sources.values()], **data})
    names = [(name, n) for name, count in counts.items() for n in range(count)]
    examples = [Example(f"{name}/{n}", (), "?", n, source=name) for name, n in names]
    return build_stream(examples, settings)


def make_group(
    *rewards: Mapping[str, float | None], name: str = "1", lengths: Sequence[int] | None = None
) -> Group:
    """Build a group of completions with these rewards by name (None: undefined) and numbers of
    tokens, by default 1 each. Token i of completion c is 10 · c + i."""
    prompt = Prompt(Example(name, (), "?", 0), "", (7, 8), {})
    tokens = [range(10 * row, 10 * row + n) for row, n in enumerate(lengths or [1] * len(rewards))]
    completions = tuple(Completion((*own,), (-0.5,) * len(own), "", "eos") for own in tokens)
    return Group(prompt, completions, tuple(Score(None, r, None, {}) for r in rewards))


def make_tokens(
    logprobs: Tensor, lengths: Sequence[int], advantages: Tensor | None = None, **more: Any
) -> TokenBatch:
    """Build the tokens of completions of these lengths; without advantages these are 1."""
    count = torch.tensor(lengths)
    own = torch.ones(len(count), dtype=logprobs.dtype) if advantages is None else advantages
    rows = torch.arange(len(count)).repeat_interleave(count)
    return TokenBatch(logprobs, rows, own, count, **more)


def make_advantages(own: Tensor, tokens: Tensor | None = None) -> StepAdvantages:
    none = torch.zeros(0)
    return StepAdvantages(own, Advantages(own, none, none.bool(), own == own), tokens)
