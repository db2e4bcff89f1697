"""Training: the loop, its rollout and update, and what a run writes."""
