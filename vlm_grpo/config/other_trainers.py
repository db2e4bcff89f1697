"""Settings of other trainers, by name, with their equivalents here or the reason for none.

``docs/coming-from.md`` explains the same settings; a test compares the two.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_ADAPTERS = "policy.lora.target (module-name suffixes, language or all)"
_BATCH = "optim.prompts_per_step (in prompts, over all devices)"
_FREEZE = "policy.freeze=[vision,projector]"
_LAUNCH = "none: use accelerate launch with a file of configs/accelerate"
_MERGE = "none: vlm-grpo export RUN OUT writes the merged model"
_MODE = "rollout.vllm.python (for colocate), rollout.vllm.urls (for server)"
_NO_DROPOUT = "policy.lora.dropout (must be 0: completions share a pass over their prompt)"
_PARALLEL = "rollout.vllm.arguments ([--tensor-parallel-size=2], or --argument of vlm-grpo serve)"
_QUANTIZED = "policy.load_in (4bit or 8bit, with policy.lora)"
_RECORDED = "none: completions are always recorded, in samples/ and report.html"
_REWARDS = "none: rewards are methods of a task: vlm-grpo new-task NAME"
_URLS = "rollout.vllm.urls (the addresses of vlm-grpo serve --for-rollouts)"
_USES_VLLM = "rollout.sampler (vllm: docs/vllm.md)"

_SAME_IN_TRL = {
    "rollout": "num_generations temperature top_p top_k min_p max_completion_length",
    "objective": "num_iterations epsilon epsilon_high delta loss_type scale_rewards entropy_coef "
    "sapo_temperature_pos sapo_temperature_neg vespo_k_pos vespo_lambda_pos vespo_k_neg "
    "vespo_lambda_neg top_entropy_quantile importance_sampling_level mask_truncated_completions "
    "use_bias_correction_kl",
    "optim": "warmup_steps weight_decay max_grad_norm max_steps num_train_epochs",
    "policy": "trust_remote_code gradient_checkpointing activation_offloading",
    "prompt": "chat_template_kwargs",
}
"""By block: the settings with the names of TRL's GRPOConfig."""

