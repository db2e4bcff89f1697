"""Tests of the embedded tiny VLM: it loads like a hub model and has its recorded accuracy."""

from __future__ import annotations

import copy
import json
import random
from dataclasses import replace
from importlib.resources import files as package_files
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import AutoModelForImageTextToText, AutoProcessor

from vlm_grpo.config.run import EMBEDDED_TASKS
from vlm_grpo.data_scripts import make_tiny_vlm
from vlm_grpo.data_scripts.make_shapes import PAIRS
from vlm_grpo.data_scripts.make_shapes import draw_examples as draw_shapes
from vlm_grpo.data_scripts.make_tiny_vlm import (
    BAND,
    MAKERS,
    OutOfBand,
    Schedule,
    VisionHeads,
    WarmUpSettings,
    build_prompts,
    build_tiny_vlm,
    compute_place_loss,
    draw_examples,
    draw_place_questions,
    encode_scenes,
    label_scene,
    load_embedded_task,
    measure_accuracy,
    step_back,
    supervised_loss,
    train,
    warm_up,
)
from vlm_grpo.data_scripts.tiny_vlm import build_model

FOLDER = Path(str(package_files("vlm_grpo") / "embedded" / "tiny-vlm"))


@pytest.fixture(scope="module")
def processor():
    return AutoProcessor.from_pretrained(FOLDER, local_files_only=True)


@pytest.fixture(scope="module")
def model():
    return AutoModelForImageTextToText.from_pretrained(FOLDER, local_files_only=True).eval()


@pytest.fixture(scope="module")
def report():
    return json.loads((FOLDER / "warmup.json").read_text())


def make_batch(name: str, count: int, seed: int = 99):
    task = load_embedded_task(name)
    return [(task, example) for example in draw_examples(name, count, seed, "embedded-test")]


