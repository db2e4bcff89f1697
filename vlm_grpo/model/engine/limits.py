"""Amounts that are computed or held at once; a plan reads them without torch."""

from __future__ import annotations

PREFILL_TOKENS = 16_384
"""Maximum number of tokens prefilled at once, or those of one longer prompt."""
ENCODER_PATCHES = 65_536
"""Maximum number of patches per pass: 12.8 million pixels in patches of 14 × 14."""
LOGIT_BYTES = 5 * 4 + 2 * 8
"""Bytes per logit of a sampled token, besides the logit: copies in float32, and the order and sums
of the probabilities."""
RECENT_IMAGES = 64
"""Number of decoded images kept for other examples that use them."""
ROUNDED_AT_ONCE = 1 << 24
"""Number of updated values that are rounded stochastically at once, with 4 random bytes each."""


def fit_tokens(memory: int, token: int, place: int, completions: tuple[int, int]) -> int:
    """Return the number of tokens whose keys and values fit into memory, with the logits of the
    completions sampled at once, and a fifth to spare for other activations.

    Args:
        memory: bytes of free memory; may be negative.
        token: bytes of a token's keys and values.
        place: bytes of a completion's logits and recurrent states.
        completions: number of completions, and maximum number of tokens per completion.
    """
    usable, (count, longest) = 0.8 * memory, completions
    # All completions at once, or as many as the tokens have places for.
    every, some = (usable - count * place) / token, usable / (token + place / longest)
    return max(0, int(max(every, some)))
