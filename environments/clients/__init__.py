"""What environments of other packages share; found as ``vlm_grpo.environments.clients``."""
