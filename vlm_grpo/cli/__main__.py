"""``accelerate launch -m vlm_grpo.cli train …`` and ``python -m vlm_grpo.cli …``."""

from vlm_grpo.cli.app import main

main()
