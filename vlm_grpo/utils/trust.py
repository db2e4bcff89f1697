"""Which code this process may run: none that only a file names, unless the command says so.

A recipe, a run's folder or a benchmark may be somebody else's. ``note`` gets all texts of such a
file, ``allow`` what the user names, and ``check`` stands before each place that runs code.
"""

import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import PurePath
from typing import Any

from vlm_grpo.errors import UserError

REMOTE_CODE = "policy.trust_remote_code=true for "
"""With a model's name: the code that comes with the model."""
_LONGEST = 4096  # No path or module has a longer name
_noted: dict[str, str] = {}  # what names the code, by code
_allowed: set[str] = set()
_asked: set[str] = set()  # what this process would run or has run
_everything = False


def trust_code(trusted: bool = True) -> None:
    """Run all code that recipes, runs and benchmarks name, as ``--trust-code`` does.

    These are Python files of tasks, methods and functions, the code of a model
    (``policy.trust_remote_code``), tasksets and the program ``rollout.vllm.python``; and send an
    API key to the judge, and rows to the server of an environment, that they name.
    """
    global _everything
    _everything = trusted


def note(values: Any, origin: str) -> None:
    """Note the code that the file ``origin`` names, anywhere in its ``values``."""
    _noted.update(dict.fromkeys(_identify_all(values), origin))


def allow(values: Any) -> None:
    """Allow the code that the user names, anywhere in ``values``."""
    _allowed.update(_identify_all(values))


def check(code: str | os.PathLike[str], kind: str = "code that this command would run") -> None:
    """Raise a ``UserError`` if only a file names this code, and it has not run already.

    ``kind``: what it is; the address that a secret is sent to needs the same consent."""
    code = os.fspath(code)
    key = _identify(code)
    _asked.add(key)
    if _everything or key in _allowed or key not in _noted or key in sys.modules:
        return
    # Not by getattr, for which some modules import others.
    files = (getattr(module, "__dict__", {}).get("__file__") for module in [*sys.modules.values()])
    name = os.path.basename(key)
    if not any(f and f.endswith(name) and os.path.realpath(f) == key for f in files):
        raise UserError(
            f"{_noted[key]} names {kind}: {code}\nread it, and add "
            "--trust-code to the command if you trust it; in Python, call vlm_grpo.trust_code()"
        )


def _identify_all(values: Any) -> Iterable[str]:
    return {_identify(text) for text in find_texts(values)}


def _identify(code: str) -> str:
    """Return the path of a file, ``FILE.py:NAME`` or program; the module of ``MODULE:NAME``."""
    if code.startswith(REMOTE_CODE) or len(code) > _LONGEST:  # such as a long argument
        return code
    code = str(PurePath(code))  # as a setting that is a path holds it: without ./
    path, _, name = code.partition(".py:")
    path = f"{path}.py" if name else code
    if "\0" not in path and (path.endswith(".py") or os.sep in path):
        return os.path.realpath(os.path.expanduser(path))
    return code.partition(":")[0]


def get_flag(settings: Mapping[str, Any]) -> str:
    """Return `` --trust-code`` if a command that evaluates or exports this process's run needs it
    for the saved settings, else "". Servers for rollouts are not started by these."""
    used = {name: value for name, value in settings.items() if name != "rollout"}
    files = any(re.search(r"\.py(?!\w)", text) for text in find_texts(used))
    own = files or not _asked.isdisjoint(_identify_all(used))
    return " --trust-code" if own or settings["policy"]["trust_remote_code"] else ""


def find_texts(values: Any) -> Iterator[str]:
    """Yield the texts and paths in nested values, keys too."""
    if isinstance(values, str | os.PathLike):
        yield str(os.fspath(values))
    elif isinstance(values, Mapping):
        for key, value in values.items():
            yield from find_texts(key)
            yield from find_texts(value)
    elif isinstance(values, list | tuple | set):
        for value in values:
            yield from find_texts(value)
