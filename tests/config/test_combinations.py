"""Combinations of settings that are refused or noted, and the table that lists them."""

import ast
import re
from types import NoneType

import pytest
from pydantic import BaseModel

from vlm_grpo import Settings, UserError, load_settings
from vlm_grpo.config.combinations import Combination, _read_table, list_notes, parse
from vlm_grpo.config.objective import ObjectiveSettings
from vlm_grpo.config.section import Frozen, get_blocks

URL = "http://127.0.0.1:8000"
CPU = {"reference_device": "cpu"}
OVERLONG = "task_options.weights.overlong=1 task_options.overlong_cache"
WARM = "warm_start.steps=5 warm_start"
RPP, ZOOM = "reinforce_plus_plus", "task_options.environment=zoom"
SEQUENCE, FIXED = {"importance_sampling_level": "sequence"}, {"reference_refresh_every": "never"}
BIASED = {"beta": 0.04, "use_bias_correction_kl": False}
ONLY = {"distillation": {"teacher": "a", "only": True}}
VLLM, IPC = "rollout.sampler=vllm", "rollout.vllm.weight_transfer=ipc"
OWN = f"{VLLM} rollout.vllm.python=p"
SHARED = f"{VLLM} rollout.vllm.urls=[{URL}]"
K1 = {"beta": 0.1, "kl_estimator": "k1", "use_bias_correction_kl": False}
PLAIN_KL = {"kl_in": "reward", "use_bias_correction_kl": False, "reference_refresh_every": 5}


