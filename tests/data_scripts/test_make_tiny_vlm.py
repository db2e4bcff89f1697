"""Tests of the embedded tiny VLM: it loads like a hub model and has its recorded accuracy."""

import json
from dataclasses import replace
from importlib.resources import files as package_files
from pathlib import Path

import pytest
import torch
from torch.nn import functional
from transformers import AutoModelForImageTextToText, AutoProcessor

from vlm_grpo.config.run import EMBEDDED_TASKS
from vlm_grpo.data_scripts import make_shapes, make_tiny_vlm
from vlm_grpo.data_scripts.make_tiny_vlm import MAKERS, Schedule, draw_examples, load_embedded_task
from vlm_grpo.data_scripts.make_tool_vlm import build_tool_vlm

FOLDER = Path(str(package_files("vlm_grpo") / "embedded" / "tiny-vlm"))
NOTHING = dict.fromkeys(("see", "place", "locate", "tasks"), Schedule(steps=0, peak=0.0))
BRIEF = make_tiny_vlm.WarmUpSettings(**NOTHING, places=4, held_out=4, test_size=4)


@pytest.fixture(scope="module")
def processor():
    return AutoProcessor.from_pretrained(FOLDER, local_files_only=True)


@pytest.fixture(scope="module")
def model():
    return AutoModelForImageTextToText.from_pretrained(FOLDER, local_files_only=True).eval()


@pytest.fixture(scope="module")
def report():
    return json.loads((FOLDER / "warmup.json").read_text())


def test_it_is_a_qwen2_5_vl_in_a_small_folder_without_a_pickle(processor, model):
    files = [path for path in FOLDER.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 6 * 2**20  # the wheel contains it
    assert {path.suffix for path in files} <= {".json", ".jinja", ".safetensors", ".md"}
    assert model.config.model_type == "qwen2_5_vl"
    assert type(processor).__name__ == "Qwen2_5_VLProcessor"
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    # All places where a trainer may look up the end-of-sequence token agree.
    end = processor.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert processor.tokenizer.eos_token_id == end
    assert model.generation_config.eos_token_id == end
    assert model.config.text_config.eos_token_id == end
    assert processor.tokenizer.pad_token_id == model.generation_config.pad_token_id != end
    assert model.config.image_token_id == processor.image_token_id


@pytest.mark.parametrize("name", MAKERS)
def test_gold_answers_score_one_and_fit_and_texts_survive_the_tokenizer(processor, name):
    tokenizer, task = processor.tokenizer, load_embedded_task(name)
    for example in draw_examples(name, 20, 99, "embedded-test"):
        task.check(example)
        gold = task.gold(example)
        score = task.score(gold, example)
        assert {**score.rewards, **score.metrics}[task.primary_metric] == 1.0
        assert len(tokenizer(gold + "<|im_end|>")["input_ids"]) <= make_tiny_vlm.MAX_ANSWER_TOKENS
        for text in (task.prompt(example), gold, "Zoë ≤ 3"):
            assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.tokenize("84") == ["8", "4"]


def test_recorded_accuracies_are_in_the_band(report):
    assert sorted(MAKERS) == list(EMBEDDED_TASKS)
    assert len(report["tests"]) == 2
    for test in report["tests"]:
        assert test["examples_per_task"] == 500  # ± 4.4 points at 95 %
        assert set(test["greedy"]) == set(MAKERS)
        make_tiny_vlm.check_band([test], make_tiny_vlm.BAND)


@pytest.mark.parametrize("name", MAKERS)
def test_the_accuracy_matches_the_recorded_one(processor, model, report, name):
    examples = draw_examples(name, 64, 99, "embedded-test")
    task = load_embedded_task(name)
    recorded = report["tests"][0]["greedy"][name]
    # n = 64 at an accuracy near 1/2 has a standard error of 0.0625; three of them on either side.
    found = make_tiny_vlm.measure_accuracy(model, processor, task, examples)
    assert found == pytest.approx(recorded, abs=0.19)


@pytest.fixture
def short_answers(monkeypatch):
    """Untrained models never end an answer, all steps back are alike, and few images suffice."""
    monkeypatch.setattr(make_tiny_vlm, "MAX_ANSWER_TOKENS", 2)
    monkeypatch.setattr(make_tiny_vlm, "REMAINING", (0.5,))
    monkeypatch.setattr(make_tiny_vlm, "SEEN", dict.fromkeys(make_tiny_vlm.SEEN, 4))


@pytest.mark.usefixtures("short_answers")
def test_a_model_outside_of_the_band_is_not_written(tmp_path, monkeypatch, capsys):
    with pytest.raises(make_tiny_vlm.OutOfBand, match=r"ocr 0\.000 \(seed 1\)"):
        make_tiny_vlm.build_tiny_vlm(BRIEF, tmp_path / "tiny")
    tests = [{"seed": 3, "greedy": {"ocr": 0.66, "counting": 0.25, "grounding": 0.65}}]
    check = make_tiny_vlm.check_band
    monkeypatch.setattr(make_tiny_vlm, "build_tiny_vlm", lambda run, _: check(tests, run.band))
    assert make_tiny_vlm.main(["--out", str(tmp_path / "tiny")]) == 1
    assert "outside of 0.25 to 0.65: ocr 0.660 (seed 3)" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("short_answers")
def test_a_short_warm_up_writes_a_folder_that_loads(tmp_path, monkeypatch):
    monkeypatch.setattr(make_tiny_vlm, "SHARES", dict.fromkeys(make_tiny_vlm.SHARES, 4))
    out, one = tmp_path / "tiny", Schedule(steps=1, peak=1e-3)
    settings = replace(BRIEF, seed=5, see=one, place=one, tasks=one, band=(0.0, 1.0))
    make_tiny_vlm.build_tiny_vlm(settings, out)
    report = json.loads((out / "warmup.json").read_text())
    assert report["settings"]["seed"] == 5
    assert report["seconds_per_step"].keys() == {"see", "place", "locate", "tasks"}
    AutoProcessor.from_pretrained(out, local_files_only=True)
    model = AutoModelForImageTextToText.from_pretrained(out, local_files_only=True)
    assert model.num_parameters() == report["parameters"]
    assert "| ocr |" in (out / "README.md").read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]


