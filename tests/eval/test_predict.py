"""Predictions: the output, the parsed answer and the picture."""

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_model import ChatModel, serve
from dataset_files import write_rows
from family_policies import build_family_policy
from PIL import Image
from video_files import level, make_video

from vlm_grpo import Example, UserError, load_policy, load_settings, load_task
from vlm_grpo.data.images import Clip
from vlm_grpo.data.loading import load_examples
from vlm_grpo.eval.evaluate import evaluate_model
from vlm_grpo.eval.models import LocalModel
from vlm_grpo.eval.predict import Prediction, Predictor, predict
from vlm_grpo.eval.scored import Row
from vlm_grpo.media.videos import decode_frames
from vlm_grpo.task.scorer import RewardScorer
from vlm_grpo.tasks.counting import Counting


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def load_example(name: str) -> Example:
    """Return the first held-out example of an embedded task; write its image to ``NAME.png``."""
    settings = load_settings(name, ["data.eval_limit=1"])
    task = load_task(name)
    (example,) = load_examples(f"embedded:{name}", task, settings.data, "eval")
    example.images[0].load().save(f"{name}.png")
    return example


def predict_embedded(name: str, **options: Any) -> Prediction:
    example = load_example(name)
    return predict("embedded", f"{name}.png", example.question, **options)


def evaluate(name: str, example: Example) -> Row:
    """Return the row of an example in an evaluation; the recipes compute in float32."""
    settings = load_settings(name)
    policy = load_policy(settings, training=False)
    task, model = load_task(name, frame=policy.prompts.frame), LocalModel(policy, settings)
    (row,) = evaluate_model(model, task, [example], RewardScorer()).rows
    return row


@pytest.mark.parametrize("name", ["counting", "grounding", "ocr"])
def test_a_prediction_equals_the_evaluation_of_the_example(name):
    prediction = predict_embedded(name, task=name, overrides=("policy.dtype=float32",))
    row = evaluate(name, load_example(name))
    assert prediction.completion.text == row["output"]
    assert prediction.answer == row["answer"]


def test_what_is_not_an_image_or_a_question_is_named_before_the_model_is_loaded():
    predictor = Predictor("embedded", "counting", ["data.video.max_frames=2"])
    wrong: tuple[Any, ...] = (None, np.zeros((9, 9, 3)), io.BytesIO())
    message = "^an image must be a path, encoded bytes or a PIL"
    for given in wrong:
        for images in (given, [given]):
            with pytest.raises(UserError, match=message):
                predictor(images, "How many?")
        with pytest.raises(UserError, match=r"^question must be text, not "):
            predictor(Image.new("RGB", (64, 64)), given)
    Path("a.mp4").write_bytes(make_video())
    Path("cut.mp4").write_bytes(make_video()[:300])
    Path("empty").mkdir()
    for clip, question, message in (
        ("gone.mp4", "?", r"^video .*gone\.mp4 is missing in"),
        ("cut.mp4", "?", r"^video .*cut\.mp4 cannot be read: it is corrupt or no video"),
        ("empty", "?", r"^video .*empty has 0 frames; it must have at least 2"),
        ("a.mp4", "<image>?", "^the question cannot be used: it has 1 <image> in its turns and 0"),
    ):
        with pytest.raises(UserError, match=message):
            predictor([clip], question)
    assert "model" not in vars(predictor)


def test_a_parser_that_raises_is_named():
    class Bad(Counting):
        def parse(self, text: str, example: Example) -> int:
            raise KeyError("oops")

    with pytest.raises(UserError, match=r"parser failed on .*KeyError\('oops'\)"):
        predict_embedded("counting", task=Bad())


def test_the_class_of_the_run_is_used_with_the_options_of_the_run():
    Path("config.json").write_text("{}")
    values = "task: counting\ntask_options: {tags: true, length_budget: 9}\ndata: {train: a}\n"
    Path("config.yaml").write_text(values)

    def options(task: Any) -> tuple[bool, int]:
        loaded = vars(Predictor(".", task))["_task"]
        return loaded.tags, loaded.length_budget

    assert options(None) == options("counting") == options(Counting) == (True, 9)
    assert options("ocr")[0] is True  # every task has it
    assert options(Counting()) == (False, Counting().length_budget)  # an object has its own


def test_a_prediction_uses_the_task_and_pixel_budget_of_the_run(finished):
    example = load_example("counting")
    prediction = predict(finished, Path("counting.png"), example.question)
    assert prediction.has_task
    # The image has 84 x 84 pixels; the pixel budget of the run allows 56 x 56.
    assert prediction.resized_sizes == ((56, 56),)


def write_clip() -> tuple[Example, list[Path]]:
    """Write a clip as a file, as a folder of frames and as a row of a dataset; return its row."""
    Path("a.mp4").write_bytes(make_video(count=4, size=(56, 56), fps=2))
    frames = decode_frames(Path("a.mp4"), [0, 0.5, 1, 1.5], (56, 56))
    Path("frames").mkdir()
    for number, frame in enumerate(frames):
        frame.save(f"frames/{number}.png")
    row = {"question": "How many?", "answer": 1, "videos": ["a.mp4"]}
    (example,) = load_examples(write_rows(Path.cwd(), row), load_task("counting"))
    return example, [Path("a.mp4"), Path("frames")]


def test_a_prediction_on_a_clip_equals_the_evaluation_of_the_row_if_the_family_has_videos():
    example, paths = write_clip()
    output = evaluate("counting", example)["output"]
    predictor = Predictor("embedded", "counting", ["policy.dtype=float32"])
    frames = [Image.open(path) for path in sorted(paths[1].iterdir())]
    given = (*paths, Clip(paths[0].read_bytes()), Clip("a.mp4"), Clip({"frames": frames, "fps": 2}))
    for clip in given:
        for question in ("How many?", "<video>How many?"):
            prediction: Any = predictor(clip, question)
            assert prediction.text == output
            assert prediction.resized_sizes == ((56, 56),)
            # the strip of four frames, and the output below it
            assert prediction.picture.width == 4 * 56
    predictor.model = LocalModel(build_family_policy("internvl"), predictor.settings)
    with pytest.raises(UserError, match="example question: it has a video, which only Qwen2-VL"):
        predictor(paths[0], "How many?")


@pytest.mark.parametrize("model", ["none", "embedded"])
def test_a_model_behind_an_address_gets_clips_and_images_in_their_order(model):
    _, paths = write_clip()
    image = Image.new("RGB", (56, 28), "red")
    chat = ChatModel(lambda text, image: "3")
    with serve(chat) as server:
        for path in paths:
            question = "<video> before <image>?"
            prediction = predict(model, [image, path], question, "counting", (), server.address)
            assert prediction.answer == 3
    contents = [body["messages"][-1]["content"] for body in chat.bodies]
    kinds = ["video_url", "text", "image_url", "text"]
    assert [[part["type"] for part in parts] for parts in contents] == [kinds, kinds]
    file, frames = (parts[0]["video_url"]["url"] for parts in contents)
    kind, _, data = file.partition(",")
    assert (kind, base64.b64decode(data)) == ("data:video/mp4;base64", paths[0].read_bytes())
    kind, *encoded = frames.split(",")
    assert kind == "data:video/jpeg;base64"
    # encoded without loss
    assert [level(Image.open(io.BytesIO(base64.b64decode(d)))) for d in encoded] == [0, 1, 2, 3]
