"""Sampling of completions by vLLM servers."""

import hashlib
import logging
import queue
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial

import torch
from accelerate.utils.other import get_free_port

from vlm_grpo.config.run import Settings
from vlm_grpo.dist.collectives import any_rank, fail_together
from vlm_grpo.dist.strategy import Strategy
from vlm_grpo.errors import UserError
from vlm_grpo.model.engine.sampling import SamplingSettings
from vlm_grpo.serve.launch import (
    build_command,
    build_environment,
    build_program,
    choose_sleep_level,
)
from vlm_grpo.serve.prompt_check import check_prompt
from vlm_grpo.serve.recovery import Recovery
from vlm_grpo.serve.requests import build_request, read_choices
from vlm_grpo.serve.server import POLL_SECONDS, Server, ServerProcess, WeightLabel
from vlm_grpo.serve.weights import DirectTransfer, FileTransfer, build_transfer, replace_refused
from vlm_grpo.types import Completion, Prompt
from vlm_grpo.utils.http_json import ServiceError

logger = logging.getLogger(__name__)

CONCURRENCY = 64  # most prompts that a server is asked for at once
Completions = tuple[Completion, ...]  # of one prompt


@dataclass
class _Job:
    """A rollout to sample: arguments as in ``Policy.sample``, and the version of the weights."""

    prompts: Sequence[Prompt]
    sampling: SamplingSettings
    num_generations: Sequence[range]
    seeds: Sequence[Sequence[int | str]]
    begun: Sequence[int]
    version: int
    future: Future[list[Completions]] = field(default_factory=Future)


