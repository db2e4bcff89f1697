"""Evaluation of a model behind an address: the same files, resumed, and honest about failures."""

import itertools
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from chat_model import Answer, ChatModel, count_by_checksum, get_images, serve
from commands import run
from judge_server import Reply

from vlm_grpo import Settings, UserError, evaluate, load_settings, load_task
from vlm_grpo.data.loading import load_examples
from vlm_grpo.eval.benchmark import evaluate_benchmark
from vlm_grpo.eval.models import load_evaluated_model
from vlm_grpo.eval.scored import Scored
from vlm_grpo.model.loading import load_prompt_builder
from vlm_grpo.serve.chat_client import Endpoint
from vlm_grpo.task.coordinates import FRAMES
from vlm_grpo.types import Example, ImageRef

COUNT = 40
ENDED = rf"for {COUNT} examples; after {{}} failures it was asked no more:\n  - example .*"
DEFINITION = "title: Shapes\ntask: counting\nmetric: exact\n"


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vlm_grpo.utils.http_json.FIRST_WAIT", 0.0)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def make_settings(tmp_path: Path, *overrides: str, name: str = "run") -> Settings:
    given = [f"data.eval_limit={COUNT}", "model=none", f"output_dir={tmp_path}", f"name={name}"]
    return load_settings("counting", [*given, *overrides])


def ask(model: ChatModel, settings: Settings, **endpoint: Any) -> Scored:
    """Evaluate a model behind an address."""
    with serve(model) as server:
        return evaluate(settings, None, Endpoint(server.address, **endpoint))


def load_counting(settings: Settings) -> list[Example]:
    return [*load_examples("embedded:counting", load_task("counting"), settings.data, "eval")]


def read_outputs(path: Path) -> list[tuple[str, str]]:
    return [(row["id"], row["output"]) for row in map(json.loads, path.read_text().splitlines())]


def read_folder(settings: Settings) -> list[tuple[str, str]]:
    folder = settings.run_dir / "evaluation/served-policy"
    return [row for path in folder.glob("predictions*.jsonl") for row in read_outputs(path)]


def test_outputs_are_in_the_order_of_the_examples_and_asked_several_at_once(tmp_path):
    settings = make_settings(tmp_path)
    model = ChatModel(seconds=0.02)
    found = ask(model, settings, concurrency=5)
    examples, task = load_counting(settings), load_task("counting")
    expected = [(e.id, count_by_checksum(task.prompt(e), e.images[0].load())) for e in examples]
    assert model.most == 5
    path = settings.run_dir / "evaluation" / "served-policy.jsonl"
    assert (found.path, read_outputs(path)) == (path, expected)
    assert read_folder(settings) == expected
    golds = [str(example.answer) for example in examples]
    correct = [gold == text for gold, (_, text) in zip(golds, expected, strict=True)]
    assert found.value == sum(correct) / COUNT


def test_a_benchmark_has_the_files_of_a_local_evaluation_and_of_one_model(tmp_path):
    definition = tmp_path / "shapes.yaml"
    definition.write_text(DEFINITION)
    settings = make_settings(tmp_path)
    with serve(ChatModel(models=("a", "b"))) as server:
        first, second = (Endpoint(server.address, name) for name in "ab")
        (report,) = evaluate_benchmark(str(definition), settings, server=first)
        with pytest.raises(UserError, match="served_model was 'a' and is now 'b'"):
            evaluate_benchmark(str(definition), settings, server=second)
    rows = (settings.run_dir / "model" / "predictions.jsonl").read_text().splitlines()
    assert [*json.loads(rows[0])] == ["id", "output", "seen"]
    assert json.loads(rows[0])["seen"] == [list(load_counting(settings)[0].images[0].size)]
    results = json.loads((settings.run_dir / "results.json").read_text())
    assert results["model"]["value"] == report.value


