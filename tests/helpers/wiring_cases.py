"""Settings under which the gradient of every update is compared with plain transformers."""

from __future__ import annotations

from typing import Any

LORA = {
    "policy": {"dtype": "float32", "lora": {"r": 2, "alpha": 8, "target": ["q_proj", "up_proj"]}}
}
CASES: dict[str, dict[str, Any]] = {
    "grpo, KL in the loss, masked, one completion in each micro-batch": {
        "objective": {"beta": 0.5, "mask_truncated_completions": True},
        "optim": {"max_tokens_per_batch": 1},
    },
    "dapo, LoRA, KL in the reward": {
        **LORA,
        "objective": {
            "loss_type": "dapo", "beta": 0.3, "kl_in": "reward", "kl_estimator": "k1",
            "epsilon_high": 0.3,
        },
        "rollout": {"temperature": 0.6},
    },
    "bnpo, LoRA, KL in the loss, masked, in micro-batches": {
        **LORA,
        "objective": {
            "loss_type": "bnpo", "beta": 0.5, "use_bias_correction_kl": False,
            "mask_truncated_completions": True, "scale_rewards": "batch",
        },
        "optim": {"max_tokens_per_batch": 60},
    },
    "dr_grpo, KL in the reward, reference refreshed": {
        "objective": {
            "loss_type": "dr_grpo", "beta": 0.3, "kl_in": "reward", "kl_estimator": "k1",
            "reference_refresh_every": 2, "advantage_estimator": "rloo", "scale_rewards": "none",
            "importance_sampling_level": "sequence",
        },
    },
    "cispo, truncated sampler, entropy, three updates, in micro-batches": {
        **LORA,
        "objective": {
            "loss_type": "cispo", "epsilon_high": 1.0, "entropy_coef": 0.05, "num_iterations": 3,
            "sampler_correction": "token", "sampler_correction_cap": 1.05,
        },
        "rollout": {"top_k": 150},
        "optim": {"max_tokens_per_batch": 60},
    },
    "sequence-level ratios, two mini-batches in micro-batches, KL in the loss": {
        "objective": {"importance_sampling_level": "sequence", "epsilon": 0.001, "beta": 0.3},
        "optim": {"mini_batches": 2, "max_tokens_per_batch": 40},
    },
    "dapo, LoRA, two mini-batches, one iteration, masked, KL in the reward": {
        **LORA,
        "objective": {
            "loss_type": "dapo", "num_iterations": 1, "mask_truncated_completions": True,
            "beta": 0.3, "kl_in": "reward", "kl_estimator": "k1",
        },
        "optim": {"mini_batches": 2},
    },
    "REINFORCE++ with advantages of tokens, two mini-batches, masked, KL in the reward": {
        **LORA,
        "objective": {
            "advantage_estimator": "reinforce_plus_plus_baseline", "num_iterations": 1,
            "mask_truncated_completions": True, "beta": 0.3, "kl_in": "reward",
            "kl_estimator": "k1",
        },
        "optim": {"mini_batches": 2},
    },
    "a teacher beside the rewards, two updates, masked": {
        "objective": {
            "distillation": {"teacher": "other", "coef": 2.0}, "mask_truncated_completions": True,
        },
    },
    "a teacher alone, LoRA, two mini-batches": {
        **LORA,
        "objective": {
            "distillation": {"teacher": "other", "only": True}, "num_iterations": 1,
        },
        "optim": {"mini_batches": 2},
    },
    "images with noise, truncated sampler, two mini-batches": {
        "objective": {"sampler_correction": "token", "epsilon": 0.9, "epsilon_high": 9.0},
        "rollout": {"noise": {"strength": 800, "share": 0.25}, "top_k": 150},
        "optim": {"mini_batches": 2},
    },
    "masked images: PAPO, VPPO and less entropy, two mini-batches, masked completions": {
        **LORA,
        "objective": {
            "perception": {"kl_coef": 0.3, "top_share": 0.4, "min_scale": 0.5, "patch_size": 7},
            "entropy_coef": -0.05, "num_iterations": 1, "mask_truncated_completions": True,
            "top_entropy_quantile": 0.8, "advantage_clip": 0.7,
        },
        "optim": {"mini_batches": 2},
    },
}  # fmt: skip
