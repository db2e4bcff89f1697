"""Text that says the same words again."""

import re

# Thai, Lao, Burmese, Khmer, kana and Chinese characters.
_SPACELESS = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff"
_WORDS = re.compile(rf"[{_SPACELESS}]|[^\W_{_SPACELESS}]+")


def repeated_share(text: str, n: int = 6) -> float:
    """Compute the share of word n-grams that occur earlier in the same text, in [0, 1].

    A word is a run of letters and digits, or one character of a script without spaces. The
    default of six words is longer than the text that repeats between boxes in any grammar.

    >>> repeated_share("a b c d a b c d", n=4)
    0.2
    """
    words = _WORDS.findall(text.lower())
    grams = list(zip(*(words[i:] for i in range(n)), strict=False))
    return (len(grams) - len(set(grams))) / len(grams) if grams else 0.0
