"""A captured decode step that is replayed samples the tokens of the eager loop."""

import threading
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import compiled_steps
import forked
import pytest
import torch
from compiled_steps import RecordedCuda, TracedStep
from family_policies import build_family_policy
from tiny_models import (
    ENDS,
    FAMILIES,
    Groups,
    assert_same_samples,
    mixed_prompts,
    read_tokens,
    sample_groups,
    text_prompts,
    tiny_policy,
)
from torch import Tensor

from vlm_grpo.config.rollout import RolloutSettings
from vlm_grpo.errors import UserError
from vlm_grpo.model.engine import graphs, shared
from vlm_grpo.model.engine.graphs import CudaGraph, DecodeStep, compile_step, get_capture
from vlm_grpo.model.engine.sampling import SamplerState
from vlm_grpo.model.policy import Policy
from vlm_grpo.types import Completion


def sample(policy: Policy, max_tokens: int = 100_000) -> Groups:
    return sample_groups(policy, mixed_prompts(policy, 6), max_tokens=max_tokens)


# With 200 tokens the prompts wait for one another, whatever the family; buckets of 4 need several
# captures per rollout. The last two have recurrent states, which a capture must leave as they were.
@pytest.mark.parametrize(
    ("family", "max_tokens"),
    [*((name, 200) for name in (*FAMILIES[1:], "qwen3_5", "lfm2_vl")), (FAMILIES[0], 100_000)],
)
def test_a_captured_step_samples_equal_tokens(family, max_tokens, monkeypatch):
    monkeypatch.setattr(shared, "LENGTH_BUCKET", 4)
    policy = build_family_policy(family, torch.float64, shared=True, eos=ENDS)
    eager = sample(policy, max_tokens)
    assert len({len(completion.token_ids) for completion in chain(*eager)}) > 3
    policy.engine.use_capture(TracedStep)
    TracedStep.traces = 0
    captured = sample(policy, max_tokens)
    assert TracedStep.traces >= 3
    assert policy.describe_engine().endswith("as CUDA graphs")  # none failed
    assert_same_samples(captured, eager)


def sample_twice(policy: Policy) -> tuple[Groups, Groups]:
    """Sample before and after a change of the weights, in place, which is then undone."""
    before = sample(policy)
    weights = [weight.detach().clone() for weight in policy.model.parameters()]
    with torch.no_grad():
        for weight in policy.model.parameters():
            weight.mul_(0.9)
        after = sample(policy)
        for weight, value in zip(policy.model.parameters(), weights, strict=True):
            weight.copy_(value)
    return before, after


def find_equal(first: Groups, second: Groups) -> list[tuple[Completion, Completion]]:
    """Return the pairs of completions of equal tokens."""
    pairs = zip(chain(*first), chain(*second), strict=True)
    return [(a, b) for a, b in pairs if a.token_ids == b.token_ids]


GPU_CASES = [
    *((name, dtype, "captured") for name in FAMILIES for dtype in (torch.float32, torch.bfloat16)),
    ("qwen2_5_vl", torch.bfloat16, "compiled"),  # compiling takes a while
    ("qwen3_vl", torch.float32, "compiled"),
]