def test_the_folder_is_small_and_holds_no_pickle():
    files = [path for path in FOLDER.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 6 * 2**20  # the wheel contains it
    assert {path.suffix for path in files} <= {".json", ".jinja", ".safetensors", ".md"}


def test_it_is_a_qwen2_5_vl(processor, model):
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


def test_the_prompt_has_qwens_chat_format(processor):
    inputs = build_prompts(processor, make_batch("counting", 1))
    text = processor.tokenizer.decode(inputs["input_ids"][0])
    image = "<|vision_start|>" + 9 * "<|image_pad|>" + "<|vision_end|>"  # 84 / 28 = 3, squared
    assert text.startswith(f"<|im_start|>user\n{image}How many ")
    assert text.endswith("are there?<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize("name", MAKERS)
def test_gold_answers_score_one_and_fit_and_texts_survive_the_tokenizer(processor, name):
    tokenizer = processor.tokenizer
    for task, example in make_batch(name, 20):
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
        for value in test["greedy"].values():
            assert BAND[0] <= value <= BAND[1]


@pytest.mark.parametrize("name", MAKERS)
def test_the_accuracy_matches_the_recorded_one(processor, model, report, name):
    examples = draw_examples(name, 64, 99, "embedded-test")
    task = load_embedded_task(name)
    recorded = report["tests"][0]["greedy"][name]
    # n = 64 at an accuracy near 1/2 has a standard error of 0.0625; three of them on either side.
    assert measure_accuracy(model, processor, task, examples) == pytest.approx(recorded, abs=0.19)


@pytest.mark.parametrize("name", MAKERS)
def test_samples_of_one_prompt_differ_in_reward(processor, model, name):
    torch.manual_seed(0)
    pairs = make_batch(name, 16)
    inputs = build_prompts(processor, pairs)
    rows = model.generate(
        **inputs, do_sample=True, top_k=0, num_return_sequences=8, max_new_tokens=40
    )
    texts = processor.batch_decode(
        rows[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True
    )
    spread = 0
    for row, (task, example) in enumerate(pairs):
        totals = {task.score(text, example).total for text in texts[8 * row : 8 * row + 8]}
        spread += len(totals) > 1
    assert spread >= 8, "GRPO learns only from groups whose rewards differ: most must"


NOTHING = Schedule(steps=0, peak=0.0)
BRIEF = WarmUpSettings(
    see=NOTHING, place=NOTHING, places=4, locate=NOTHING, tasks=NOTHING, held_out=4, test_size=4
)


@pytest.fixture
def short_answers(monkeypatch):
    """Untrained models never end an answer, all steps back are alike, and few images suffice."""
    monkeypatch.setattr(make_tiny_vlm, "MAX_ANSWER_TOKENS", 2)
    monkeypatch.setattr(make_tiny_vlm, "REMAINING", (0.5,))
    monkeypatch.setattr(make_tiny_vlm, "SEEN", dict.fromkeys(make_tiny_vlm.SEEN, 4))


@pytest.mark.usefixtures("short_answers")
def test_a_model_outside_of_the_band_is_not_written(tmp_path, monkeypatch, capsys):
    with pytest.raises(OutOfBand, match=r"ocr 0\.000 \(seed 1\)"):
        build_tiny_vlm(BRIEF, tmp_path / "tiny")
    monkeypatch.setattr(make_tiny_vlm, "build_tiny_vlm", build_too_good)
    assert make_tiny_vlm.main(["--out", str(tmp_path / "tiny")]) == 1
    assert "outside of 0.25 to 0.65: ocr 0.660 (seed 3)" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def build_too_good(settings, out):
    accuracies = {"ocr": 0.66, "counting": 0.25, "grounding": 0.65}
    make_tiny_vlm.check_band([{"seed": 3, "greedy": accuracies}], settings.band)


@pytest.mark.usefixtures("short_answers")
def test_a_short_warm_up_writes_a_folder_that_loads(tmp_path, monkeypatch):
    monkeypatch.setattr(make_tiny_vlm, "SHARES", dict.fromkeys(make_tiny_vlm.SHARES, 4))
    out, one = tmp_path / "tiny", Schedule(steps=1, peak=1e-3)
    settings = replace(BRIEF, seed=5, see=one, place=one, tasks=one, band=(0.0, 1.0))
    build_tiny_vlm(settings, out)
    report = json.loads((out / "warmup.json").read_text())
    assert report["settings"]["seed"] == 5
    assert report["seconds_per_step"].keys() == {"see", "place", "locate", "tasks"}
    AutoProcessor.from_pretrained(out, local_files_only=True)
    model = AutoModelForImageTextToText.from_pretrained(out, local_files_only=True)
    assert model.num_parameters() == report["parameters"]
    assert "| ocr |" in (out / "README.md").read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]


def test_questions_for_places_have_the_loss_of_their_answers(processor, model):
    scenes = draw_shapes("scattered", 3, 0, "places")
    numbers, questions = draw_place_questions(scenes, 6, random.Random(0))
    reader = load_embedded_task("ocr")  # its answers are texts
    features = encode_scenes(model, processor, scenes)[numbers]
    with torch.no_grad():
        found = compute_place_loss(model, processor, features, questions)
        expected = supervised_loss(model, processor, [(reader, row) for row in questions])
        wrong = compute_place_loss(model, processor, features.flip(0), questions)
    assert found.item() == pytest.approx(expected.item(), rel=0.01)  # bfloat16
    assert wrong.item() != pytest.approx(expected.item(), rel=0.01)


@pytest.mark.usefixtures("short_answers")
@pytest.mark.parametrize("part", ["see", "place", "tasks"])
def test_the_vision_tower_learns_in_its_lesson_only(processor, monkeypatch, part):
    monkeypatch.setattr(make_tiny_vlm, "SHARES", {"ocr": 4})
    model = build_model(processor, 0)
    weights = next(model.model.visual.parameters()), next(model.model.language_model.parameters())
    starts = [weight.detach().clone() for weight in weights]
    settings = replace(BRIEF, **{part: Schedule(steps=1, peak=1e-2, warmup=0)})
    warm_up(model, processor, {"ocr": load_embedded_task("ocr")}, settings)
    moved = [not torch.equal(*pair) for pair in zip(weights, starts, strict=True)]
    assert moved == [part == "see", part != "see"]


@pytest.mark.usefixtures("short_answers")
def test_places_have_the_features_of_their_scenes_and_grounding_comes_alone(processor, monkeypatch):
    model, seen, taught = build_model(processor, 0), [], []
    weight = model.lm_head.weight

    def compare_features(model, processor, features, questions):
        expected = encode_scenes(model, processor, questions)
        seen.append((features - expected).abs().max().item() < 0.05 * expected.std().item())
        return weight.sum()

    def record_tasks(model, processor, batch):
        taught.append([task.primary_metric for task, _ in batch])
        return weight.sum()

    monkeypatch.setattr(make_tiny_vlm, "compute_place_loss", compare_features)
    monkeypatch.setattr(make_tiny_vlm, "supervised_loss", record_tasks)
    one = Schedule(steps=1, peak=1e-3, warmup=0)
    tasks = {name: load_embedded_task(name) for name in MAKERS}
    warm_up(model, processor, tasks, replace(BRIEF, places=20, place=one, locate=one, tasks=one))
    assert seen == [True, True]
    assert taught == [["accuracy_50"] * 96, ["exact"] * 64, ["exact"] * 64, ["accuracy_50"] * 64]


def test_the_step_back_ends_where_all_accuracies_are_nearest_to_the_middle(
    model, processor, monkeypatch
):
    """A model whose accuracy is the share of the way, or its square."""
    model = copy.deepcopy(model)
    weight = model.lm_head.weight.detach()
    before = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
    after = weight[0, 0].item()

    def measure(model, processor, task, examples):
        share = model.lm_head.weight[0, 0].item() / after
        return share ** (2 if task.primary_metric == "accuracy_50" else 1)

    monkeypatch.setattr(make_tiny_vlm, "measure_accuracy", measure)
    tasks = {name: load_embedded_task(name) for name in ("ocr", "grounding")}
    result = step_back(model, processor, before, tasks, replace(BRIEF, band=(0.25, 0.65)))
    assert result["remaining"] == 0.575  # 0.575 and 0.331: 0.125 and 0.119 from 0.45
    assert weight[0, 0].item() == pytest.approx(0.575 * after)
    assert result["accuracies"][1.0] == pytest.approx({"ocr": 1.0, "grounding": 1.0})


def test_a_folder_in_use_is_an_error_before_any_training(tmp_path, capsys):
    (tmp_path / "mine.txt").write_text("keep")
    assert make_tiny_vlm.main(["--out", str(tmp_path)]) == 1
    assert "not an empty folder" in capsys.readouterr().err


def test_heads_that_are_right_have_no_loss_and_each_wrong_one_has():
    scenes = draw_shapes("crowded", 2, 0, "lessons")
    labels = [label_scene(scene.meta["shapes"]) for scene in scenes]
    names, boxes, counts = (torch.cat(part) for part in zip(*labels, strict=True))
    assert counts.sum() == sum(len(scene.meta["shapes"]) for scene in scenes)
    heads = VisionHeads(18)  # a token's features are the one-hot number of its place
    tokens = torch.eye(18).view(2, 9, 18)
    right = {
        "names": 50 * functional.one_hot(names, 1 + len(PAIRS)).float(),
        "boxes": boxes,
        "counts": counts,
    }
    for name, values in right.items():
        head = getattr(heads, name)
        head.weight.data, head.bias.data = values.flatten(1).T, torch.zeros_like(head.bias)
    assert heads.compute_scene_loss(tokens, scenes).item() == pytest.approx(0, abs=1e-6)
    for name in right:
        getattr(heads, name).bias.data[-1] += 100  # a wrong name, box or count
        assert heads.compute_scene_loss(tokens, scenes).item() > 0.1
        getattr(heads, name).bias.data[-1] -= 100


def test_questions_ask_for_the_cells_of_one_shape_or_of_all():
    scenes = draw_shapes("scattered", 40, 0, "places")
    numbers, questions = draw_place_questions(scenes, 60, random.Random(0))
    assert [example.id for example in questions] == [scenes[number].id for number in numbers]
    assert len(set(numbers)) > 20
    orders = set()
    for number, example in enumerate(questions):
        boxes = {f"{s['color']} {s['kind']}": s["box"] for s in example.meta["shapes"]}
        cells = {
            name: str((y1 + y2) // 2 // 28 * 3 + (x1 + x2) // 2 // 28 + 1)
            for name, (x1, y1, x2, y2) in boxes.items()
        }
        if number % 2 == 0:
            name = example.question.removeprefix("Where is the ").removesuffix("?")
            assert example.answer == cells[name]
        else:
            names = example.question.removeprefix("Where are ").removesuffix("?").split(", ")
            assert sorted(names) == sorted(cells)
            assert example.answer == "; ".join(f"{name} {cells[name]}" for name in names)
        orders.add(number % 2 == 0 and name == next(iter(cells)))
    assert orders == {True, False}  # not always the first shape


def test_training_draws_new_examples_and_its_rate_rises_to_the_peak_and_falls_to_zero():
    weight, splits, values = nn.Parameter(torch.tensor(100.0)), [], []

    def compute_loss(split):
        assert weight.grad is None  # no gradient is carried from one step into the next
        splits.append(split)
        values.append(weight.item())
        return weight.sum()

    train([weight], Schedule(steps=20, peak=0.1, warmup=5, stable=3), compute_loss, "sum")
    assert splits == [f"warmup-sum-{step}" for step in range(20)]
    values.append(weight.item())
    # Under a constant gradient AdamW moves by the rate, and decays the weight by 0.01 of it.
    rates = [(b - a) / (1 + 0.01 * b) for a, b in zip(values[1:], values, strict=False)]
    assert rates[:9] == pytest.approx([0.0, 0.02, 0.04, 0.06, 0.08, 0.1, 0.1, 0.1, 0.1], abs=1e-4)
    assert rates[8:] == sorted(rates[8:], reverse=True)
    assert 0 < rates[-1] < 0.005
