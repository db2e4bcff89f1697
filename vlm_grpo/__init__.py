"""Fine-tune vision-language models with GRPO on tasks whose answers a rule can check."""
