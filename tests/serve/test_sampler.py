"""Sampling by servers that share the prompts, fail, and are given new weights."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils.other import get_free_port
from fake_vllm import read_calls, run_fake
from processes import wait_for
from small_runs import small_run
from tiny_models import make_prompt, noise_example

from vlm_grpo.errors import UserError
from vlm_grpo.model.engine.sampling import SamplingSettings
from vlm_grpo.model.policy import Policy, load_policy
from vlm_grpo.serve.sampler import VllmSampler
from vlm_grpo.serve.server import Server, WeightLabel
from vlm_grpo.serve.weights import FileTransfer
from vlm_grpo.training.update import build_updater
from vlm_grpo.types import Completion, Prompt

GENERATE, LOAD = "/inference/v1/generate", "/collective_rpc"


@pytest.fixture(scope="module")
def strategy(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    settings = small_run(tmp_path_factory.mktemp("run"), model_folder)
    return build_updater(load_policy(settings), settings, Accelerator(cpu=True)).strategy


@pytest.fixture(scope="module")
def prompts(strategy: Any) -> list[Prompt]:
    policy = strategy.policy
    return [make_prompt(policy, noise_example(str(i), [(60, 30 + i)] * (i % 2))) for i in range(8)]


def paths(servers: Any, number: int = 0) -> list[str]:
    """Return the paths of a server's requests from the first weights on."""
    found = [call["path"] for call in read_calls(servers.folders[number])]
    return found[found.index("/pause") :] if "/pause" in found else []


@pytest.fixture
def start(
    strategy: Any, settings: Any, tmp_path: Path, model_folder: Path
) -> Iterator[Callable[..., Any]]:
    """Return a function that starts servers of these plans in threads, and their sampler."""
    with ExitStack() as stack:

        def run(*plans: dict[str, Any], publish: bool = True, **vllm: Any) -> Any:
            first = len(list(tmp_path.glob("server-*")))
            folders = [tmp_path / f"server-{first + number}" for number in range(len(plans))]
            pairs = zip(folders, plans, strict=True)
            urls = [stack.enter_context(run_fake(f, model_folder, **plan)) for f, plan in pairs]
            sampler = VllmSampler(strategy, settings(urls=urls, vllm=vllm))
            stack.callback(sampler.close)
            if publish:
                sampler.publish(0)
            return SimpleNamespace(sampler=sampler, folders=folders, urls=urls)

        yield run


def sample(sampler: VllmSampler, prompts: list[Prompt]) -> Any:
    return begin(sampler, prompts).result(60)


def begin(sampler: VllmSampler, prompts: list[Prompt]) -> Any:
    settings, count = SamplingSettings(sampler.policy.distribution, 6), len(prompts)
    return sampler.start(prompts, settings, [range(3)] * count, [(0, i) for i in range(count)])


def tokens(groups: list[tuple[Completion, ...]]) -> Any:
    return [[completion.token_ids for completion in group] for group in groups]


def versions(groups: list[tuple[Completion, ...]]) -> set[int | None]:
    return {completion.version for group in groups for completion in group}


@pytest.fixture
def expected(start: Any, prompts: list[Prompt]) -> Any:
    """The tokens of all prompts from one server that works."""
    return tokens(sample(start({}).sampler, prompts))


def test_servers_share_the_prompts_and_have_the_weights_before_the_first(start, prompts, expected):
    servers = start({"seconds": 0.05}, {"seconds": 0.05})
    assert tokens(sample(servers.sampler, prompts)) == expected
    assert [len(group) for group in expected] == [3] * 8
    assert len({str(group) for group in expected}) == 8
    counts = [paths(servers, number).count(GENERATE) for number in range(2)]
    assert sum(counts) == 8
    assert min(counts) > 0
    for version in range(3):
        if version:
            servers.sampler.publish(version)
        assert versions(sample(servers.sampler, prompts)) == {version}  # has them already, first
    for number in range(2):
        assert paths(servers, number).count("/pause") == 3
        found = [call["version"] for call in read_calls(servers.folders[number], GENERATE)[1:]]
        assert found == sorted(found)
    # Each prompt has its own seed, so that a prompt alone gives the same.
    assert tokens(sample(servers.sampler, prompts[:1])) == expected[:1]