@pytest.mark.parametrize(
    ("fields", "remedy"),
    [
        ({"num_iterations": 2, "delta": 1.1}, "delta above 1 \\+ epsilon_high"),
        ({"loss": "my_loss"}, "must be FILE.py:NAME"),
        ({"loss_type": "cispo", "epsilon_high": 0.2}, "set epsilon_high to 1 or more"),
        ({"loss_type": "cispo", "epsilon_high": 5.0, "epsilon": 0.1}, "one bound"),
        ({"sapo_temperature_pos": 2.0}, "settings of sapo .* set loss_type=sapo"),
        ({"loss_type": "sapo", "vespo_k_pos": 1.0}, "settings of vespo .* loss_type=vespo"),
        ({"loss_type": "sapo", "epsilon": 0.1}, "sapo has no clip bounds: remove epsilon"),
        ({"loss_type": "luspo"}, "set importance_sampling_level=sequence"),
        ({**SEQUENCE, "loss_type": "vespo"}, "its own weight of a"),
        ({"normalize_each_reward": True, "scale_rewards": "none"}, "ignored: remove it"),
        (K1, "set use_bias_correction_kl=true"),
        ({"beta": 0.1, **PLAIN_KL}, "remove it with kl_in=reward"),
        ({"normalize_each_reward": True, "beta": 0.1, "kl_in": "reward"}, "set kl_in to loss"),
        (CPU, "without a reference snapshot.*set beta above 0"),
        ({**CPU, "beta": 0.1}, "without a reference snapshot.*reference_refresh_every above 1"),
        ({"replay": {}, "beta": 0.1}, "replay needs beta=0"),
        ({"advantage_estimator": "gae"}, "unknown: choose grpo, rloo, .* or FILE.py:NAME"),
        ({"advantage_estimator": RPP, "scale_rewards": "batch"}, "would be ignored: remove them"),
        ({"advantage_estimator": "my.py:f", "normalize_each_reward": True}, "remove them"),
        ({"advantage_estimator": "my.py:f", "replay": {}}, "remove replay"),
        ({"distillation": {"teacher": "a"}, "replay": {}}, "remove replay"),
        ({"perception": {"kl_coef": 0.01}, "replay": {}}, "remove replay"),
        ({"top_entropy_quantile": 0.2, "replay": {}}, "remove replay"),
        ({"distillation": {"topk": 5}}, "topk has no effect with loss=reverse_kl"),
        ({"distillation": {"teacher": "a", "teacher_update_rate": 0.5}}, "weights of teacher=a"),
        ({"distillation": {"margin": 0.5}}, "no effect with teacher_prompt=same"),
        ({"distillation": {"boxes": "own"}}, "boxes=own needs teacher_prompt=mask"),
        ({"perception": {}}, "set its kl_coef \\(PAPO\\), or its top_share"),
        ({"perception": {"top_share": 0.4}, **ONLY}, "perception would change: remove them, or"),
        ({"top_entropy_quantile": 0.2, **ONLY}, "top_entropy_quantile would change"),
        ({"advantage_clip": 2.0, **ONLY}, "advantage_clip would change"),
        ({"reference_refresh_every": 0}, "at least 1"),
        ({"reference_refresh_every": "sometimes"}, "never"),
        ({"beta": float("nan")}, "beta"),
    ],
)
def test_an_invalid_objective_is_refused_with_its_remedy(fields, remedy):
    with pytest.raises(UserError, match=remedy):
        ObjectiveSettings(**fields)


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        ("rollout.top_p=0.9", "top_p.*sampler_correction"),
        ("rollout.steps_ahead=1", "steps_ahead=1 needs rollout.sampler=vllm"),
        ("rollout.max_resample=2", "max_resample has no effect without rollout.dynamic_sampling"),
        ("rollout.min_new_tokens=9", "min_new_tokens=9 exceeds rollout.max_completion_length"),
        ("rollout.stop=['']", "rollout.stop has an empty string"),
        ("objective.replay.completions=8", "no effect on groups of rollout.num_generations=8: low"),
        ("rollout.noise.strength=1000", "less than or equal to 999"),
        ("rollout.noise.share=1.0", "less than 1"),
        ("policy.lora.r=4 policy.freeze=[vision]", "policy.freeze has no effect with policy.lora"),
        ("policy.lora.r=4 policy.master_weights=bfloat16", "master_weights has no effect with"),
        ("policy.master_weights=bfloat16 policy.dtype=float32", "set policy.dtype=bfloat16"),
        ("policy.lora.dropout=0.05", "policy.lora.dropout=0.05 must be 0: .*log-probs"),
        ("policy.lora.target=[]", "policy.lora.target=.* names no module: use language, all"),
        ("policy.lora.adapter=a policy.lora.init_lora_weights=gaussian", "remove one of them"),
        ("policy.lora.r=3 policy.lora.init_lora_weights=orthogonal", "needs an even r"),
        ("policy.quant_type=fp4", "policy.quant_type has no effect with policy.load_in=none"),
        ("policy.freeze=[vision,projector,language]", "policy.freeze .* nothing is left to train"),
        ("policy.min_pixels=9 policy.max_pixels=4", "min_pixels=9 exceeds max_pixels=4"),
        ("optim.schedule=constant optim.warmup_steps=5", "warmup_steps has no effect with optim.s"),
        ("optim.max_steps=5 optim.warmup_steps=9", "warmup_steps=9 exceeds optim.max_steps=5"),
        ("optim.betas=[0.9,1.0]", "optim.betas=1.0 should be less than 1"),
        ("optim.name=adafactor optim.eps=1e-6", "optim.eps has no effect .* default, 1e-08"),
        ("optim.mini_batches=3", "optim.mini_batches=3 must divide optim.prompts_per_step"),
        ("optim.min_lr=1e-7", "needs a min_lr above 0 and at most lr"),
        ("optim.schedule=cosine_with_min_lr", "needs a min_lr above 0"),
        ("data.eval=null evaluation.every=5", "evaluation.every has no effect without data.eval"),
        ("data.eval=null checkpoint.keep_best=true", "keep_best needs data.eval"),
        ("data.eval=null data.eval_limit=5", "eval_limit has no effect without data.eval"),
        ("data.image_root=x", "image_root has no effect on embedded data"),
        ("checkpoint.keep_best=true checkpoint.keep_last=0", "keep_best has no effect with keep_l"),
        ("checkpoint.sharded=true policy.lora={}", "checkpoint.sharded has no effect on adapters"),
        ("model_revision=main", "model_revision has no effect on the embedded model"),
        ("objective.epsilon=0.3", "objective.epsilon has .*objective.num_iterations or optim.mini"),
        ("logging.profile_steps=[9999]", "has step 9999, which is never run"),
        ("evaluation.samples=4", "needs evaluation.temperature"),
        ("evaluation.samples=4 evaluation.temperature=1 data.eval=null", "samples has no effect"),
        ("rollout.noise={} objective.beta=0.1", "rollout.noise needs objective.beta=0"),
        ("rollout.noise={} objective.replay={}", "rollout.noise needs .* no replay"),
        ("rollout.noise={} objective.top_entropy_quantile=0.2", "raises them for some completions"),
        ("warm_start.steps=all rollout.noise={}", "rollout.noise has no effect in a run of super"),
        ("warm_start.steps=0", "warm_start.steps must be at least 1"),
        ("warm_start.lr=1e-4", "warm_start.steps has no value"),
        ("warm_start.steps=all data.curriculum={}", "supervised.*set data.curriculum=null"),
        ("warm_start.steps=all objective.replay={}", "supervised.*set objective.replay=null"),
        ("warm_start.steps=some", "should be a whole number or be 'all'"),
        ("warm_start.steps=300", "leaves no step after it of optim.max_steps=300.*vlm-grpo sft"),
        ("warm_start.steps=290", "optim.warmup_steps=20 exceeds the 10 steps"),
        (f"{WARM}.warmup_steps=6", "exceeds the 5 supervised steps"),
        (
            f"{WARM}.warmup_steps=1 {WARM}.schedule=constant",
            "warm_start.warmup_steps has no effect with warm_start.schedule=constant",
        ),
        ("rollout.sampler=vllm", "rollout.sampler=vllm needs servers: set either"),
        (f"rollout.vllm.urls=[{URL}]", "rollout.vllm has no effect without rollout.sampler=vllm"),
        ("rollout.cuda_graphs=false rollout.torch_compile=true", "cuda_graphs=false leave"),
        (f"{ZOOM} rollout.noise.share=0.25", "noise does not know the episodes"),
        (f"{ZOOM} objective.replay.size=5", "objective.replay=null"),
        ("methods=[tool_gain]", "tool_gain has no effect without task_options.environment"),
        (f"{ZOOM} methods=[tool_gain] rollout.num_generations=2", "num_generations=2 are too few"),
        (f"{ZOOM} methods=[tool_gain] objective.advantage_estimator={RPP}", "choose grpo or rloo"),
        ("rollout.forks=2", "forks=2 has no effect without task_options.environment"),
        ("rollout.forks=3", "forks=3 must divide rollout.num_generations=8 into at least two"),
        (f"{OVERLONG}=9", "overlong_cache=9 exceeds .*max_completion_length=4"),
        (
            f"{OVERLONG}=2 objective.mask_truncated_completions=true",
            "leaves out of the loss: use one of the two",
        ),
        (
            f"{OWN} rollout.torch_compile=true",
            "torch_compile=true compiles the steps that the policy",
        ),
        (f"{OWN} {IPC} rollout.steps_ahead=2", "use files, or one step"),
        (f"{OWN} {IPC} policy.lora.r=8", "no effect on adapters, which are"),
        (
            f"{OWN} policy.lora.use_dora=true",
            "policy.lora.use_dora: vLLM does not load such adapters",
        ),
        (f"{OWN} policy.lora.r=8 policy.load_in=4bit", "the servers have the whole weights"),
        (
            f"{OWN} objective.sampler_correction=none",
            "none leaves the gradient biased.*sequence_mask",
        ),
        (f"{OWN} objective.top_entropy_quantile=0.2", "which vLLM does not report"),
        (f"{OWN} rollout.vllm.urls=[{URL}]", "set either rollout.vllm.python"),
        (f"{VLLM} rollout.vllm.urls=[127.0.0.1:8000]", "must start with http"),
        (f"{VLLM} rollout.vllm.urls=[{URL},{URL}]", "an address is listed twice"),
        (f"{SHARED} rollout.vllm.arguments=[--eager]", "vllm.arguments has no effect on runn"),
        (f"{SHARED} {IPC}", "use nccl or files"),
        (f"{OWN} rollout.vllm.weight_transfer=nccl", "use ipc or files"),
    ],
)
def test_settings_without_effect_are_refused(overrides, problem):
    words = ["optim.max_steps=300", "optim.warmup_steps=20", *overrides.split()]
    with pytest.raises(UserError, match=problem):
        load_settings("counting", words)


