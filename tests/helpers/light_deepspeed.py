"""DeepSpeed without its modules in C++, which each new environment would compile for a minute.

They speed up communication in shared memory; without them, the ranks use gloo.
"""

import importlib
from importlib.util import find_spec

if find_spec("deepspeed") is not None:  # an extra
    importlib.import_module("deepspeed.ops").__compatible_ops__ = {}  # type: ignore[attr-defined]