def test_a_rollout_has_the_weights_of_when_it_was_started_unless_it_is_cancelled(start, prompts):
    servers = start({"seconds": 0.05})
    first = begin(servers.sampler, prompts)
    second = begin(servers.sampler, prompts)
    servers.sampler.publish(1)
    third = begin(servers.sampler, prompts)
    assert [versions(job.result(60)) for job in (first, second, third)] == [{0}, {0}, {1}]
    kept, cancelled = begin(servers.sampler, prompts), begin(servers.sampler, prompts)
    assert cancelled.cancel()
    last = begin(servers.sampler, prompts[:1])
    assert [len(job.result(60)) for job in (kept, last)] == [8, 1]
    assert paths(servers).count(GENERATE) == 3 * 8 + 8 + 1


@pytest.mark.parametrize(
    ("path", "fault"),
    [
        # 404: such as for an adapter that a restarted server does not have
        *((GENERATE, fault) for fault in ("500", "404", "abort", "hang", "{}", "[]")),
        (GENERATE, '{"prompt_token_ids": null, "choices": []}'),
        *((path, "500") for path in ("/pause", LOAD, "/reset_encoder_cache", "/resume")),
        *(("/reset_prefix_cache", fault) for fault in ('{"success": false}', "[]")),
    ],
)
def test_a_server_that_fails_once_is_asked_again(start, prompts, expected, caplog, path, fault):
    number = "4" if path == GENERATE else "1"  # the first request is the check's empty one
    timeout = {"request_timeout": 0.5} if fault == "hang" else {}
    servers = start({"faults": {path: {number: fault}}}, **timeout)
    assert tokens(sample(servers.sampler, prompts)) == expected
    assert paths(servers).count(GENERATE) == 8 + (path == GENERATE), "only what failed is repeated"
    assert f"the vLLM server {servers.urls[0]} failed (" in caplog.text
    assert "is asked again (1 of 3)" in caplog.text
    assert ("no response within" in caplog.text) == (fault == "hang")
    assert paths(servers).count("/pause") == 2
    again = len(paths(servers)) - 1 - paths(servers)[::-1].index("/pause")
    loads = [LOAD, LOAD, "/reset_encoder_cache", "/reset_prefix_cache", "/update_weight_version"]
    assert paths(servers)[again : again + 7] == ["/pause", *loads, "/resume"]


def test_a_server_that_is_gone_is_dropped(start, prompts, expected, caplog):
    servers = start({"seconds": 0.02}, {"faults": {GENERATE: {"3": "die"}}})
    assert tokens(sample(servers.sampler, prompts)) == expected
    assert [server.url for server in servers.sampler.servers] == servers.urls[:1]
    assert f"the vLLM server {servers.urls[1]} failed" in caplog.text
    assert "gets no more requests; 1 are left" in caplog.text
    assert "is asked again" not in caplog.text
    servers.sampler.publish(1)
    assert versions(sample(servers.sampler, prompts)) == {1}


def test_failures_are_counted_until_a_rollout_is_finished(start, prompts):
    servers = start({"faults": {GENERATE: {"1": "400", "*": "500"}}}, max_restarts=2)
    with pytest.raises(UserError, match=r"the last vLLM .*status 500.*continue with resume"):
        sample(servers.sampler, prompts[:1])
    assert paths(servers).count(GENERATE) == 3
    servers = start({"faults": {GENERATE: dict.fromkeys("246", "500")}}, max_restarts=1)
    for _ in range(3):
        sample(servers.sampler, prompts[:1])
    # The server that refuses a prompt is as good as before.
    servers = start({"faults": {GENERATE: {"2": "400"}}})
    message = r"example 0: vLLM refuses its prompt: .*fault of status 400"
    with pytest.raises(UserError, match=message):
        sample(servers.sampler, prompts[:1])
    sample(servers.sampler, prompts[:1])
    assert paths(servers).count("/pause") == 1