def test_an_outside_sampler_is_corrected_for_unless_the_user_chooses_how():
    assert load_settings("counting").objective.sampler_correction == "none"
    assert load_settings("counting", OWN.split()).objective.sampler_correction == "sequence_mask"
    chosen = [*OWN.split(), "objective.sampler_correction=token", "rollout.top_p=0.9"]
    assert load_settings("counting", chosen).objective.sampler_correction == "token"
    quantized = load_settings("counting", [*chosen, "policy.lora.r=8", "policy.load_in=4bit"])
    assert quantized.policy.load_in == "4bit"


def test_the_warmup_is_compared_with_the_steps_of_the_epochs():
    optim = {"max_steps": None, "num_train_epochs": 3, "prompts_per_step": 4, "warmup_steps": 9}
    with pytest.raises(UserError, match=r"warmup_steps=9 exceeds optim\.max_steps=8"):
        load_settings("counting", optim=optim).with_steps(10)
    settings = load_settings("counting", optim=optim | {"warmup_steps": 0.5})
    assert settings.with_steps(10).optim.max_steps == 8  # ⌈3 · 10 / 4⌉


@pytest.mark.parametrize(
    ("fields", "note"),
    [
        ({}, "a policy loss near 0 is normal"),
        ({"beta": 0.04}, "beta=0.04 has no effect"),
        ({"beta": 0.04, "kl_in": "reward", "num_iterations": 4}, "beta=0.04 has no effect"),
        ({**FIXED, "kl_in": "reward"}, "objective.kl_in is unused"),
        ({"beta": 0.04, "kl_in": "reward", "reference_refresh_every": 10}, "kl_estimator=k1 does"),
        ({**FIXED, "beta": 0.04, "kl_estimator": "k2"}, "half the mean squared log-ratio"),
        ({**BIASED, "num_iterations": 2}, "samples no longer come from the policy"),
        (BIASED, "KL\\(reference ‖ policy\\)"),
        ({"advantage_estimator": RPP}, "ratio is 1, so nothing is clipped"),
        ({"advantage_estimator": "rloo"}, "set scale_rewards=none"),
        ({"loss_type": "bnpo"}, "equals dapo"),
        (SEQUENCE, "equal token-level"),
        ({**SEQUENCE, "loss_type": "dapo", "num_iterations": 2}, "GSPO is loss_type=grpo"),
        ({**SEQUENCE, "beta": 0.1}, "gradient is not exact"),
        ({"beta": 0.1, "sampler_correction": "token"}, "weights only the policy loss"),
        ({"loss_type": "cispo", "epsilon_high": 5.0}, "same gradient as dapo"),
        ({"normalize_each_reward": True, "advantage_estimator": "rloo"}, "hence not unbiased"),
        ({"sampler_correction_cap": 2.0}, "sampler_correction_cap is unused"),
        ({"sampler_correction_floor": 0.5}, "sampler_correction_floor is unused"),
    ],
)
def test_settings_that_are_unused_or_biased_are_noted(fields, note):
    settings = Settings(task="counting", data={"train": "embedded:counting"}, objective=fields)
    assert re.search(note, "\n".join(list_notes(settings)))


