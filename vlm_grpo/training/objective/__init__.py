"""Advantages, KL and losses as pure functions of tensors; docs/objective.md derives them."""
