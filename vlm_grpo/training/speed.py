"""Work, speed, memory and times of a step; traces of single steps with the memory of a GPU."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import psutil
import torch
from accelerate import Accelerator
from torch.profiler import ProfilerActivity, profile, record_function

from vlm_grpo.config.run import Settings
from vlm_grpo.dist.collectives import gather_object
from vlm_grpo.model.policy import Policy
from vlm_grpo.planning.devices import GIB, find_peak_rate
from vlm_grpo.planning.model_shape import read_model_shape
from vlm_grpo.planning.step_time import count_step_flops
from vlm_grpo.training.objective.token_batch import MetricAccumulator
from vlm_grpo.training.step_batch import Rollout, StepBatch
from vlm_grpo.utils.stopwatch import Stopwatch


class StepMeter:
    """A meter of the steps of a run.

    ``rate`` is in FLOP/s of matrix products on each device in the policy's precision, if known.
    """

    def __init__(self, policy: Policy, settings: Settings, accelerator: Accelerator) -> None:
        self.policy, self.settings, self.accelerator = policy, settings, accelerator
        self.rate = find_peak_rate(policy.device, settings.policy.dtype)
        if self.rate is not None:
            self.shape = read_model_shape(policy.model.config, settings.policy)

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Time a step, and profile it on the main process if ``logging.profile_steps`` has it."""
        stopwatch, is_main = self.policy.stopwatch, self.accelerator.is_main_process
        if not (is_main and number in self.settings.logging.profile_steps):
            with stopwatch("step"):
                yield
            return
        path = self.settings.run_dir / "profile" / f"step-{number}"
        with profile_step(path, stopwatch, self.policy.device), stopwatch("step"):
            yield
        self.accelerator.print(f"profile    {path}.json.gz: open it at https://ui.perfetto.dev")

    def measure(self, rollout: Rollout, batch: StepBatch) -> dict[str, float]:
        """Return the metrics of a finished step over all ranks; times and memory are of this rank.
        All ranks must call it.
        """
        policy = self.policy
        seconds = dict(policy.stopwatch.seconds)
        sums = {"sampled_tokens": rollout.num_tokens, **vars(policy.counters)}
        if self.rate is not None:
            sampled = () if rollout.author is not None else rollout.groups
            flops = count_step_flops(self.shape, sampled, batch.slices, batch.num_iterations)
            sums |= {"step_flops": int(flops.total), "update_flops": int(flops.update)}
        parts = gather_object([MetricAccumulator(sums=sums, maxima=seconds)])
        every = sum(parts, MetricAccumulator())
        work = {name: every.sums[name] for name in vars(policy.counters)}
        return {
            **{n if n == "replaced_prompts" else f"work/{n}": count for n, count in work.items()},
            **memory_metrics(self.accelerator.device),
            **{f"time/{phase}": spent for phase, spent in seconds.items()},
            **self._rates(every.sums, every.values()),
        }

    def _rates(self, sums: Mapping[str, int], slowest: Mapping[str, float]) -> dict[str, float]:
        """Return tokens per second of all ranks, and shares of their devices' rates."""
        scoring = slowest["update"] + slowest.get("reference", 0.0)
        rates = {"speed/update_tokens_per_second": sums["update_tokens"] / scoring}
        if "rollout" in slowest:
            sampling = slowest.get("generation", slowest["rollout"])  # not the wait for it
            rates["speed/rollout_tokens_per_second"] = sums["sampled_tokens"] / sampling
        if self.rate is not None:
            rate = self.rate * self.accelerator.num_processes
            rates["speed/mfu"] = sums["step_flops"] / (slowest["step"] * rate)
            rates["speed/update_mfu"] = sums["update_flops"] / (slowest["update"] * rate)
        return rates


def memory_metrics(device: torch.device) -> dict[str, float]:
    """Return the memory usage in GiB.

    ``memory/resident`` is the process's resident memory. On CUDA, ``memory/cuda_peak`` is the peak
    of allocated tensors since the last call, or since a ``MemoryProbe`` began; fragmentation and
    CUDA's own memory are not included.
    """
    metrics = {"memory/resident": psutil.Process().memory_info().rss / GIB}
    if device.type == "cuda":
        metrics["memory/cuda_peak"] = torch.cuda.max_memory_allocated(device) / GIB
        torch.cuda.reset_peak_memory_stats(device)
    return metrics


MAX_MEMORY_EVENTS = 1_000_000
"""Most allocations and frees that a snapshot of the memory holds."""


@contextmanager
def profile_step(path: Path, stopwatch: Stopwatch, device: torch.device) -> Iterator[None]:
    """Profile the block and write its files, unless it raises.

    They are ``PATH.json.gz``, a trace of all operations in which the stopwatch's phases are named,
    and on CUDA ``PATH.memory.pickle``, all allocations with their stacks.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    on_cuda = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])]
    annotate, stopwatch.annotate = stopwatch.annotate, record_function
    if on_cuda:
        history = torch.cuda.memory._record_memory_history  # noqa: SLF001
        history(max_entries=MAX_MEMORY_EVENTS, stacks="python")  # C++ stacks take longer
    try:
        with profile(activities=activities) as profiler:
            yield
        if on_cuda:
            torch.cuda.memory._dump_snapshot(f"{path}.memory.pickle")  # noqa: SLF001
    finally:
        stopwatch.annotate = annotate
        if on_cuda:
            torch.cuda.memory._record_memory_history(enabled=None)  # noqa: SLF001
    profiler.export_chrome_trace(f"{path}.json.gz")