# By trainer: names, and the key here with a remark in parentheses, or "none: " and the reason. A
# trainer built on TRL lists only the names that TRL lacks.
_TABLE: dict[str, dict[str, str]] = {
    "TRL": {
        "beta": "objective.beta (with objective.reference_refresh_every=never for a fixed one)",
        "sync_ref_model ref_model_sync_steps": "objective.reference_refresh_every (in steps)",
        "ref_model_mixup_alpha": "none: a refreshed reference is a copy of the policy",
        "multi_objective_aggregation": "objective.normalize_each_reward",
        "vllm_importance_sampling_correction vllm_importance_sampling_mode": (
            "objective.sampler_correction"
        ),
        "vllm_importance_sampling_clip_max vllm_importance_sampling_cap": (
            "objective.sampler_correction_cap"
        ),
        "vllm_importance_sampling_clip_min": "objective.sampler_correction_floor",
        "reward_weights": "task_options.weights.NAME (by the reward's name)",
        "reward_funcs": _REWARDS,
        "per_device_train_batch_size gradient_accumulation_steps generation_batch_size": _BATCH,
        "steps_per_generation": "optim.mini_batches (updates on parts of a rollout)",
        "learning_rate": "optim.lr",
        "lr_scheduler_type": "optim.schedule",
        "warmup_ratio": "optim.warmup_steps (below 1: a share)",
        "lr_scheduler_kwargs": "optim.min_lr (with optim.schedule=cosine_with_min_lr)",
        "optim": "optim.name",
        "adam_beta1 adam_beta2": "optim.betas",
        "adam_epsilon": "optim.eps",
        "run_name": "name",
        "bf16": "policy.dtype",
        "dtype torch_dtype": "policy.dtype",
        "model_name_or_path": "model",
        "dataset_name": "data.train (hf:NAME)",
        "dataset_train_split dataset_test_split": "data.train (hf:NAME:SPLIT), data.eval",
        "save_steps": "checkpoint.every",
        "save_total_limit": "checkpoint.keep_last",
        "load_best_model_at_end": "checkpoint.keep_best",
        "resume_from_checkpoint": "resume (true: from the run's newest checkpoint)",
        "eval_steps": "evaluation.every",
        "eval_strategy": "evaluation.every",
        "eval_on_start": "none: a run always evaluates before its first step, given data.eval",
        "log_completions log_multimodal": _RECORDED,
        "report_to": "logging.trackers",
        "use_vllm": _USES_VLLM,
        "vllm_mode": _MODE,
        "vllm_server_base_url vllm_server_host vllm_server_port": _URLS,
        "vllm_gpu_memory_utilization": "rollout.vllm.gpu_memory_utilization",
        "vllm_max_model_length": "rollout.vllm.max_model_length",
        "vllm_enable_sleep_mode": "rollout.vllm.sleep_level",
        "vllm_server_timeout": "rollout.vllm.startup_timeout",
        "vllm_tensor_parallel_size": _PARALLEL,
        "fsdp deepspeed": _LAUNCH,
        "use_peft": "policy.lora.r (a rank turns adapters on)",
        "lora_r": "policy.lora.r",
        "lora_alpha": "policy.lora.alpha",
        "lora_dropout": _NO_DROPOUT,
        "lora_target_modules": _ADAPTERS,
        "lora_modules_to_save": "policy.lora.modules_to_save",
        "use_rslora": "policy.lora.use_rslora",
        "use_dora": "policy.lora.use_dora",
        "load_in_4bit load_in_8bit": _QUANTIZED,
        "bnb_4bit_quant_type": "policy.quant_type",
        "use_bnb_nested_quant": "policy.double_quant",
        "max_prompt_length": "none: no prompt is truncated; policy.max_pixels bounds its length",
        "attn_implementation": "none: completions share their prompt by an attention of our own",
        "repetition_penalty off_policy_mask_threshold": ("none: it is not implemented"),
    },
    "VLM-R1": {
        "data_file_paths": "data.train",
        "image_folders": "data.image_root",
        "val_split_ratio": "data.eval (a separate source)",
        "task_type reward_method": "task",
        "is_reward_customized_from_vlm_module": "none: the model's family sets the frame of boxes",
        "max_anyres_num": "none: InternVL's processor determines the tiles",
        "freeze_vision_modules": _FREEZE,
    },
    "ms-swift": {
        "vit_lr": "optim.lr_vision",
        "aligner_lr": "optim.lr_projector",
        "dataset": "data.train",
        "val_dataset split_dataset_ratio": "data.eval (a separate source)",
        "columns": "data.columns",
        "system": "prompt.system",
        "enable_thinking": "prompt.thinking",
        "tuner_type": "policy.lora.r (for lora; full weights are the default)",
        "lora_rank": "policy.lora.r",
        "target_modules": _ADAPTERS,
        "init_weights": "policy.lora.init_lora_weights",
        "adapters": "policy.lora.adapter",
        "freeze_vit freeze_aligner": _FREEZE,
        "external_plugins": _REWARDS,
        "advantage_estimator": "objective.advantage_estimator",
        "kl_in_reward": "objective.kl_in (reward)",
        "dynamic_sample": "rollout.dynamic_sampling",
        "max_resample_times": "rollout.max_resample",
        "overlong_filter": "objective.mask_truncated_completions",
        "rollout_importance_sampling_mode": "objective.sampler_correction",
        "rollout_importance_sampling_threshold": "objective.sampler_correction_cap",
        "multi_turn_scheduler": "none: a completion is one turn",
        "async_generate": "rollout.steps_ahead (1, with rollout.sampler=vllm)",
        "merge_lora": _MERGE,
    },
    "Unsloth": {
        "model_name": "model",
        "max_seq_length": "rollout.max_completion_length (policy.max_pixels bounds the prompt)",
        "load_in_fp8": "none: policy.load_in is 4bit or 8bit",
        "full_finetuning": "none: full weights are the default, without policy.lora",
        "use_gradient_checkpointing": "policy.gradient_checkpointing",
        "fast_inference": _USES_VLLM,
        "gpu_memory_utilization": "rollout.vllm.gpu_memory_utilization",
        "r": "policy.lora.r",
        "finetune_language_layers finetune_vision_layers": "policy.lora.target (language or all)",
        "finetune_attention_modules finetune_mlp_modules": _ADAPTERS,
        "random_state": "seed",
        "use_rslora": "policy.lora.use_rslora",
        "modules_to_save": "policy.lora.modules_to_save",
        "loftq_config": "none: initialize with PEFT, and start from it (policy.lora.adapter)",
        "system_prompt": "prompt.system",
        "save_pretrained_merged": _MERGE,
    },
    "EasyR1": {
        "data.train_files": "data.train",
        "data.val_files": "data.eval",
        "data.prompt_key": "data.columns.question",
        "data.answer_key": "data.columns.answer",
        "data.image_key": "data.columns.images",
        "data.image_dir": "data.image_root",
        "data.format_prompt": "prompt.template (its text, with question for content)",
        "data.max_response_length": "rollout.max_completion_length",
        "data.filter_overlong_prompts": "none: no prompt is skipped",
        "data.rollout_batch_size": _BATCH,
        "data.max_pixels": "policy.max_pixels",
        "data.min_pixels": "policy.min_pixels",
        "worker.actor.global_batch_size": (
            "optim.mini_batches (rollout_batch_size / global_batch_size)"
        ),
        "worker.actor.ppo_epochs": "objective.num_iterations",
        "worker.actor.micro_batch_size_per_device_for_update worker.actor.dynamic_batching "
        "worker.actor.padding_free": "optim.max_tokens_per_batch (in tokens)",
        "algorithm.adv_estimator": "objective.advantage_estimator",
        "algorithm.disable_kl": "objective.beta (0: none)",
        "algorithm.use_kl_loss": "objective.kl_in",
        "algorithm.kl_coef": "objective.beta",
        "algorithm.kl_penalty": "objective.kl_estimator",
        "algorithm.online_filtering": "rollout.dynamic_sampling",
        "trainer.max_try_make_batch": "rollout.max_resample",
        "worker.actor.clip_ratio_low": "objective.epsilon",
        "worker.actor.clip_ratio_high": "objective.epsilon_high",
        "worker.actor.clip_ratio_dual": "objective.delta",
        "worker.actor.loss_avg_mode": "objective.loss_type",
        "worker.actor.loss_type": "objective.loss_type",
        "worker.rollout.n": "rollout.num_generations",
        "worker.rollout.val_override_config.temperature": "evaluation.temperature",
        "worker.actor.model.model_path": "model",
        "worker.actor.model.freeze_vision_tower": _FREEZE,
        "worker.actor.model.lora.rank": "policy.lora.r",
        "worker.actor.model.lora.alpha": "policy.lora.alpha",
        "worker.actor.model.lora.exclude_modules": _ADAPTERS,
        "worker.actor.model.enable_gradient_checkpointing": "policy.gradient_checkpointing",
        "worker.actor.optim.lr": "optim.lr",
        "worker.actor.optim.lr_warmup_ratio": "optim.warmup_steps (below 1: a share)",
        "worker.actor.fsdp.enable_full_shard": _LAUNCH,
        "worker.reward.reward_function": _REWARDS,
        "trainer.val_freq trainer.val_before_train": "evaluation.every",
        "trainer.val_generations_to_log": _RECORDED,
        "trainer.save_freq": "checkpoint.every",
        "trainer.save_limit": "checkpoint.keep_last",
        "trainer.find_last_checkpoint trainer.load_checkpoint_path": "resume",
        "trainer.experiment_name": "name",
        "trainer.save_checkpoint_path": "output_dir",
        "trainer.logger": "logging.trackers",
        "trainer.total_epochs": "optim.num_train_epochs",
        "worker.rollout.tensor_parallel_size": _PARALLEL,
        "worker.actor.optim.strategy": "policy.master_weights (bfloat16 for adamw_bf16)",
        "worker.actor.offload": _LAUNCH,
        "worker.actor.ulysses_size": "none: it is not implemented",
    },
}


