"""An exported model is the policy: transformers computes the log-probs of the checkpoint."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from commands import fails, run, run_python
from PIL import Image
from safetensors.torch import load_file
from small_runs import save_tiny_model, small_run
from tiny_models import make_prompt, noise_example
from torch import nn

from vlm_grpo.config.recipes import load_settings
from vlm_grpo.config.run import Settings
from vlm_grpo.data.loading import load_examples
from vlm_grpo.data_scripts.make_shapes import draw_examples
from vlm_grpo.eval.predict import predict
from vlm_grpo.model.engine.packing import GroupSlice, MicroBatch
from vlm_grpo.model.engine.sampling import SamplingDistribution
from vlm_grpo.model.policy import Policy, load_policy
from vlm_grpo.model.resolve import resolve_model
from vlm_grpo.task.coordinates import FRAMES
from vlm_grpo.task.registry import load_task
from vlm_grpo.training.export import PREPROCESSOR, build_model_card, export
from vlm_grpo.types import Example

COMPLETIONS = ((70, 71, 72, 73), (80, 81))
QUESTION = "What is it?"

TRANSFORMERS_SCRIPT = """
import json, sys
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

torch.set_num_threads(1)
found = {}
for folder in sys.argv[1:]:
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype="auto")
    processor = AutoProcessor.from_pretrained(folder)
    content = [{"type": "image"}, {"type": "text", "text": "What is it?"}]
    messages = [{"role": "user", "content": content}]
    text = processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    logprobs = []
    for completion in ([70, 71, 72, 73], [80, 81]):
        inputs = processor(
            text=[text], images=[Image.open(folder + "/../image.png")], return_tensors="pt"
        )
        prompt = inputs["input_ids"].shape[1]
        more = torch.tensor([completion])
        inputs["input_ids"] = torch.cat([inputs["input_ids"], more], 1)
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        if "mm_token_type_ids" in inputs:
            types = inputs["mm_token_type_ids"]
            inputs["mm_token_type_ids"] = torch.cat([types, torch.zeros_like(more)], 1)
        with torch.no_grad():
            logits = model(**inputs).logits[0, prompt - 1 : -1].float()
        logprobs += logits.log_softmax(-1).gather(1, more.T)[:, 0].tolist()
    large = processor(text=[text], images=[Image.new("RGB", (900, 900))], return_tensors="pt")
    found[folder] = {"logprobs": logprobs, "large": large["input_ids"].shape[1]}