@pytest.mark.parametrize(
    ("family", "dtype", "form"),
    [
        ("qwen2_5_vl", torch.float64, "traced"),
        *(pytest.param(*case, marks=pytest.mark.gpu) for case in GPU_CASES),
    ],
)
def test_captured_steps_are_kept_for_the_next_rollout_and_read_the_new_weights(family, dtype, form):
    policy = tiny_policy(family, dtype=dtype)
    policy.model.to("cpu" if form == "traced" else "cuda")
    eager = sample_twice(policy)
    count, captures = 3 * 6, []
    # Graphs that read the old weights would sample the tokens of before.
    assert len(find_equal(*eager)) <= 0.5 * count

    def capture(step: DecodeStep, inputs: tuple[Tensor, ...]) -> DecodeStep:
        captures.append(inputs)
        if form == "traced":
            return TracedStep(step, inputs)
        return CudaGraph(compile_step(step) if form == "compiled" else step, inputs)

    policy.engine.use_capture(capture)
    sample(policy)
    captures.clear()
    captured = sample_twice(policy)
    assert not captures
    assert policy.describe_engine().endswith("as CUDA graphs")  # none failed
    # The number of masked positions changes the rounding of sums: in bfloat16 one token may differ,
    # and then all later ones do.
    share, tolerance = (0.8, 0.1) if dtype == torch.bfloat16 else (1.0, 1e-4)
    for found, expected in zip(captured, eager, strict=True):
        equal = find_equal(found, expected)
        assert len(equal) >= share * count
        for a, b in equal:
            assert a.logprobs == pytest.approx(b.logprobs, abs=tolerance)


def test_a_rollout_that_fails_keeps_no_captured_step(monkeypatch):
    policy = tiny_policy("qwen2_5_vl", dtype=torch.float64)
    policy.engine.use_capture(TracedStep)
    expected = sample(policy)
    fail = Mock(side_effect=torch.OutOfMemoryError("out of memory"))
    with monkeypatch.context() as patch:
        patch.setattr(SamplerState, "update_active", fail)
        with pytest.raises(torch.OutOfMemoryError):
            sample(policy)
    TracedStep.traces = 0
    assert read_tokens(sample(policy)) == read_tokens(expected)
    assert TracedStep.traces > 0


@pytest.mark.parametrize(
    ("device", "capture", "cause"),
    [
        ("cpu", TracedStep, "reads values from the device"),
        # The cause, not that of the capture's end.
        pytest.param("cuda", CudaGraph, "capturing", marks=pytest.mark.gpu),
    ],
)
def test_steps_run_eagerly_after_a_capture_that_reads_the_device(device, capture, cause, caplog):
    """A dynamic RoPE reads the greatest position."""
    policy = build_family_policy("internvl", torch.float64, shared=True)
    config = policy.model.config.get_text_config()
    config.rope_parameters |= {"rope_type": "dynamic", "factor": 2.0}
    language_model: Any = policy.model.get_decoder()
    language_model.rotary_emb = type(language_model.rotary_emb)(config).double()
    policy.model.to(device)
    draw = partial(sample_groups, policy, text_prompts(policy, (1,)), group_size=2, length=5)
    eager = read_tokens(draw())
    policy.engine.use_capture(capture)
    assert read_tokens(draw()) == eager
    assert cause in caplog.text
    if device == "cuda":
        assert torch.cuda.current_stream() == torch.cuda.default_stream()


# In a process of its own, because the checks of shapes in the tests cannot be compiled.
def test_decode_steps_can_be_compiled_as_a_whole_and_sample_equal_tokens(tmp_path):
    output = tmp_path / "output"
    process = forked.start(output, forked.run_program, Path(compiled_steps.__file__))
    process.join()
    assert process.exitcode == 0, output.read_text()
    lines = output.read_text().splitlines()  # with warnings between them
    assert [line for line in lines if line in compiled_steps.NAMES] == [*compiled_steps.NAMES]


def test_a_step_is_warmed_up_captured_and_replayed_with_new_inputs(monkeypatch):
    cuda = RecordedCuda(monkeypatch)
    captured: list[Tensor] = []

    def step(tokens: Tensor) -> tuple[Tensor]:
        cuda.events.append(f"step on {cuda.current}")
        captured.append(tokens)
        return (tokens,)  # what is computed from the captured inputs when the graph is replayed

    first = torch.tensor([1, 2])
    graph = CudaGraph(step, (first,))
    assert cuda.events == [
        *("side waits for main", "step on side", "main waits for side"),
        *("begin in pool 1, thread_local", "step on capture", "end"),
    ]
    assert cuda.current == "main"
    assert captured[0] is captured[1] is not first
    assert graph(torch.tensor([3, 4]))[0].tolist() == [3, 4]
    assert cuda.events[-1] == "replay"
    assert first.tolist() == [1, 2]


