"""A model behind a vLLM server gives the outputs of the same model in this process."""

import json
import random
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from accelerate.utils.other import get_free_port
from tiny_models import noise_example
from vllm_runs import run_servers

from vlm_grpo import UserError, evaluate, load_settings
from vlm_grpo.model.loading import get_model_source, load_prompt_builder
from vlm_grpo.serve.chat_client import ChatClient, Endpoint, build_messages
from vlm_grpo.task import PlainQuestion


@pytest.fixture(scope="module")
def served_url(vllm_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a server as a user starts it, of a model with generation settings of its own."""
    folder = tmp_path_factory.mktemp("served")
    model = folder / "model"
    shutil.copytree(get_model_source("embedded"), model)
    path = model / "generation_config.json"
    # Settings such as models bring; vLLM applies those that a request does not set.
    given = {"repetition_penalty": 1.3, "top_k": 3, "top_p": 0.5, "temperature": 0.9}
    path.write_text(json.dumps(json.loads(path.read_text()) | given))
    port = get_free_port()
    command = [
        *(str(vllm_python.with_name("vllm")), "serve", str(model), "--dtype", "float32"),
        *("--served-model-name", "policy", "--host", "127.0.0.1", "--port", str(port)),
        *("--max-model-len", "1024", "--enforce-eager"),
    ]
    environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with run_servers({port: command}, environment, folder) as [(url, _)]:
        yield url


@pytest.mark.parametrize(
    ("task", "count", "overrides"),
    [
        ("counting", 200, []),
        ("grounding", 200, []),
        ("ocr", 200, []),
        ("grounding", 60, ["policy.max_pixels=5000", "prompt.system=Answer well."]),
        ("ocr", 60, ["policy.min_pixels=5000", "policy.max_pixels=9000"]),
    ],
)
def test_outputs_are_those_of_the_model_in_this_process(
    task, count, overrides, served_url, tmp_path, caplog
):
    given = [f"data.eval_limit={count}", "policy.dtype=float32", f"output_dir={tmp_path}"]
    settings = load_settings(task, [*given, *overrides])
    served, local = evaluate(settings, None, served_url), evaluate(settings)
    pairs = zip(served.rows, local.rows, strict=True)
    assert [(a, b) for a, b in pairs if a != b] == []
    assert len({row["output"] for row in served.rows}) > 3
    assert served.n == count
    assert caplog.text == ""  # no prompt has another number of tokens than here


def test_prompts_of_images_of_any_size_have_as_many_tokens_as_here(served_url):
    builder = load_prompt_builder(load_settings("counting"))
    client = ChatClient(Endpoint(served_url))
    pick_side = partial(random.Random(3).randrange, 20, 400)
    for number in range(40):
        sizes = [(pick_side(), pick_side()) for _ in range(1 + number % 3)]
        example = noise_example(str(number), sizes, "How many?", seed=number)
        example = builder.with_resized_sizes(example)
        turns = builder.write(example, PlainQuestion())
        loaded = [image for image, _ in builder.load_images(example)]
        answer = client.ask(build_messages(turns, loaded), {"max_tokens": 1})
        expected = len(builder.build(example, PlainQuestion()).token_ids)
        assert (sizes, answer.prompt_tokens) == (sizes, expected)


def test_requests_that_the_server_refuses_are_one_message(served_url, tmp_path):
    given = [f"output_dir={tmp_path}", "data.eval_limit=20"]
    settings = load_settings("counting", [*given, "rollout.max_completion_length=5000"])
    reason = r"example shapes-counting-eval-0: .*max_model_len=1024.*\n    7 more like it: example "
    with pytest.raises(UserError, match=rf"no output for 20 .* after 8 .*:\n  - {reason}"):
        evaluate(settings, None, Endpoint(served_url, concurrency=1))
    with pytest.raises(UserError, match=r"no model other, .*it serves\n  - policy"):
        evaluate(load_settings("counting", given), None, Endpoint(served_url, "other"))