@dataclass(frozen=True)
class OtherSetting:
    """A setting of another trainer.

    Attributes:
        trainer: the first trainer that has it, in the order of ``_TABLE``.
        name: its name there.
        equivalent: our key, perhaps with a remark in parentheses, or ``none: `` and the reason.
    """

    trainer: str
    name: str
    equivalent: str

    @property
    def keys(self) -> list[str]:
        """Our keys; empty if there is no equivalent."""
        if self.equivalent.startswith("none: "):
            return []
        return re.findall(r"[a-z_]+(?:\.[a-z_]+)*", re.sub(r"\(.*?\)|=\S+", "", self.equivalent))

    def __str__(self) -> str:
        name = f"{self.trainer}'s {self.name}"
        if not self.keys:
            return f"{name} has no equivalent here: {self.equivalent.removeprefix('none: ')}"
        return f"{name} is {self.equivalent} here"


OTHER_SETTINGS = [
    OtherSetting("TRL", name, f"{block}.{name}")
    for block, names in _SAME_IN_TRL.items()
    for name in names.split()
] + [
    OtherSetting(trainer, name, equivalent)
    for trainer, rows in _TABLE.items()
    for names, equivalent in rows.items()
    for name in names.split()
]
"""Every known setting of another trainer."""


def find_other_setting(key: str) -> OtherSetting | None:
    """Return the setting of another trainer with this name, or with this last part of a name.

    >>> print(find_other_setting("optim.learning_rate"))
    TRL's learning_rate is optim.lr here
    """
    last = key.rpartition(".")[2]
    for wanted, shorten in ((key, str), (last, str), (last, _last_part)):
        for setting in OTHER_SETTINGS:
            if shorten(setting.name) == wanted:
                return setting
    return None


def _last_part(name: str) -> str:
    return name.rpartition(".")[2]
