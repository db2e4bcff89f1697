"""beartype for jaxtyping's import hook, which decorates an inner function at each call of the one
around it: the code of its checks is generated once."""

import inspect
from typing import Any

from beartype import beartype

GENERATED: dict[tuple[str, str, str], Any] = {}
"""The checks of inner functions, by module, qualified name and signature."""


def check_types(function: Any) -> Any:
    """Return a function that checks its arguments, and calls ``function``: here the one that
    jaxtyping makes of a signature, which does nothing else."""
    if "<locals>" not in function.__qualname__:
        return beartype(function)
    key = function.__module__, function.__qualname__, str(inspect.signature(function))
    if key not in GENERATED:
        GENERATED[key] = beartype(function)
    return GENERATED[key]