def test_a_server_of_another_size_of_images_or_other_weights_is_not_used(
    start, prompts, monkeypatch
):
    for plan, message in (
        ({"image_tokens": 1}, r"example [1357]: its images have .* in the vLLM server"),
        ({"keeps_version": True}, "last vLLM .* weights of no step of this run instead of step 0"),
    ):
        with pytest.raises(UserError, match=message):
            sample(start(plan, max_restarts=1).sampler, prompts)
    # Nor is an answer of older weights.
    servers = start({}, max_restarts=0)
    sample(servers.sampler, prompts)
    servers.sampler.publish(1)
    monkeypatch.setattr(Server, "open", lambda _: None)
    monkeypatch.setattr(FileTransfer, "load", lambda *_: None)
    monkeypatch.setattr(Server, "resume", lambda s, version, _: setattr(s, "version", version))
    with pytest.raises(UserError, match="sampled with weights of step 0 instead of step 1"):
        sample(servers.sampler, prompts)
    # Nor are base weights that were replaced.
    monkeypatch.setattr(WeightLabel, "kind", "adapters")
    servers = start({"weights": "weights/another/3"}, publish=False)
    with pytest.raises(UserError, match=f"{servers.urls[0]}: its base weights were replaced"):
        servers.sampler.publish(0)


def test_a_server_that_does_not_come_up(strategy, settings, capsys, monkeypatch):
    monkeypatch.setattr("vlm_grpo.serve.server.REPORT_SECONDS", 0.05)
    url = f"http://127.0.0.1:{get_free_port()}"
    sampler = VllmSampler(strategy, settings(urls=[url], vllm={"startup_timeout": 0.3}))
    with pytest.raises(UserError, match=rf"{url} was not ready after 0 s .*startup_timeout"):
        sampler.publish(0)
    sampler.close()
    assert f"waiting for vLLM at {url} (0 of at most 0.3 s)" in capsys.readouterr().out


def test_the_end_of_the_run_ends_a_rollout(start, prompts):
    servers = start({"seconds": 0.1})
    job = begin(servers.sampler, prompts)
    wait_for(lambda: GENERATE in paths(servers))
    servers.sampler.close()
    with pytest.raises(UserError, match="the run was stopped"):
        job.result(60)
    wait_for(lambda: not any(t.name == "vllm" for t in threading.enumerate()))


def load_no_weights(sampler: Any) -> None:
    """Make a sampler that of another rank, which only waits for the weights."""
    sampler.ranks = SimpleNamespace(is_main_process=False, num_processes=1, process_index=1)
    sampler.transfer = SimpleNamespace(close=lambda: None)


def test_other_ranks_wait_for_the_weights_that_the_first_loads(start, strategy, prompts):
    servers = start({})
    first = servers.sampler
    second: Any = VllmSampler(strategy, first.settings)
    load_no_weights(second)
    second.publish(0)
    job = begin(second, prompts[4:])
    assert GENERATE not in paths(servers)
    sample(first, prompts[:4])
    assert versions(job.result(60)) == {0}
    assert paths(servers).count("/pause") == 1
    for sampler in (first, second):
        sampler.publish(1)
    job = begin(second, prompts[4:])
    sample(first, prompts[:4])
    assert versions(job.result(60)) == {1}
    second.close()
    # They wait no longer than for a request.
    late: Any = start({}, publish=False, request_timeout=0.1, max_restarts=0).sampler
    load_no_weights(late)
    late.publish(0)
    with pytest.raises(UserError, match="was not given the weights of step 0"):
        sample(late, prompts)


def test_a_server_on_the_run_s_gpu_is_ready_and_rests_first(strategy, settings, monkeypatch):
    monkeypatch.setattr(Policy, "device", torch.device("cuda"))
    rested: list[bool] = []
    monkeypatch.setattr(Server, "rest", lambda server: rested.append(server.is_ready()))
    sampler = VllmSampler(strategy, settings(vllm={"weight_transfer": "files"}))
    sampler.close()
    assert rested == [True]
