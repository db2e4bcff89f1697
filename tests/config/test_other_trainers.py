"""Names of other trainers' settings: every equivalent exists, and the guide lists the same."""

import dataclasses
import re
from pathlib import Path

import pytest
from trl.scripts.utils import ScriptArguments
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.model_config import ModelConfig
from trl.trainer.sft_config import SFTConfig

from vlm_grpo.config.other_trainers import find_other_setting, list_other_settings
from vlm_grpo.config.run import Settings
from vlm_grpo.config.section import known_keys

KEYS = {*known_keys(Settings), "task_options.weights", "data.columns.question"}
KEYS |= {"data.columns.answer", "data.columns.images"}
GUIDE = Path(__file__).parents[2] / "docs/coming-from.md"
EARLIER = {"reward_funcs", "torch_dtype", "max_prompt_length", "warmup_ratio"}
EARLIER |= {"vllm_importance_sampling_cap"}
"""Names of an argument of TRL's trainer, and of earlier versions."""

NOT_SETTINGS = {"od_ap", "odLength", "weighted_sum", "all_match", "scripts", "swift"}
NOT_SETTINGS |= {"get_peft_model", "model.save_lora", "model.save_pretrained"}
"""Values, programs and functions in the first columns of the guide."""


def test_every_equivalent_is_a_setting_and_a_setting_without_one_has_a_reason():
    for other in list_other_settings():
        assert {*other.keys} <= KEYS
        assert other.keys or len(other.equivalent.removeprefix("none: ").split()) > 2


def test_trls_names_are_those_of_its_config():
    classes = (GRPOConfig, SFTConfig, ModelConfig, ScriptArguments)
    fields = {field.name for each in classes for field in dataclasses.fields(each)}
    named = {other.name for other in list_other_settings() if other.trainer == "TRL"}
    assert named - fields == EARLIER - fields


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("optim.learning_rate", "TRL's learning_rate is optim.lr here"),
        ("worker.rollout.n", "EasyR1's worker.rollout.n is rollout.num_generations here"),
        ("rollout_batch_size", "EasyR1's data.rollout_batch_size is optim.prompts_per_step (in"),
        ("load_in_4bit", "TRL's load_in_4bit is policy.load_in (4bit or 8bit"),
        ("system", "ms-swift's system is prompt.system here"),
        ("num_generations", "TRL's num_generations is rollout.num_generations here"),
        ("system_prompt", "Unsloth's system_prompt is prompt.system here"),
        ("per_device_train_batch_size", "is optim.prompts_per_step (in prompts"),
        ("policy.lora.rank", "EasyR1's worker.actor.model.lora.rank is policy.lora.r here"),
    ],
)
def test_a_name_is_found_with_or_without_its_block(key, expected):
    assert expected in str(find_other_setting(key))
    assert find_other_setting("zebra") is None


def test_the_guide_explains_every_name():
    """Each name in a table's first column has, in the second, the equivalent of our table."""
    text = GUIDE.read_text("utf-8").partition("\n## Score")[0]
    rows = [row.split(" | ") for row in text.splitlines() if row.startswith("| `")]
    missing, different = [], []
    for first, second in ((row[0], row[1]) for row in rows):
        for name in re.findall(r"`(?:--)?([a-z][a-zA-Z_0-9.]+\w)", first):
            other = find_other_setting(name)
            if name in second or name in NOT_SETTINGS:  # our setting may have the same name
                continue
            if other is None:
                missing.append(name)
            elif not any(key in second for key in [*other.keys, "as for TRL"]) and other.keys:
                different.append(name)
    assert (missing, different) == ([], [])
