"""Loading models, also by one process for all: dropout, damaged files and the pixel budget."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as hf
from family_models import BUILDERS
from safetensors.torch import load_file, save_file
from tiny_models import noise_example, tiny_model
from transformers import Glm4vImageProcessor, GotOcr2ImageProcessor, Qwen2VLImageProcessor
from transformers.models.smolvlm import processing_smolvlm
from transformers.utils import import_utils

from vlm_grpo.config.policy import PolicySettings
from vlm_grpo.config.recipes import load_settings
from vlm_grpo.errors import UserError
from vlm_grpo.model import loading
from vlm_grpo.model.families.family import Family, PixelBudget
from vlm_grpo.task import PlainQuestion
from vlm_grpo.types import Example
from vlm_grpo.utils.chat import Turn

LORA = load_settings("quickstart", ["policy.lora.r=2"])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a copy of the embedded model."""
    return shutil.copytree(loading.get_model_source("embedded"), tmp_path / "model")


def save_adapter(folder: Path) -> loading.LoadedModel:
    loaded = loading.load_model(LORA)
    assert loaded.adapters is not None
    loaded.adapters.save_pretrained(str(folder))
    return loaded


def test_a_models_dropout_is_refused_where_two_passes_are_compared(folder):
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["attention_dropout"] = 0.25
    (folder / "config.json").write_text(json.dumps(config))
    model = f"model={folder}"
    loading.load_model(load_settings("quickstart", [model]))  # one update: nothing is compared
    two_updates = load_settings("quickstart", [model, "objective.num_iterations=2"])
    loading.load_model(two_updates, training=False)
    with pytest.raises(UserError, match=r"layers\.\d\.self_attn: dropout of 0\.25.*config\.json"):
        loading.load_model(two_updates)
    for name, value in {"sampler_correction": "token", "beta": 0.1, "replay": {}}.items():
        compared = load_settings("quickstart", {"model": str(folder), f"objective.{name}": value})
        with pytest.raises(UserError, match="dropout of 0"):
            loading.load_model(compared)


def test_an_adapter_of_a_model_with_more_tokens_is_refused(tmp_path):
    loaded = save_adapter(tmp_path)
    loaded.prompts.processor.save_pretrained(tmp_path)
    loading.load_model(LORA, tmp_path, training=False)
    loaded.prompts.processor.tokenizer.add_tokens(["<|new|>"])
    loaded.prompts.processor.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="was trained on another model than model=embedded is now"):
        loading.load_model(LORA, tmp_path, training=False)


@pytest.mark.parametrize("kind", ["model", "adapter"])
@pytest.mark.parametrize("damage", ["cut", "shape"])
def test_damaged_weights_are_one_message(kind, damage, folder):
    if kind == "adapter":
        save_adapter(folder)
    path = folder / ("model.safetensors" if kind == "model" else "adapter_model.safetensors")
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-100])
    else:
        weights = load_file(path)
        save_file({name: w.new_zeros(1) for name, w in weights.items()}, path, {"format": "pt"})
    with pytest.raises(UserError, match=rf"^{kind} \S+ cannot be loaded: "):
        loading.load_model(LORA, folder)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("adapter_config.json", {"r": "x"}),
        ("adapter_config.json", {"peft_type": "FOREIGN"}),
        ("adapter_config.json", {"target_modules": [3]}),
        ("config.json", 10_000 * "[" + 10_000 * "]"),
        ("config.json", {"text_config": 3}),
    ],
)
def test_a_config_of_wrong_values_is_one_message(file, content, folder):
    checkpoint, settings, path = None, LORA.model_copy(update={"model": str(folder)}), folder / file
    if file == "adapter_config.json":
        checkpoint, settings = folder, LORA
        save_adapter(folder)
    if isinstance(content, dict):
        content = json.dumps(json.loads(path.read_text()) | content)
    path.write_text(content)
    with pytest.raises(UserError, match=r"^(model|adapter) \S+ cannot be loaded: "):
        loading.load_model(settings, checkpoint, training=False)


def test_a_model_without_its_package_is_one_message(tmp_path, monkeypatch):
    model, processor = BUILDERS["smolvlm"]()
    model.config.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    monkeypatch.setattr(processing_smolvlm, "num2words", None)
    extra = r"\(or pip install 'vlm-grpo\[models\]'\)$"
    with pytest.raises(UserError, match=r"cannot be loaded: .*`pip install num2words`.*" + extra):
        loading.load_processor(load_settings("quickstart", [f"model={tmp_path}"]), model.config)
    message = import_utils.BACKENDS_MAPPING["timm"][1]
    monkeypatch.setitem(import_utils.BACKENDS_MAPPING, "timm", (lambda: False, message))
    with pytest.raises(UserError, match=r"(?s)fast_vlm cannot be built: TimmWrapper.*" + extra):
        loading.build_empty(hf.FastVlmConfig(), False)


@pytest.mark.parametrize("kind", ["diffusion_gemma", "pi0"])
def test_a_model_that_does_not_write_text_token_by_token_is_refused(kind, tmp_path):
    hf.CONFIG_MAPPING[kind]().save_pretrained(tmp_path)
    with pytest.raises(UserError, match=f"is a {kind} model, which does not write text"):
        loading.load_config(load_settings("quickstart", [f"model={tmp_path}"]))