def test_a_sound_recipe_has_no_note_and_replay_or_several_updates_no_ratio_of_1():
    sound = {"loss_type": "dapo", "num_iterations": 2, "epsilon_high": 0.28, "beta": 0.01}
    objective = {**sound, "reference_refresh_every": "never"}
    assert list_notes(load_settings("counting", objective=objective)) == []
    bounds = {"epsilon": 0.1, "epsilon_high": 0.28, "delta": 4.0}
    for more in ({"replay": {}}, {"num_iterations": 2}):
        assert not load_settings("counting", objective={**bounds, **more}).has_ratio_1


def list_classes(block: type[BaseModel]) -> dict[str, type[BaseModel]]:
    found = {block.__name__: block}
    for field in block.model_fields.values():
        for inner in get_blocks(field.annotation):
            found |= list_classes(inner)
    return found


def has_key(block: type[BaseModel], key: str) -> bool:
    """Return whether a key is a field of the block, or a property, or inside a mapping."""
    name, _, rest = key.partition(".")
    if name not in block.model_fields:
        return hasattr(block, name) and not rest
    inner = get_blocks(block.model_fields[name].annotation)
    is_mapping = "dict" in str(block.model_fields[name].annotation)
    return not rest or is_mapping or any(has_key(b, rest) for b in inner if b is not NoneType)


def test_every_key_of_the_table_exists():
    blocks = {**list_classes(Settings), "Notes": Settings}
    blocks |= {"SourceSettings": type(load_settings("counting").data.get_sources("train")[0])}
    for name, rows in _read_table().items():
        for row in rows:
            nodes = [*ast.walk(parse(row.when))]
            inner = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
            inner |= {id(node.func) for node in nodes if isinstance(node, ast.Call)}
            names = [n for n in nodes if isinstance(n, ast.Name | ast.Attribute)]
            keys = {ast.unparse(node) for node in names if id(node) not in inner}
            keys |= {*row.each.split(), *filter(None, [row.of])}
            for key in keys:
                assert has_key(blocks[name], key), (name, key)


def test_rows_are_not_applied_to_a_users_class_of_the_same_name(monkeypatch):
    class Own(Frozen):
        share: float = 0.5

    Own.__name__ = "LoggingSettings"
    monkeypatch.setitem(_read_table(), "LoggingSettings", [Combination("never", "parts > 1")])
    assert Own().share == 0.5
