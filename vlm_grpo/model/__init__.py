"""The policy model: loading, prompts, sampling and scoring."""

import logging

# PEFT imports it, and it then advises to install a package for a kernel that is not used here.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
