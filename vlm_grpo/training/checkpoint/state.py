"""The states of random numbers and of the experience, in the form that a checkpoint holds."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vlm_grpo.training.experience import Experience, KeptGroup
from vlm_grpo.types import Completion, Score


def get_rng_states() -> dict[str, Any]:
    """Return the states of Python, NumPy, torch and this process's CUDA device, for JSON."""
    kind, keys, *rest = np.random.get_state()
    states = {
        "python": random.getstate(),
        "numpy": [kind, np.asarray(keys).tolist(), *rest],
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state().numpy().tobytes().hex()
    return states


def set_rng_states(states: dict[str, Any]) -> None:
    """Restore the states that ``get_rng_states`` returned."""
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, np.asarray(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(_from_hex(states["torch"]))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(_from_hex(states["cuda"]))


def _from_hex(state: str) -> Tensor:
    return torch.frombuffer(bytearray.fromhex(state), dtype=torch.uint8)


def serialize_experience(experience: Experience) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """Return the groups to replay as values that JSON can hold, and the tensors of everything."""
    values, tensors = [], {}
    if experience.curriculum is not None:
        tensors["posterior"] = torch.from_numpy(experience.curriculum.posterior).clone()
    if experience.replay is not None:
        groups = experience.replay.groups
        tensors |= _join_tokens([c for group in groups for c in group.completions])
        for group in groups:
            pairs = zip(group.completions, group.scores, strict=True)
            place = {"index": group.index, "step": group.step}
            values.append({**place, "completions": [_serialize(*pair) for pair in pairs]})
    return values, tensors


def restore_experience(
    experience: Experience, values: list[dict[str, Any]], tensors: Mapping[str, Tensor]
) -> None:
    """Restore what ``serialize_experience`` returned, as far as the run still uses it."""
    if experience.curriculum is not None and "posterior" in tensors:
        experience.curriculum.posterior = tensors["posterior"].numpy().copy()
    if experience.replay is None or "tokens" not in tensors:
        return
    lengths = [c["tokens"] for group in values for c in group["completions"]]
    parts = zip(tensors["tokens"].split(lengths), tensors["logprobs"].split(lengths), strict=True)
    groups = []
    for group in values:
        restored = [_restore(c, *next(parts)) for c in group["completions"]]
        completions, scores = zip(*restored, strict=True)
        groups.append(KeptGroup(group["index"], group["step"], completions, scores))
    experience.replay.groups = groups[-experience.replay.settings.size :]


def _join_tokens(completions: Sequence[Completion]) -> dict[str, Tensor]:
    """Return the tokens and log-probs of all completions, one after the other."""
    tokens = [token for c in completions for token in c.token_ids]
    logprobs = [value for c in completions for value in c.logprobs]
    return {
        "tokens": torch.tensor(tokens, dtype=torch.int64),
        # float64, because the completions hold Python floats.
        "logprobs": torch.tensor(logprobs, dtype=torch.float64),
    }


def _serialize(completion: Completion, score: Score) -> dict[str, Any]:
    """Return what JSON can hold of a completion; ``_join_tokens`` has the rest."""
    return {
        "tokens": len(completion.token_ids),
        "text": completion.text,
        "stop": completion.stop,
        **({"noise": completion.noise} if completion.noise else {}),
        "rewards": dict(score.rewards),
        "total": score.total,
        "metrics": dict(score.metrics),
        "failures": dict(score.failures),
    }


def _restore(
    values: Mapping[str, Any], tokens: Tensor, logprobs: Tensor
) -> tuple[Completion, Score]:
    token_ids, known = tuple(tokens.tolist()), tuple(logprobs.tolist())
    text, stop, noise = values["text"], values["stop"], values.get("noise", 0)
    completion = Completion(token_ids, known, text, stop, noise=noise)
    total, failures = values["total"], values["failures"]
    return completion, Score(None, values["rewards"], total, values["metrics"], failures)
