"""Time and tokens of full GRPO steps on episodes with two tool calls, ours and TRL's.

    OMP_NUM_THREADS=1 python perf/episode_time.py --out perf/results/episode_time.json

Every episode has three turns of ``--tokens`` tokens and reads an image of 256 tokens after each of
the first two. The model has random weights and calls nothing, so each turn is sampled as usual and
then replaced by one of the same length that is written beforehand, which calls the same tool of the
same class for both trainers. The crops of a group differ, so that none is encoded once for several.
Engines run in processes of their own, which alternate; their memory is the largest above that of
the loaded model.

Expected before the first run: a step passes 2 to 2.5 times as many tokens with repeated prompts as
with shared ones, and takes 1.7 to 2.5 times as long; TRL, which passes all tokens of the episode
again in each turn, and all images, takes 3 to 5 times as long.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import checkout  # noqa: F401
import torch
from crops import Crops
from measurement import LORA, QUESTION, Steps, measure, noise_reward
from step_time import find_versions

SHARED = {f"shared, forks={number}": number for number in (1, 2, 4)}
ENGINES = (*SHARED, "repeated", "trl")
TURNS = 3


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--size", default="35m", help="a name in perf/random_models.py")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--image", type=int, default=784, help="side of the images in pixels")
    parser.add_argument("--prompts", type=int, default=1, help="prompts per step")
    parser.add_argument("--generations", type=int, default=8, help="episodes per prompt, G")
    parser.add_argument("--tokens", type=int, default=96, help="sampled tokens per turn")
    parser.add_argument("--engines", nargs="+", default=ENGINES, choices=ENGINES)
    parser.add_argument("--rounds", type=int, default=2, help="processes per engine")
    parser.add_argument("--steps", type=int, default=2, help="steps per process, after one more")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    parser.add_argument("--child", choices=ENGINES, help=argparse.SUPPRESS)
    parser.set_defaults(full=False, smoke=False, checkpointing="none", max_tokens=16384)
    return parser.parse_args(arguments)


class Script:
    """What episodes write: two calls with other arguments in each, and an answer."""

    def __init__(self, tokenizer: Any, length: int) -> None:
        self.tokenizer, self.length = tokenizer, length

    def write(self, number: int, turn: int, end: bool = False) -> list[int]:
        """Return the tokens of a turn of an episode, with the end of the turn if asked to."""
        encode = self.tokenizer.encode
        call = f'{{"name": "crop", "arguments": {{"x": {8 * number}, "y": {8 * turn}}}}}'
        text = f"<tool_call>\n{call}\n</tool_call>" if turn < TURNS - 1 else f"It is {number}."
        last = [self.tokenizer.eos_token_id] if end else []
        tokens = [*encode(text, add_special_tokens=False), *last]
        filler = encode("0123456789", add_special_tokens=False) * self.length
        missing = self.length - len(tokens)
        if missing < 0:
            raise SystemExit(f"error: --tokens must be at least {len(tokens)}")
        return [*filler[:missing], *tokens]


def run_ours(options: argparse.Namespace, model: Any, processor: Any, images: list) -> Steps:
    """Run steps of this toolkit's trainer."""
    from step_time_vlm_grpo import NoiseTask, build_policy, make_examples  # noqa: PLC0415

    from vlm_grpo.config.run import Settings  # noqa: PLC0415
    from vlm_grpo.task.registry import load_environment  # noqa: PLC0415
    from vlm_grpo.training.trainer import Trainer  # noqa: PLC0415

    environment = f"{Path(__file__).with_name('crops.py')}:Crops"
    forks = SHARED.get(options.child, 1)
    with tempfile.TemporaryDirectory() as folder:
        settings = Settings.model_validate(
            {
                "task": "noise",
                "task_options": {"environment": environment},
                "model": "random",
                "data": {"train": "unused"},
                "output_dir": folder,
                "policy": {
                    "dtype": options.dtype,
                    "gradient_checkpointing": "none",
                    "lora": {"r": LORA["r"], "alpha": LORA["lora_alpha"]},
                },
                "rollout": {
                    "num_generations": options.generations,
                    "max_completion_length": TURNS * options.tokens,
                    "min_new_tokens": TURNS * options.tokens,
                    "forks": forks,
                },
                "optim": {
                    "prompts_per_step": options.prompts,
                    "max_steps": options.steps + 2,
                    "max_tokens_per_batch": options.max_tokens,
                },
                "logging": {"samples_every": 0},
            }
        )
        policy = build_policy(settings, model, processor, options.child in SHARED)
        script, sample = Script(policy.tokenizer, options.tokens), policy.sample

        def sample_scripted(prompts: Any, sampling: Any, numbers: Any, *rest: Any) -> Any:
            begun = rest[-1] or [0]
            turn = begun[0] // options.tokens
            limit = (turn + 1) * options.tokens
            found = sample(prompts, replace(sampling, max_completion_length=limit), numbers, *rest)
            groups = []
            for own, group in zip(numbers, found, strict=True):
                turns = [script.write(number, turn) for number in own]
                assert {len(completion.token_ids) for completion in group} == {options.tokens}
                groups.append(
                    tuple(
                        replace(c, token_ids=tuple(t), text=policy.decode(t), stop="stop")
                        for c, t in zip(group, turns, strict=True)
                    )
                )
            return groups

        policy.sample = sample_scripted
        task = NoiseTask(environment=load_environment(environment))
        trainer = Trainer(settings, policy, task, make_examples(images), [])
        steps = Steps()
        for _ in range(options.steps + 1):
            wall, cpu = time.perf_counter(), time.process_time()
            metrics = trainer.step()
            steps.seconds.append(time.process_time() - cpu)
            steps.phases.setdefault("wall", []).append(time.perf_counter() - wall)
            steps.phases.setdefault("update", []).append(metrics["time/update"])
            assert metrics["tools/calls"] == TURNS - 1
            assert metrics["tools/errors"] == metrics["tools/cut"] == 0
        steps.tokens = int(metrics["work/update_tokens"])
        trainer.sampler.close()
    return steps