class VllmSampler:
    """A sampler that asks vLLM servers, which generate beside the update, in the order of starts.

    Every process of the run starts a server of its own (``rollout.vllm.python``), or all processes
    share running ones (``rollout.vllm.urls``), into which the main process loads the weights, once
    they are ``ready``.
    """

    def __init__(self, strategy: Strategy, settings: Settings) -> None:
        self.policy, self.ranks = strategy.policy, strategy.accelerator
        assert settings.rollout.vllm is not None
        self.settings, self.vllm = settings, settings.rollout.vllm
        with fail_together(self.ranks):
            self.transfer = build_transfer(strategy, settings)
        self.version = -1
        run = hashlib.sha256(str(settings.run_dir.absolute()).encode()).hexdigest()[:12]
        self.label = WeightLabel("weights" if self.policy.adapters is None else "adapters", run)
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._last: Future[list[Completions]] | None = None
        with fail_together(self.ranks):
            self.servers = self._start_servers()
        shared = self.servers, self.vllm, self.label, self._closed
        self.recovery = Recovery(*shared, self.ranks.print)
        self.ready: Future[None] = Future()
        threading.Thread(target=self._work, daemon=True, name="vllm").start()
        if self.policy.device.type == "cuda" and self.vllm.python is not None:
            # It measures free memory while it starts, which nothing else may change meanwhile.
            with fail_together(self.ranks):
                self.ready.result()
            self.rest()

    def _start_servers(self) -> list[Server]:
        timeout, device = self.vllm.request_timeout, self.policy.device
        if self.vllm.urls:
            return [Server(url, timeout) for url in self.vllm.urls]
        assert self.vllm.python is not None
        port, on_gpu = get_free_port(), device.type == "cuda"
        command = build_command(self.settings, ("127.0.0.1", port), on_gpu)
        process = ServerProcess(
            [*build_program(self.vllm.python), *command],
            build_environment(self.settings, device),
            self.settings.run_dir / f"vllm-{self.ranks.process_index}.log",
        )
        level = choose_sleep_level(self.policy, self.settings)
        process.start()
        return [Server(f"http://127.0.0.1:{port}", timeout, process, level)]

    @property
    def _loads_weights(self) -> bool:
        return not self.vllm.urls or self.ranks.is_main_process

    def publish(self, version: int) -> None:
        """Give what is started from now on the policy's weights after ``version`` steps.

        All ranks call it between two steps, in their main thread, and have the same errors.
        """
        if self.version < 0:
            with fail_together(self.ranks):
                self.ready.result()
            self.transfer = replace_refused(self.transfer, self.servers, self.settings)
        transfer = self.transfer
        if isinstance(transfer, DirectTransfer) and self._last is not None:
            wait([self._last])  # what it samples would change
        if self.policy.device.type == "cuda" and any(server.is_asleep for server in self.servers):
            torch.cuda.empty_cache()  # the servers need the memory now
        if isinstance(transfer, FileTransfer):
            transfer.stage(version)
        self.version = version
        if isinstance(transfer, DirectTransfer):
            self._load_together(transfer, version)

    def rest(self) -> None:
        """Free memory that the update needs, until the next ``publish``; all ranks call it."""
        for server in self.servers:
            self.recovery.attempt(server, server.rest)

    def start(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingSettings,
        num_generations: Sequence[range],
        seeds: Sequence[Sequence[int | str]],
        begun: Sequence[int] = (),
    ) -> Future[list[Completions]]:
        """Start sampling completions of this rank's prompts; arguments as in ``Policy.sample``."""
        begun = begun or [0] * len(prompts)
        job = _Job(prompts, sampling, num_generations, seeds, begun, self.version)
        self._jobs.put(job)
        self._last = job.future
        return job.future

    def close(self) -> None:
        """Drop what has not finished, and end what this sampler has started."""
        self._closed.set()
        self._jobs.put(None)
        for server in self.servers:
            if server.process is not None:
                server.process.close()
        self.transfer.close()

    def _work(self) -> None:
        try:
            for server in self.servers:
                self.recovery.wait_until_ready(server)
            self.ready.set_result(None)
        except BaseException as error:  # the one that waits must not hang
            self.ready.set_exception(error)
        while (job := self._jobs.get()) is not None:
            if not job.future.set_running_or_notify_cancel():
                continue
            try:
                job.future.set_result(self._sample(job))
            except BaseException as error:  # the one that waits must not hang
                job.future.set_exception(error)

    def _sample(self, job: _Job) -> list[Completions]:
        found: dict[int, Completions] = {}
        while len(found) < len(job.prompts):
            for server in list(self.servers):
                self._prepare(server, job.version)
            self._share(job, found)
        for server in self.servers:  # all have answered
            server.failures = 0
        return [found[index] for index in range(len(job.prompts))]

    def _share(self, job: _Job, found: dict[int, Completions]) -> None:
        """Ask all servers for the missing prompts, until all have failed or none is left."""
        todo: queue.SimpleQueue[int] = queue.SimpleQueue()
        for index in range(len(job.prompts)):
            if index not in found:
                todo.put(index)
        errors: list[BaseException] = []

        def work(server: Server) -> None:
            while not (errors or self._closed.is_set() or server.problem):
                try:
                    index = todo.get_nowait()
                except queue.Empty:
                    return
                try:
                    found[index] = self._ask(server, job, index)
                except ServiceError as error:
                    self.recovery.note(server, error)
                except BaseException as error:
                    errors.append(error)

        count = min(CONCURRENCY, todo.qsize())
        threads = [
            threading.Thread(target=work, args=(server,), daemon=True)
            for _ in range(count)
            for server in self.servers
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        self.recovery.check_open()

    def _ask(self, server: Server, job: _Job, index: int) -> Completions:
        """Return the completions of one prompt; a ``UserError`` would recur with any server."""
        prompt, sampling = job.prompts[index], job.sampling
        own = job.num_generations[index], job.seeds[index], job.begun[index]
        request = build_request(self.policy, prompt, sampling, *own)
        try:
            response = server.generate(request)
        except ServiceError as error:
            if error.status in (400, 413, 422):
                raise UserError(
                    f"{prompt.example.name}: vLLM refuses its prompt: {error}"
                ) from error
            raise
        try:
            check_prompt(self.policy, prompt, response["prompt_token_ids"])
            group = read_choices(self.policy, sampling, response["choices"], self.label)
        except (KeyError, TypeError, IndexError) as error:
            raise ServiceError(
                f"{server.url}: the response is not vLLM's ({error!r}): {str(response)[:300]}"
            ) from error
        oldest = min(completion.version or 0 for completion in group)
        if oldest < job.version:  # never with a server that only this run uses
            found = f"step {oldest}" if oldest >= 0 else "no step of this run"
            raise ServiceError(
                f"{server.url} sampled with weights of {found} instead of step {job.version}"
            )
        return group

    def _prepare(self, server: Server, version: int) -> None:
        """Give a server the weights of a version; one that fails is restarted, or dropped."""
        while server.version != version and server in self.servers:
            if server.problem:
                self.recovery.recover(server)
                continue
            try:
                if self._loads_weights:
                    server.open()
                    self.transfer.load(server, version)
                    server.resume(version, self.label.write(version))
                else:
                    self._wait_for_version(server, version)
                    server.version = version
            except ServiceError as error:
                self.recovery.note(server, error)

    def _load_together(self, transfer: DirectTransfer, version: int) -> None:
        """Give all servers the weights of a version, from the main thread of all ranks."""
        while True:
            opened: list[Server] = []
            attempt = self.recovery.attempt
            with fail_together(self.ranks):
                for server in [s for s in self.servers if s.problem and self._loads_weights]:
                    self.recovery.recover(server)
                behind = [server for server in self.servers if server.version != version]
                if self._loads_weights:
                    opened = [server for server in behind if attempt(server, server.open)]
            if not any_rank(self.ranks, bool(behind) and self._loads_weights):
                return
            failures = transfer.send(opened)
            for server in opened:
                if (error := failures.get(server.url)) is not None:
                    self.recovery.note(server, error)
                else:
                    attempt(server, partial(server.resume, version, self.label.write(version)))

    def _wait_for_version(self, server: Server, version: int) -> None:
        for _ in range(int(self.vllm.request_timeout / POLL_SECONDS)):
            if self.label.read(server.get_name()) >= version or self._closed.is_set():
                return
            time.sleep(POLL_SECONDS)
        raise ServiceError(f"{server.url} was not given the weights of step {version}")
