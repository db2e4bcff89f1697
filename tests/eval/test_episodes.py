"""Evaluation of tasks with an environment: turns, resumption, servers, and what tools are worth."""

import json

import small_environments
from chat_model import ChatModel, get_images, serve
from small_runs import TASK
from tiny_models import tiny_policy

from vlm_grpo import load_settings, load_task
from vlm_grpo.data.loading import load_examples
from vlm_grpo.eval.evaluate import evaluate, evaluate_model
from vlm_grpo.eval.generate import generate_all
from vlm_grpo.eval.models import LocalModel
from vlm_grpo.eval.prediction_log import PredictionLog
from vlm_grpo.eval.scored import read_scored
from vlm_grpo.serve.chat_client import Endpoint
from vlm_grpo.task.scorer import RewardScorer

CALL = '<tool_call>\n{"name": "zoom", "arguments": {"bbox_2d": [0, 0, 40, 40]}}\n'


def test_outputs_have_their_turns_and_are_compared_with_those_without_tools(tmp_path, monkeypatch):
    monkeypatch.setattr("vlm_grpo.eval.models.CHUNK_EXAMPLES", 2)
    settings = load_settings("counting", ["data.eval_limit=4", "rollout.max_completion_length=30"])
    policy = tiny_policy("qwen2_5_vl")
    (tmp_path / "letters.py").write_text(TASK)
    peek = f"{small_environments.__file__}:Peek"
    task = load_task(tmp_path / "letters.py", environment=peek, frame=policy.prompts.frame)
    examples = load_examples("embedded:ocr", task, settings.data, "eval")
    model = LocalModel(policy, settings)
    with RewardScorer() as scorer:
        whole = evaluate_model(model, task, examples, scorer, PredictionLog(tmp_path / "a", {}))
        stopped = PredictionLog(tmp_path / "b", {})
        lines = (tmp_path / "a" / "predictions.jsonl").read_text().splitlines(keepends=True)
        stopped.rank_path.write_text("".join(lines[:3]))  # the first of two chunks is complete
        log = PredictionLog(tmp_path / "b", {})
        assert evaluate_model(model, task, examples, scorer, log) == whole
    assert (tmp_path / "b" / "predictions.jsonl").read_text() == "".join(lines)
    turns = [json.loads(line)["turns"] for line in lines]
    assert max(map(len, turns)) > 1  # the random model calls
    called = next(own for own in turns if len(own) > 1)
    assert called[0]["call"] == {"name": "peek", "arguments": {}}
    observed = {"text": "Part 1<image>", "images": [[28, 28]], "is_error": False, "reward": 0.0}
    assert called[0]["observed"] == observed

    calls = [sum("observed" in turn for turn in own) for own in turns]
    assert whole.metrics["tools/calls"] == sum(calls) / 4
    assert whole.metrics["turns"] == sum(map(len, turns)) / 4 / 3  # the reward of the environment
    plain = generate_all(model, task.without_tools(), examples)[1]
    pairs = zip(plain, examples, strict=True)
    scores = [task.score(own.text, example).rewards["letters"] for own, example in pairs]
    assert whole.get_column("letters_without_tools") == scores
    pairs = zip(map(float, whole.values["letters"].values()), scores, calls, strict=True)
    silent = [now - float(before or 0) for now, before, count in pairs if not count]
    assert whole.metrics["tools/prompt"] == sum(silent) / 4


def test_a_server_is_asked_turn_by_turn(tmp_path):
    given = ["data.eval_limit=3", "model=none", "task_options.environment=zoom"]
    settings = load_settings("counting", [*given, f"output_dir={tmp_path}"])
    model = ChatModel(lambda text, image: "3" if text.endswith("</tool_response>") else CALL)
    with serve(model) as server:
        found = evaluate(settings, None, Endpoint(server.address, concurrency=1))
        asked = len(model.bodies)
        assert evaluate(settings, None, server.address).rows == found.rows
    assert len(model.bodies) == asked == 3 * 3  # two turns with tools, and one without
    first, second = model.bodies[:2]
    assert first["stop"] == ["</tool_call>"]
    system, question, said, read = second["messages"]
    assert [system, question] == first["messages"]
    assert '"name": "zoom"' in system["content"]
    # The server leaves out the end of the call.
    assert said == {"role": "assistant", "content": f"{CALL}</tool_call>"}
    assert get_images(second)[0].size == (336, 336)  # Zoom's least side
    assert [part["type"] for part in read["content"]] == ["text", "image_url", "text"]
    assert "stop" not in model.bodies[-1]
    assert model.bodies[6]["messages"] == [question]
    right = sum(row["answer"] == 3 and row["rewards"]["exact"] == 1 for row in found.rows) / 3
    assert found.value == right == found.metrics["tools/gain"] > 0
    assert found.metrics["exact_without_tools"] == 0  # a call is no answer
    shares = f"gain {right:.1%}, harm 0.0%, prompt 0.0%, called 100.0%"
    assert found.lines[-1].startswith(f"tools: {shares}")
    assert found.path is not None
    assert read_scored(found.path).metrics == found.metrics
