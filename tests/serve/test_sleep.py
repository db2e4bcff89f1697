"""A run's own server rests between rollouts, and gets full weights while it wakes up."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from threading import Event, Timer
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from tiny_models import make_prompt, noise_example
from transfer_server import GPU, TransferServer, run_transfer_server
from transformers.core_model_loading import revert_weight_conversion

from vlm_grpo.config.recipes import load_settings
from vlm_grpo.dist.data_parallel import DataParallel
from vlm_grpo.model.engine.sampling import build_sampling_settings
from vlm_grpo.model.policy import load_policy
from vlm_grpo.serve import sampler, weights
from vlm_grpo.serve.sampler import VllmSampler
from vlm_grpo.serve.server import Server
from vlm_grpo.serve.weights import DirectTransfer, IpcChannel

RESUME = ["/reset_encoder_cache", "/reset_prefix_cache", "/update_weight_version", "/resume"]
UPDATE = ["/init_weight_transfer_engine", "/start_weight_update", "…", "/finish_weight_update"]


class Run:
    """A sampler of full weights whose only server is on this machine's stand-in of a GPU."""

    def __init__(
        self, server: TransferServer, folder: Path, level: int | None, may_load: bool = True
    ) -> None:
        overrides = ["rollout.sampler=vllm", f"rollout.vllm.urls=[{server.url}]"]
        settings = load_settings("quickstart", [*overrides, f"output_dir={folder}"])
        self.policy = load_policy(settings)
        strategy = DataParallel(self.policy, Accelerator(cpu=True))
        self.sampler = VllmSampler(strategy, settings)
        self.sampler.transfer = DirectTransfer(strategy, IpcChannel(torch.device("cpu")), may_load)
        self.sampler.servers[0].sleep_level = level
        self.server = server
        self.prompt = make_prompt(self.policy, noise_example("a", [(50, 60)]))
        self.sampling = build_sampling_settings(self.policy.distribution, settings.rollout)
        server.answer = self.answer

    def answer(self, body: Any) -> dict[str, Any]:
        end = self.policy.distribution.eos[0]
        choice = {
            "index": 0,
            "finish_reason": "stop",
            "token_ids": [end],
            "logprobs": {"content": [{"logprob": -0.5}]},
            "weight_versions": [{"version": self.server.name}],
        }
        return {"prompt_token_ids": list(self.prompt.token_ids), "choices": [choice]}

    def answer_late(self) -> tuple[Event, Event]:
        """Answer when the second event is set; the first is set when that is waited for."""
        begun, may_end = Event(), Event()

        def answer(body: Any) -> dict[str, Any]:
            begun.set()
            assert may_end.wait(20)
            return self.answer(body)

        self.server.answer = answer
        return begun, may_end

    def start(self) -> Any:
        return self.sampler.start([self.prompt], self.sampling, [range(1)], [(0, 0)])

    def take_calls(self) -> list[str]:
        """Return the calls since the last time; those that bring weights are one."""
        calls = ["…" if call == "/update_weights" else call for call in self.server.calls]
        self.server.calls.clear()
        return [c for i, c in enumerate(calls) if c != "…" or calls[i - 1] != "…"]

    def has_weights(self) -> bool:
        weights = revert_weight_conversion(self.policy.model, self.policy.weights())
        return len(self.server.weights) > 50 and all(
            torch.equal(w, weights[n]) for n, w in self.server.weights.items()
        )


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[TransferServer]:
    monkeypatch.setattr(weights, "get_device_id", lambda device: GPU)
    monkeypatch.setattr(weights, "PART_BYTES", 1 << 21)
    monkeypatch.setattr(sampler, "POLL_SECONDS", 0.01)
    with run_transfer_server() as found:
        yield found


def test_a_step_wakes_loads_samples_and_rests(server: TransferServer, tmp_path: Path) -> None:
    run = Run(server, tmp_path, level=2)
    run.sampler.publish(0)
    assert run.take_calls() == ["/pause?mode=wait", *UPDATE, *RESUME]
    ((completion,),) = run.start().result(20)
    run.sampler.rest()
    assert (completion.version, completion.logprobs) == (0, (-0.5,))
    sampled = ["/inference/v1/generate", "/sleep?level=2&mode=wait"]
    assert run.take_calls() == sampled
    with torch.no_grad():
        next(run.policy.model.parameters()).add_(1)
    assert not run.has_weights()
    run.sampler.publish(1)
    wake = ["/wake_up?tags=weights", *UPDATE, "/wake_up?tags=kv_cache", *RESUME]
    assert run.take_calls() == wake
    assert run.has_weights()
    ((completion,),) = run.start().result(20)
    assert completion.version == 1
    run.sampler.close()


def test_weights_wait_for_what_is_being_sampled(
    server: TransferServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(server, tmp_path, level=None, may_load=False)
    run.sampler.publish(0)
    begun, may_end = run.answer_late()
    ahead = run.start()
    assert begun.wait(20)
    run.take_calls()
    finished: list[bool] = []
    pause = Server.open
    monkeypatch.setattr(Server, "open", lambda s: (finished.append(ahead.done()), pause(s)))
    Timer(0.5, may_end.set).start()
    run.sampler.publish(1)
    assert finished == [True], "else the completions of a step ahead would have two policies"
    assert ahead.result()[0][0].version == 0
    assert run.take_calls()[0] == "/pause?mode=wait"
    run.sampler.close()


@pytest.mark.parametrize("path", ["/wake_up?tags=weights", "/update_weights", "/resume"])
def test_a_failure_while_weights_are_loaded_is_repeated(
    path: str, server: TransferServer, tmp_path: Path
) -> None:
    run = Run(server, tmp_path, level=1)
    run.sampler.publish(0)
    run.sampler.rest()
    server.fails, server.fails_once = {path}, True
    run.sampler.publish(1)
    assert not server.fails
    assert run.has_weights()
    ((completion,),) = run.start().result(20)
    assert completion.version == 1
    run.sampler.close()


def test_a_rollout_that_was_given_up_stops_no_later_one(
    server: TransferServer, tmp_path: Path
) -> None:
    run = Run(server, tmp_path, level=None)
    run.sampler.publish(0)
    begun, may_end = run.answer_late()
    first, second = run.start(), run.start()
    assert begun.wait(20)
    assert second.cancel()
    may_end.set()
    server.answer = run.answer
    assert first.result(20)
    run.sampler.publish(1)
    assert run.start().result(20)[0][0].version == 1
    run.sampler.close()
