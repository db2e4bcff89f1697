"""Model text to a value, or None."""


def answer_text(text: str, tags: bool) -> str | None:
    """The part of a completion that holds its answer."""
    raise NotImplementedError