@pytest.mark.parametrize("rows", ["recipe", "benchmark"])
def test_outputs_that_differ_from_those_of_the_weights_here_are_printed(tmp_path, capsys, rows):
    settings = make_settings(tmp_path, "model=embedded", "policy.dtype=float32", name="before")
    (tmp_path / "shapes.yaml").write_text(DEFINITION)
    local, golds = evaluate(settings), [str(e.answer) for e in load_counting(settings)]
    texts = [row["output"] for row in local.rows]
    right = [i for i, (text, gold) in enumerate(zip(texts, golds, strict=True)) if text == gold]
    texts[right[0]] += "7"  # another number
    texts[right[1]] = f" {texts[right[1]]} "  # the same one
    replies = iter(texts)
    given = ["counting"]
    if rows == "benchmark":
        given = [tmp_path / "shapes.yaml", "--data", "embedded:counting"]
    given += ["model=embedded", f"output_dir={tmp_path}", "name=run", "policy.dtype=float32"]
    given.append(f"data.eval_limit={COUNT}")
    with serve(ChatModel(lambda text, image: next(replies))) as server:
        options = ["--server", server.address, "--compare", "--concurrency", "1"]
        status, out, _ = run(capsys, "evaluate", *given, *options)
    ids = [local.rows[i]["id"] for i in right[:2]]
    assert status == 0
    assert out.splitlines()[-7:] == [
        f"2 of {COUNT} outputs differ ({2 / COUNT:.1%}), 1 with another score",
        f"  {ids[0]}: equal up to character 1, another score",
        f"    here    {golds[right[0]]!r}",
        f"    server  {texts[right[0]]!r}",
        f"  {ids[1]}: equal up to character 0",
        f"    here    {golds[right[1]]!r}",
        f"    server  {texts[right[1]]!r}",
    ]


def test_only_examples_without_an_output_are_asked_again(tmp_path, capsys):
    settings = make_settings(tmp_path)
    prompts = [load_task("counting").prompt(example) for example in load_counting(settings)]
    failing = [text for text in prompts if "circles" in text]
    refusal = Reply(status=400, body=b"maximum context length is 512 tokens")
    model = ChatModel(fail=lambda text, earlier: refusal if "circles" in text else None)
    message = (
        rf"no output for {len(failing)} examples:\n  - example .*context length is 512 tokens\n"
        rf"    {len(failing) - 1} more like it: .*\n.*lower policy.max_pixels"
    )
    with pytest.raises(UserError, match=message):
        ask(model, settings)
    assert 0 < len(failing) < COUNT
    assert len(read_folder(settings)) == COUNT - len(failing)
    assert not (settings.run_dir / "evaluation" / "served-policy.jsonl").exists()
    model = ChatModel()
    with serve(model) as server:
        resumed = evaluate(settings, None, server.address)  # at another port
        assert sorted(model.questions) == sorted(failing)
        assert f"resuming after {COUNT - len(failing)} of {COUNT}" in capsys.readouterr().err
        whole = evaluate(make_settings(tmp_path, name="whole"), None, server.address)
        assert evaluate(settings, None, server.address).rows == whole.rows
    assert resumed.rows == whole.rows
    assert len(model.bodies) == len(failing) + COUNT  # a finished evaluation asks for nothing


def test_each_sample_is_asked_for_with_a_seed_of_its_own(tmp_path):
    given = ["evaluation.temperature=1", "data.eval_limit=3"]
    turns = itertools.count()
    once, several = ChatModel(), ChatModel(answer=lambda text, image: str(next(turns)))
    ask(once, make_settings(tmp_path, *given), concurrency=1)
    settings = make_settings(tmp_path, *given, "evaluation.samples=2", name="several")
    found = ask(several, settings, concurrency=1)
    assert ask(several, settings).rows == found.rows  # nothing is asked
    seeds = [body["seed"] for body in several.bodies]
    assert seeds[::2] == [body["seed"] for body in once.bodies]
    assert len({*seeds}) == 6
    outputs = [sample["output"] for row in found.rows for sample in row.get("samples", [])]
    assert outputs == [*"012345"]