def run_trl(options: argparse.Namespace, model: Any, processor: Any, images: list) -> Steps:
    """Run steps of TRL's trainer, with the template for which it parses calls."""
    from datasets import Dataset  # noqa: PLC0415
    from peft import LoraConfig  # noqa: PLC0415
    from transformers import TrainerCallback  # noqa: PLC0415
    from trl import GRPOConfig, GRPOTrainer  # noqa: PLC0415

    steps, script = Steps(), Script(processor.tokenizer, options.tokens)

    class Timer(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.wall, self.cpu = time.perf_counter(), time.process_time()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            steps.seconds.append(time.process_time() - self.cpu)
            steps.phases.setdefault("wall", []).append(time.perf_counter() - self.wall)

    def noise(completions: list, **_: Any) -> list[float]:
        return [noise_reward(completion[-1]["content"]) for completion in completions]

    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=model,
            processing_class=processor,
            reward_funcs=noise,
            args=GRPOConfig(
                output_dir=folder,
                per_device_train_batch_size=options.prompts * options.generations,
                num_generations=options.generations,
                max_completion_length=8192,  # with what is observed
                generation_kwargs={
                    "min_new_tokens": options.tokens,
                    "max_new_tokens": options.tokens,
                },
                max_steps=options.steps + 1,
                beta=0.0,
                learning_rate=1e-6,
                bf16=options.dtype == "bfloat16",
                use_cpu=not torch.cuda.is_available(),
                gradient_checkpointing=False,
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
                shuffle_dataset=False,
            ),
            train_dataset=Dataset.from_dict(
                {
                    "prompt": [[{"role": "user", "content": QUESTION}] for _ in images],
                    "image": images,
                }
            ),
            peft_config=LoraConfig(
                **LORA,
                target_modules=r".*language_model.*\.(q|k|v|o|gate|up|down)_proj",
                task_type="CAUSAL_LM",
            ),
            callbacks=[Timer()],
            environment_factory=Crops,
        )
        generate, turns = trainer._generate_single_turn, []  # noqa: SLF001

        def generate_scripted(prompt_ids: Any, *rest: Any, **named: Any) -> Any:
            found, logprobs = generate(prompt_ids, *rest, **named)
            assert {len(tokens) for tokens in found} == {options.tokens}
            turn = len(turns) % TURNS
            turns.append(sum(len(ids) + options.tokens for ids in prompt_ids))
            numbers = (place % options.generations for place in range(len(prompt_ids)))
            return [script.write(number, turn, end=True) for number in numbers], logprobs

        trainer._generate_single_turn = generate_scripted  # noqa: SLF001
        trainer.train()
        assert len(turns) == TURNS * (options.steps + 1)
        steps.tokens = turns[-1]
    return steps


def run_steps(options: argparse.Namespace, model: Any, processor: Any, images: list) -> Steps:
    from trl.chat_template_utils import qwen3_vl_chat_template  # noqa: PLC0415

    processor.chat_template = processor.tokenizer.chat_template = qwen3_vl_chat_template
    run = run_trl if options.child == "trl" else run_ours
    return run(options, model, processor, images)


def main(arguments: Sequence[str]) -> None:
    options = parse_arguments(arguments)
    if options.child:
        print(json.dumps(measure(options, run_steps)))
        return
    results: dict[str, list[dict]] = {engine: [] for engine in options.engines}
    for _ in range(options.rounds):
        for engine, runs in results.items():
            command = [sys.executable, __file__, *arguments, "--child", engine]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            runs.append(json.loads(done.stdout.splitlines()[-1]))
            print(f"{engine}: {runs[-1]['seconds']}", file=sys.stderr)
    base = 0.0
    print("| engine | tokens of an update | CPU s per step (range) | relative | peak MB |")
    print("| --- | --- | --- | --- | --- |")
    for engine, runs in results.items():
        every = [seconds for run in runs for seconds in run["seconds"]]
        middle, memory = statistics.median(every), max(run["memory"] for run in runs)
        base = base or middle
        print(
            f"| {engine} | {runs[0]['tokens']:,} | {middle:.1f} ({min(every):.1f} to "
            f"{max(every):.1f}) | {middle / base:.1f} | {memory / 1e6:.0f} |"
        )
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        report = {"settings": vars(options), "versions": find_versions(), "runs": results}
        options.out.write_text(json.dumps(report, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