def test_heads_that_are_right_have_no_loss_and_each_wrong_one_has():
    scenes = make_shapes.draw_examples("crowded", 2, 0, "lessons")
    labels = [make_tiny_vlm.label_scene(scene.meta["shapes"]) for scene in scenes]
    names, boxes, counts = (torch.cat(part) for part in zip(*labels, strict=True))
    assert counts.sum() == sum(len(scene.meta["shapes"]) for scene in scenes)
    # A token's features are the one-hot number of its place.
    heads, tokens = make_tiny_vlm.VisionHeads(18), torch.eye(18).view(2, 9, 18)
    right = {"names": 50.0 * functional.one_hot(names, 1 + len(make_shapes.PAIRS)), "boxes": boxes}
    right["counts"] = counts
    for name, values in right.items():
        head = getattr(heads, name)
        head.weight.data, head.bias.data = values.flatten(1).T, torch.zeros_like(head.bias)
    assert heads.compute_scene_loss(tokens, scenes).item() == pytest.approx(0, abs=1e-6)
    for name in right:
        getattr(heads, name).bias.data[-1] += 100  # a wrong name, box or count
        assert heads.compute_scene_loss(tokens, scenes).item() > 0.1
        getattr(heads, name).bias.data[-1] -= 100


def test_the_sibling_for_tools_writes_short_calls_and_else_as_the_model(tmp_path, processor, model):
    build_tool_vlm(["tiny_words", "maze"], tmp_path / "tools")
    sibling = AutoModelForImageTextToText.from_pretrained(tmp_path / "tools")
    tokenizer = AutoProcessor.from_pretrained(tmp_path / "tools").tokenizer
    move = '<tool_call>\n{"name": "move", "arguments": {"direction": "up"}}\n</tool_call>'
    zoom = '<tool_call>\n{"name": "zoom", "arguments": {"bbox_2d": [0, 9, 28, 19]}}\n</tool_call>'
    for text, most in ((move, 3), (move.replace("up", "left"), 3), (zoom, 15)):
        tokens = tokenizer(text)["input_ids"]
        assert tokenizer.decode(tokens) == text
        assert len(tokens) <= most
    ids = processor.tokenizer("What does the text say?", return_tensors="pt")["input_ids"]
    assert torch.equal(tokenizer("What does the text say?", return_tensors="pt")["input_ids"], ids)
    with torch.no_grad():
        logits, before = sibling(input_ids=ids).logits, model(input_ids=ids).logits
    assert torch.allclose(logits[..., : before.shape[-1]], before, atol=1e-5)  # other sums
