"""Advantages, KL and losses as pure functions of tensors.

``advantages`` computes advantages from rewards, ``losses`` the loss from log-probabilities and
advantages, with the KL estimators and the metrics. docs/objective.md has the derivations.
"""