def test_of_qwen_omni_the_thinker_is_loaded(tmp_path):
    thinker, processor = BUILDERS["qwen2_5_omni_thinker"]()
    config = hf.Qwen2_5OmniConfig(thinker_config=thinker.config.to_dict())
    config.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    thinker.save_pretrained(tmp_path / "saved")
    saved = load_file(tmp_path / "saved/model.safetensors")
    weights = {f"thinker.{name}": value for name, value in saved.items()}
    others = {"talker.codec_head.weight": torch.ones(2), "token2wav.x.weight": torch.ones(2)}
    save_file(weights | others, tmp_path / "model.safetensors", {"format": "pt"})
    settings = load_settings("quickstart", [f"model={tmp_path}", "policy.dtype=float32"])
    loaded = loading.load_model(settings, training=False).model
    assert loaded.config.model_type == "qwen2_5_omni_thinker"
    expected = dict(thinker.named_parameters())
    assert all(torch.equal(value, expected[name]) for name, value in loaded.named_parameters())


@pytest.mark.parametrize("name", ["paligemma", "internvl"])
def test_a_model_without_a_chat_template_has_the_prompt_of_its_processor(name, tmp_path):
    model, processor = BUILDERS[name]()
    processor.chat_template = None
    model.config.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    settings = load_settings("quickstart", [f"model={tmp_path}"])
    if name == "internvl":
        with pytest.raises(UserError, match="choose its instruction-tuned version"):
            loading.load_prompt_builder(settings)
        return
    builder = loading.load_prompt_builder(settings)
    example = noise_example("a", [(60, 40)] * 2, "cap en")
    prompt = builder.build(example, PlainQuestion())
    images = [[image.load() for image in example.images]]
    expected = processor(text=["cap en"], images=images)  # which adds <image> itself
    assert prompt.token_ids == tuple(expected["input_ids"][0])
    builder.save_processor(tmp_path / "saved")
    saved = hf.AutoProcessor.from_pretrained(tmp_path / "saved")
    assert saved.chat_template == builder.family.chat_template
    chat = Example("a", (), "cap en", None, history=(Turn("assistant", "Yes."),))
    with pytest.raises(UserError, match="its prompt is one text"):
        builder.write(chat, PlainQuestion())
    settings = load_settings("quickstart", [f"model={tmp_path}", "prompt.system=Be brief."])
    with pytest.raises(UserError, match=r"prompt\.system: .*its prompt is one text"):
        loading.load_prompt_builder(settings)


def test_the_largest_dropout_is_found_in_modules_and_attributes():
    assert loading.find_largest_dropout(torch.nn.Linear(1, 1)) == (0.0, "")
    layers = torch.nn.Sequential(torch.nn.Dropout(0.1), torch.nn.Dropout2d(0.2))
    assert loading.find_largest_dropout(layers) == (0.2, "1")
    attention = torch.nn.MultiheadAttention(2, 1, dropout=0.3)
    assert loading.find_largest_dropout(torch.nn.Sequential(attention)) == (0.3, "0")


def test_settings_override_the_processors_pixel_budget():
    def get_budget(images: Any, **pixels: int) -> PixelBudget | None:
        processor = SimpleNamespace(image_processor=images)
        return loading.get_pixel_budget(Family(), processor, PolicySettings(**pixels))

    edges = {"shortest_edge": 100, "longest_edge": 1000}
    images = Qwen2VLImageProcessor(size=edges)
    assert get_budget(images) == PixelBudget(100, 1000, 3584 * 28 * 28)
    clips = get_budget(images, max_pixels=500, max_video_pixels=900)
    assert clips == PixelBudget(100, 500, 900)
    with pytest.raises(UserError, match="at least 100 and at most 50 pixels; set both"):
        get_budget(images, max_pixels=50)
    # GLM-V counts each image as two frames.
    assert get_budget(Glm4vImageProcessor(size=edges)) == PixelBudget(50, 500, 3584 * 28 * 28)
    tiles = GotOcr2ImageProcessor(max_patches=4)
    assert get_budget(tiles) is None
    with pytest.raises(UserError, match=r"no effect on this model, .*no pixel budget: remove them"):
        get_budget(tiles, min_pixels=50)


# One process reads the weights; tests/dist/test_ranks.py shows that all have them.


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_without_values_has_the_same_weights_and_ties(tied, monkeypatch):
    model, _ = tiny_model("qwen3_vl")
    model.config.tie_word_embeddings = model.config.text_config.tie_word_embeddings = tied
    expected = type(model)(model.config)
    monkeypatch.setattr(loading.distributed, "get_rank", lambda: 1)
    news = [False, model.generation_config]
    monkeypatch.setattr(loading, "broadcast_object_list", lambda _: news)
    empty = loading.read_once(lambda: None, model.config, torch.float32, remote_code=False)
    assert list_tensors(empty) == list_tensors(expected)
    head, embeddings = empty.get_output_embeddings(), empty.get_input_embeddings()
    assert (head.weight is embeddings.weight) == tied
    assert empty.generation_config is model.generation_config
    assert not empty.training


def list_tensors(model: Any) -> list[tuple]:
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return [(name, t.shape, t.dtype, t.device, t.requires_grad) for name, t in tensors]
