"""What only CPUs need: products by oneDNN, with weights reordered once per rollout."""