def test_a_server_without_answers_is_asked_no_more(tmp_path):
    for status, concurrency, message, most in (
        (503, 4, f"{ENDED.format(4)}503.*the reason", 2 * (4 + 4)),  # each is asked twice
        (503, 1, f"{ENDED.format(2)}503.*the reason", 2 * (2 + 1)),
        (500, 1, f"{ENDED.format(8)}500.*the reason", 2 * (8 + 1)),
        (400, 1, f"{ENDED.format(8)}400.*the reason", 9),
        (401, 1, "asks for an API key", 2),
    ):
        model = ChatModel(fail=lambda *_, status=status: Reply(status=status, body=b"the reason"))
        with pytest.raises(UserError, match=message):
            ask(model, make_settings(tmp_path), concurrency=concurrency, retries=1)
        assert len(model.bodies) <= most


def test_failures_and_refused_prompts_between_answers_do_not_end_the_evaluation(tmp_path):
    turns = itertools.cycle((None, Reply(status=500)))
    model = ChatModel(fail=lambda text, earlier: next(turns))
    with pytest.raises(UserError, match=f"for {COUNT // 2} examples:\n"):
        ask(model, make_settings(tmp_path, name="failures"), concurrency=1, retries=0)
    assert len(model.bodies) == COUNT
    settings, refusal = make_settings(tmp_path), Reply(status=400, body=b"too long")
    first = iter([None])
    model = ChatModel(fail=lambda text, earlier: next(first, refusal))
    # The second time, the server has answered before.
    for asked in (COUNT, 2 * COUNT - 1):
        with pytest.raises(UserError, match=f"no output for {COUNT - 1} examples:\n"):
            ask(model, settings, concurrency=1)
        assert len(model.bodies) == asked


def test_tokens_are_summed(tmp_path, capsys):
    asked = r"asking policy at http://127\S+, 16 requests at once: images in their "
    for number, tokens in (
        (100, "4,000 prompt and 80 completion tokens"),  # 40 examples of 100 and 2
        (None, "no numbers of tokens, which the server does not report"),
    ):
        ask(ChatModel(prompt_tokens=number), make_settings(tmp_path, name=f"run-{number}"))
        err = capsys.readouterr().err
        assert re.search(asked, err)
        assert f"40 answers: {tokens}\n" in err


