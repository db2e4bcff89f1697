"""The parts of a GRPO step: rollout, advantages, reference and update."""