assert "vlm_grpo" not in sys.modules
print(json.dumps(found))
"""


LORA = {"r": 4, "alpha": 8}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("qwen2_vl", {"dtype": "float32"}),
    "lora": ("qwen3_vl", {"dtype": "float32", "lora": {**LORA, "target": "all"}}),
    "bfloat16": ("qwen2_5_vl", {"dtype": "bfloat16", "lora": LORA}),
}


def compute_logprobs(policy: Policy, example: Example) -> list[float]:
    """Return the log-probs of the fixed completions, with no banned tokens, as in transformers."""
    policy.distribution = SamplingDistribution()
    prompt = make_prompt(policy, example)
    batch = MicroBatch((GroupSlice(prompt, COMPLETIONS, (0, 1)),))
    with torch.no_grad():
        return policy.score(batch).logprobs.float().tolist()


def make_settings(original: Path, **policy: Any) -> Settings:
    values = {"task": "none", "model": str(original), "data": {"train": "none"}}
    return Settings.model_validate(values | {"policy": {"max_pixels": 12544, **policy}})


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """For each variant the folders of the model that was trained and of the exported one, log-probs
    of ``COMPLETIONS`` under both, and the number of tokens of a prompt with a large image."""
    root = tmp_path_factory.mktemp("export")
    found = {}
    for variant, (family, own) in VARIANTS.items():
        # 64 x 96 pixels for patches of 16, 56 x 84 for those of 14: no resize on either side.
        size = (96, 64) if family == "qwen3_vl" else (84, 56)
        example = noise_example("image", [size], QUESTION)
        (root / family).mkdir()
        example.images[0].load().save(root / family / "image.png")
        original = save_tiny_model(root / family / "original", family, seed=0, layers=3)
        untrained = load_policy(make_settings(original, dtype="float32"), training=False)
        before = compute_logprobs(untrained, example)
        settings, checkpoint = make_settings(original, **own), root / family / "checkpoint"
        policy = load_policy(settings)
        with torch.no_grad():  # the weights then differ much from those of the original model
            for _, weight in policy.trainable_parameters():
                weight.add_(0.1 * weight.std() * torch.randn_like(weight) + 0.02)
        policy.save(checkpoint, policy.weights())
        settings.save(checkpoint / "config.yaml")
        # Load it as evaluations do, in the dtype of the settings.
        policy = load_policy(settings, checkpoint, training=False)
        out = export(str(checkpoint), root / family / variant)
        large = make_prompt(policy, noise_example("large", [(900, 900)], QUESTION)).token_ids
        found[variant] = SimpleNamespace(original=original, out=out, untrained=before)
        found[variant].logprobs = compute_logprobs(policy, example)
        found[variant].large_tokens = len(large)
    return found


@pytest.fixture(scope="module")
def results(exported: dict[str, Any]) -> dict[str, Any]:
    """Results of transformers with the folders, in a process without vlm_grpo."""
    folders = (model.out for model in exported.values())
    return json.loads(run_python("-c", TRANSFORMERS_SCRIPT, *folders))


@pytest.mark.parametrize("variant", VARIANTS)
def test_transformers_computes_the_policy_from_the_exported_files(exported, results, variant):
    model, (family, _) = exported[variant], VARIANTS[variant]
    theirs = results[str(model.out)]
    # The bfloat16 policy rounds its activations at every layer, the export, in float32 like the
    # original, does not: 8 bits of mantissa, three layers, logits of about 10; measured 0.11.
    tolerance = 0.15 if variant == "bfloat16" else 1e-5
    assert theirs["logprobs"] == pytest.approx(model.logprobs, abs=tolerance)
    changes = (abs(a - b) for a, b in zip(model.untrained, model.logprobs, strict=True))
    assert max(changes) > 0.2
    assert theirs["large"] == model.large_tokens
    values = json.loads((model.out / PREPROCESSOR).read_text())
    assert values["max_pixels"] == values["size"]["longest_edge"] == 12544
    names = set(load_file(model.out / "model.safetensors"))
    assert names == set(load_file(model.original / "model.safetensors"))
    # First parts of the names in the files on the hub, which vLLM maps (hf_to_vllm_mapper in
    # vllm/model_executor/models/qwen2_vl.py, qwen2_5_vl.py and qwen3_vl.py); model.visual in Qwen3.
    first = {"model", "lm_head"} if family == "qwen3_vl" else {"model", "lm_head", "visual"}
    assert {name.partition(".")[0] for name in names} <= first
    paths = (folder / "config.json" for folder in (model.out, model.original))
    config, original = (json.loads(path.read_text()) for path in paths)
    assert config["architectures"] == original["architectures"]
    assert "shared_prefix" not in json.dumps(config)  # this attention exists in vlm-grpo only
    present = {path.name for path in model.out.iterdir()}
    assert {"generation_config.json", "tokenizer.json", "tokenizer_config.json"} <= present
    assert {"chat_template.jinja", "processor_config.json", "README.md"} <= present
    assert not {name for name in present if name.startswith("adapter")}


def test_weights_are_written_in_the_requested_dtype_and_an_adapter_alone(exported, tmp_path):
    checkpoint = exported["full"].out.with_name("checkpoint")
    half = export(str(checkpoint), tmp_path / "half", dtype="bfloat16")
    modes = {path.stat().st_mode for path in half.iterdir()}  # whoever reads one file reads all
    assert len(modes) == 1
    weights = load_file(half / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    assert json.loads((half / "config.json").read_text())["dtype"] == "bfloat16"
    model = exported["lora"]  # whose adapter is written alone and can be loaded by name
    checkpoint = model.out.with_name("checkpoint")
    out = export(str(checkpoint), tmp_path / "adapter", "adapter")
    config = json.loads((out / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(model.original)
    saved = load_file(out / "adapter_model.safetensors")
    for name, weight in load_file(checkpoint / "adapter_model.safetensors").items():
        assert torch.equal(saved[name], weight)
    assert not (out / "model.safetensors").exists()
    Image.new("RGB", (64, 64)).save(tmp_path / "a.png")
    picture: Any = predict(out, tmp_path / "a.png", QUESTION).picture
    assert picture.height > 64  # the output is written below the image


@pytest.mark.parametrize("step", ["", "@2", "@best"])
def test_the_model_card_has_the_results_of_the_exported_step(capsys, finished, tmp_path, step):
    out = tmp_path / "out"
    status, shown, _ = run(capsys, "export", f"{finished}{step}", out)
    rows = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    values = {row["step"] + 1: row["eval/exact"] for row in rows}
    expected = {"": 3, "@2": 2, "@best": max(values, key=lambda s: (values[s], s))}[step]
    which = f"{finished / f'checkpoints/step-{expected}'}" + ", the newest of its run" * (not step)
    lines = f"checkpoint {which}", f"model in {out}", f"upload it with hf upload OWNER/NAME {out}"
    assert (status, shown.splitlines()) == (0, [*lines])
    front, text = (out / "README.md").read_text().split("---\n")[1:3]
    card = yaml.safe_load(front)
    assert card["pipeline_tag"] == "image-text-to-text"
    assert card["tags"] == ["vlm-grpo", "grpo", "counting"]
    (metric,) = card["model-index"][0]["results"][0]["metrics"]
    assert metric == {"type": "exact", "value": pytest.approx(values[expected], abs=5e-5)}
    assert f"after step {expected}" in text
    assert "n = 40" in text or "On 40 held-out examples" in text
    assert "LoRA, r 8" in text


@pytest.mark.parametrize("adapter", [False, True])
def test_the_program_of_the_card_answers_as_the_policy(adapter, finished, tmp_path, capsys):
    dtype = None if adapter else "float32"
    weights = "adapter" if adapter else "merged"
    out = export(str(finished), tmp_path / "out", weights, dtype=dtype)
    settings = load_settings(str(finished / "config.yaml"), ["data.eval_limit=1"])
    (example,) = load_examples("embedded:counting", load_task("counting"), settings.data, "eval")
    example.images[0].load().save(tmp_path / "a.png")
    card = (out / "README.md").read_text()
    program = "".join(re.findall(r"^```python\n(.*?)^```", card, re.DOTALL | re.MULTILINE))
    assert program.count("QUESTION") == 1
    program = program.replace("THIS FOLDER", str(out)).replace("QUESTION", example.question)
    program = program.replace("IMAGE.png", str(tmp_path / "a.png"))
    exec(compile(program, "README.md", "exec"), {})
    prediction = predict(finished, tmp_path / "a.png", example.question)
    assert capsys.readouterr().out == prediction.text + "\n"


def test_the_card_has_the_prompt_of_the_training(finished, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    for config in run.rglob("config.yaml"):
        settings = load_settings(str(config), ["task=grounding", "task_options.tags=true"])
        settings.save(config)
    card = build_model_card(resolve_model(str(run)))
    task = load_task("grounding", tags=True, frame=FRAMES["resized"])
    (example,) = draw_examples("grounding", 1)
    prompt = task.prompt(replace(example, question="QUESTION"))
    assert f'"text": {json.dumps(prompt)}' in card
    for config in run.rglob("config.yaml"):
        load_settings(str(config), ["task=gone.py"]).save(config)
    card = build_model_card(resolve_model(str(run)))
    assert '"text": "QUESTION"' in card
    assert "a plain prompt" in card


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("RUN HERE", "exists already: name a new folder"),
        ("RUN /proc/x", "error: /proc/x cannot be created: No such file or directory\n"),
        ("RUN /etc/passwd/x", "/etc/passwd"),
        ("RUN@7 out", "has no checkpoint of step 7: its checkpoints are of steps 1, 2, 3"),
        ("RUN out --adapter --dtype bfloat16", "--dtype has no effect"),
        ("FULL out --adapter", "trained full weights and has no adapter"),
        ("FULL out --dequantized", "did not train on quantized weights: leave out --dequantized"),
        ("FULL out --dequantized --adapter", "--adapter writes no base weights"),
        ("FULL@3 out", "is not the folder of a run"),
    ],
)
def test_wrong_arguments_are_one_message(capsys, exported, finished, tmp_path, arguments, message):
    full = exported["full"].out.with_name("checkpoint")
    names = {"RUN": finished, "FULL": full, "HERE": tmp_path, "out": tmp_path / "out"}
    parts = [word.partition("@") for word in arguments.split()]
    words = [f"{names.get(name, name)}{at}{step}" for name, at, step in parts]
    assert message in fails(capsys, "export", *words)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("weights", ["merged", "dequantized"])
def test_an_adapter_is_merged_into_the_requested_weights(weights, tmp_path):
    lora = {**LORA, "target": ["q_proj", "down_proj"]}
    model, rollout = save_tiny_model(tmp_path / "model"), {"max_completion_length": 40}
    run = small_run(tmp_path, model, policy={"load_in": "4bit", "lora": lora}, rollout=rollout)
    random = load_policy(run)
    for _, weight in random.trainable_parameters():
        nn.init.normal_(weight, std=0.1)
    random.save(tmp_path / "checkpoint", random.weights())
    run.save(tmp_path / "checkpoint/config.yaml")
    out = export(str(tmp_path / "checkpoint"), tmp_path / "out", weights)
    card = (out / "README.md").read_text()
    assert "| base weights in training | 4bit (nf4, double quantization), by bitsandbytes" in card
    policy = run.policy.model_copy(update={"load_in": "none", "lora": None})
    whole = run.model_copy(update={"model": str(out), "policy": policy})
    trained = load_policy(run, tmp_path / "checkpoint", training=False)
    example = noise_example("image", [(84, 56)], QUESTION)
    policies = trained, load_policy(whole, training=False)
    pairs = zip(*(compute_logprobs(policy, example) for policy in policies), strict=True)
    largest = max(abs(a - b) for a, b in pairs)
    if weights == "dequantized":
        assert "those of the training, dequantized" in card
        assert largest < 1e-4  # float32: the same matrices, added in another order
    else:
        assert "the original ones" in card
        assert largest > 1e-2  # 4 bits: a tenth of every weight
    original = load_file(tmp_path / "model/model.safetensors")
    exported = load_file(out / "model.safetensors")
    [name] = [n for n in exported if n.endswith("layers.0.self_attn.k_proj.weight")]  # no adapter
    assert torch.equal(exported[name], original[name]) == (weights == "merged")