def test_graphs_share_a_pool_that_ends_with_the_last_of_them(monkeypatch):
    cuda = RecordedCuda(monkeypatch)
    step: Any = torch.cos
    build = partial(CudaGraph, step, (torch.ones(1),))
    first, second = build(), build()
    del first
    third = build()
    del second, third
    build()
    pools = [event.split()[3] for event in cuda.events if event.startswith("begin")]
    assert pools == ["1,", "1,", "1,", "2,"]


def test_a_capture_that_fails_leaves_the_stream_and_its_pool_and_names_its_cause(monkeypatch):
    cuda = RecordedCuda(monkeypatch)
    for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
        note = partial(lambda name, *pool: cuda.events.append(f"{name} {pool}"), name)
        monkeypatch.setattr(torch._C, name, note, raising=False)  # noqa: SLF001

    cause = "operation not permitted when stream is capturing"

    def step(tokens: Tensor) -> tuple[Tensor]:
        if cuda.current == "capture":
            raise RuntimeError(cause)
        return (tokens,)

    with pytest.raises(RuntimeError, match="previous error") as caught:
        CudaGraph(step, (torch.ones(1),))
    assert cuda.current == "main"
    assert cuda.events[-2:] == ["_cuda_endAllocateToPool (0, 1)", "_cuda_releasePool (0, 1)"]
    assert str(graphs.find_cause(caught.value)) == cause
    # What an error's author leaves out, or raises it from, is no cause that users need.
    error = ValueError("in detail")
    error.__cause__ = error.__context__ = RuntimeError("too much")
    assert graphs.find_cause(error) is error


def test_a_compiled_graph_captures_the_compiled_step(monkeypatch):
    captured: list[Any] = []
    monkeypatch.setattr(CudaGraph, "__init__", lambda _, *arguments: captured.append(arguments))
    monkeypatch.setattr(graphs, "compile_step", lambda step: ("compiled", step))
    step: Any = torch.cos
    graphs.capture_compiled(step, ())
    assert captured == [(("compiled", step), ())]


@pytest.mark.parametrize(
    ("settings", "shared", "training", "cuda", "expected"),
    [
        ({}, False, True, True, None),
        ({}, True, True, False, None),
        ({}, True, True, True, CudaGraph),
        ({"cuda_graphs": False}, True, True, True, None),
        ({"cuda_graphs": True}, True, False, False, None),
        ({"cuda_graphs": True}, True, True, False, "needs a CUDA device"),
        ({"cuda_graphs": True}, True, True, True, CudaGraph),
        ({"cuda_graphs": True}, False, True, True, "repeats its prompt"),
        ({"torch_compile": True}, True, True, True, graphs.capture_compiled),
        ({"torch_compile": True}, False, True, True, "torch_compile=true has no effect"),
    ],
)
def test_unsupported_graphs_are_refused(settings, shared, training, cuda, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    rollout = RolloutSettings(**settings)
    if isinstance(expected, str):
        with pytest.raises(UserError, match=expected):
            get_capture(rollout, shared, training)
    else:
        assert get_capture(rollout, shared, training) is expected


@pytest.mark.gpu
def test_a_gpu_captures_steps_while_another_thread_pins_memory():
    policy = tiny_policy("qwen2_5_vl")
    policy.model.to("cuda")
    is_done = threading.Event()

    def pin() -> None:
        size = 1
        while not is_done.is_set():
            torch.empty(size := size % 2**24 + 4096).pin_memory()

    thread = threading.Thread(target=pin)
    thread.start()
    try:
        policy.engine.use_capture(CudaGraph)
        sample(policy)
    finally:
        is_done.set()
        thread.join()
    assert policy.describe_engine().endswith("as CUDA graphs")