def test_the_key_is_in_no_output_and_no_file(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    settings = make_settings(tmp_path)
    failure = Reply(status=500, body=b"Bearer sk-secret is over its quota")
    model = ChatModel(fail=lambda text, earlier: failure if "circles" in text else None)
    with pytest.raises(UserError, match="Bearer … is over its quota") as caught:
        ask(model, settings, retries=0)
    ask(ChatModel(), settings)
    out, err = capsys.readouterr()
    files = [path.read_text() for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) >= 3
    assert [text for text in (out, err, str(caught.value), *files) if "sk-secret" in text] == []


def ask_once(
    settings: Settings, answer: Answer = count_by_checksum, prompt_tokens: int = 100
) -> tuple[ImageRef, dict[str, Any], str]:
    """Return the image of an example as it is resized, its request, and the text of its answer."""
    model, (example, *_) = ChatModel(answer, prompt_tokens=prompt_tokens), load_counting(settings)
    with serve(model) as server:
        evaluated = load_evaluated_model(settings, None, server.address)
        task = load_task("counting", frame=evaluated.prompts.frame)
        resized = evaluated.prompts.with_resized_sizes(example)
        ((_, (completion,)),) = evaluated.generate(task, [(resized, None)], [(0, "x")], [range(1)])
    return resized.images[0], model.bodies[0], completion.text


def test_a_model_of_any_kind_gets_an_image_of_the_original_ratio_and_what_is_set(tmp_path):
    settings = make_settings(tmp_path, "rollout.stop=['!']")
    image, body, _ = ask_once(settings)
    assert sorted(body) == ["max_tokens", "messages", "model", "stop", "temperature"]
    assert (body["temperature"], body["stop"]) == (0.0, ["!"])
    assert body["max_tokens"] == settings.rollout.max_completion_length
    assert [shown.size for shown in get_images(body)] == [image.size]
    image, body, _ = ask_once(make_settings(tmp_path, "policy.max_pixels=1000"))
    width, height = image.resized_size
    assert [shown.size for shown in get_images(body)] == [(width, height)]
    assert 900 < width * height <= 1000
    assert width / height == pytest.approx(image.size[0] / image.size[1], 0.1)
    given = ["evaluation.temperature=0.7", "prompt.thinking=false", "rollout.min_new_tokens=2"]
    settings = make_settings(tmp_path, *given, "prompt.system=Count.")
    _, body, _ = ask_once(settings)
    assert body["messages"][0] == {"role": "system", "content": "Count."}
    # The name in the template of an unknown model is not known.
    assert body["chat_template_kwargs"] == {"enable_thinking": False, "thinking": False}
    assert (body["temperature"], body["min_tokens"]) == (0.7, 2)
    assert 0 <= body["seed"] < 2**31
    assert ask_once(settings)[1] == body


def test_a_known_model_gets_its_resized_image_and_gives_the_text_of_a_policy(tmp_path, caplog):
    limit = "policy.max_pixels=5000"
    settings = make_settings(tmp_path, "model=embedded", limit, "rollout.stop=['!']")
    builder = load_prompt_builder(settings)
    example = builder.with_resized_sizes(load_counting(settings)[0])
    count = len(builder.build(example, load_task("counting", frame=builder.frame)).token_ids)
    image, body, text = ask_once(settings, lambda *_: "3!<|im_end|>", count)
    assert text == "3!"  # the box markers of an answer would stay
    assert [shown.size for shown in get_images(body)] == [image.resized_size]
    assert image.resized_size != image.size
    assert (body["skip_special_tokens"], body["include_stop_str_in_output"]) == (False, True)
    assert {"top_p": 1, "top_k": -1, "min_p": 0, "repetition_penalty": 1}.items() <= body.items()
    assert caplog.text == ""
    ask_once(settings, prompt_tokens=count + 1)
    assert f"the server counts {count + 1} tokens in the prompt of example" in caplog.text
    assert f"the processor of embedded {count}:" in caplog.text


def test_the_frame_is_that_of_the_model_or_given_and_boxes_are_asked_and_scored_in_it(tmp_path):
    unknown, known = make_settings(tmp_path), make_settings(tmp_path, "model=embedded")
    with serve(ChatModel()) as server:
        for settings, frame in ((unknown, "original"), (known, "resized")):
            model = load_evaluated_model(settings, None, server.address)
            assert model.prompts.frame == FRAMES[frame]
        with pytest.raises(UserError, match="--frame needs model=none: the frame of embedded is"):
            load_evaluated_model(known, None, Endpoint(server.address, frame=FRAMES["permille"]))
    task = load_task("grounding", frame=FRAMES["permille"])
    # The model answers in thousandths, whatever it is asked for.
    for asked, value in (("permille", 1.0), ("fraction", 0.0)):
        overrides = [f"output_dir={tmp_path}", f"name={asked}", "model=none", "data.eval_limit=6"]
        settings = load_settings("grounding", overrides)
        examples = load_examples("embedded:grounding", task, settings.data, "eval")
        golds = {example.images[0].load().tobytes(): task.gold(example) for example in examples}
        chat = ChatModel(lambda text, image, golds=golds: golds[image.tobytes() if image else b""])
        assert ask(chat, settings, frame=FRAMES[asked]).value == value
        assert [FRAMES[asked].units in text for text in chat.questions] == [True] * 6


def test_a_checkpoint_and_several_processes_are_refused(tmp_path, monkeypatch):
    settings = make_settings(tmp_path)
    address, two = "http://127.0.0.1:1", SimpleNamespace(num_processes=2)
    with pytest.raises(UserError, match="a server has its own weights"):
        evaluate(settings, tmp_path, address)
    with pytest.raises(UserError, match="a server has its own weights"):
        evaluate_benchmark("tallyqa", settings, tmp_path, server=address)
    monkeypatch.setattr("vlm_grpo.eval.remote.initialize_distributed", lambda: two)
    with pytest.raises(UserError, match="--server needs one process"):
        load_evaluated_model(settings, None, address)
