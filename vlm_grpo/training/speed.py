"""Work, speed, memory and times of a step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from accelerate import Accelerator

from vlm_grpo.config.run import Settings
from vlm_grpo.dist.collectives import gather_object
from vlm_grpo.model.policy import Counters, Policy
from vlm_grpo.planning.model_shape import read_model_shape
from vlm_grpo.planning.step_time import count_step_flops
from vlm_grpo.planning.this_device import find_peak_rate
from vlm_grpo.report.profiling import profile_step
from vlm_grpo.training.batch import Rollout, StepBatch
from vlm_grpo.training.memory import memory_metrics
from vlm_grpo.training.objective import MetricAccumulator


class StepMeter:
    """A meter of the steps of a run.

    Args:
        policy: counts its work, and times its phases.
        settings: the run's settings.
        accelerator: the ranks.

    Attributes:
        rate: FLOP/s of matrix products on each device in the policy's precision; None if unknown.
    """

    def __init__(self, policy: Policy, settings: Settings, accelerator: Accelerator) -> None:
        self.policy, self.accelerator = policy, accelerator
        self.settings = settings
        self.rate = find_peak_rate(policy.device, settings.policy.dtype)
        if self.rate is not None:
            self.shape, _ = read_model_shape(policy.model.config, settings.policy)

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

    def reset(self) -> None:
        """Begin a step: reset the policy's counters and times."""
        self.policy.counters = Counters()
        self.policy.stopwatch.reset()

    def measure(self, rollout: Rollout, batch: StepBatch) -> dict[str, float]:
        """Return the metrics of a finished step over all ranks. All ranks must call it.

        Times and memory are of this rank. A step that another process began has no speed.
        """
        policy = self.policy
        seconds = dict(policy.stopwatch.seconds)
        sums = {"sampled_tokens": rollout.num_tokens, **vars(policy.counters)}
        if self.rate is not None:
            sampled = () if rollout.is_supervised else rollout.groups
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
        """Return tokens per second of all ranks, and shares of their devices' rates.

        Args:
            sums: sums over the ranks.
            slowest: seconds of each phase on the slowest rank.
        """
        if "prompts" not in slowest:
            return {}
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
