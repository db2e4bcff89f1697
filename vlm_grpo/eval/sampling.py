"""Several scored samples of each training example, and the files that are written from them."""

import base64
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from vlm_grpo.config.data import is_mixture
from vlm_grpo.config.run import EvaluationSettings, Settings
from vlm_grpo.data.loading import build_scorer, load_data
from vlm_grpo.data.mixed_task import load_run_task
from vlm_grpo.dist.launch import initialize_distributed
from vlm_grpo.errors import UserError
from vlm_grpo.eval.evaluate import score_all
from vlm_grpo.eval.generate import generate_all
from vlm_grpo.eval.models import check_weights, load_evaluated_model, name_outputs
from vlm_grpo.eval.prediction_log import open_log
from vlm_grpo.model.prompts import PromptBuilder, PromptWriter
from vlm_grpo.serve.chat_client import Endpoint
from vlm_grpo.task import Task
from vlm_grpo.task.scorer import earns, get_gold_reward, measure_pass
from vlm_grpo.types import TARGET_COLUMN, Completion, Example, ImageRef, Score
from vlm_grpo.utils.atomic_io import write_atomic
from vlm_grpo.utils.chat import Turn
from vlm_grpo.utils.jsonl import format_rows


@dataclass(frozen=True)
class SampledExamples:
    """Training examples, and the outputs and scores of the k samples of each."""

    settings: Settings
    task: Task
    prompts: PromptWriter  # writes the prompts of the model
    examples: Sequence[Example]
    outputs: Sequence[Sequence[Completion]]
    scores: Sequence[Sequence[Score]]


def sample_examples(
    settings: Settings,
    count: int,
    checkpoint: Path | None = None,
    server: Endpoint | str | None = None,
) -> SampledExamples:
    """Sample each training example ``count`` times as rollouts do, and score the samples.

    The samples are written to the folder ``sampled`` of the run as they come, and a stopped command
    continues from them. The ranks share the examples; each returns all. The weights are those of
    the checkpoint, of a model behind an address, or else of ``settings.model``.
    """
    check_weights(checkpoint, server)
    limit, temperature = settings.evaluation.max_tokens_per_batch, settings.rollout.temperature
    given = EvaluationSettings(samples=count, temperature=temperature, max_tokens_per_batch=limit)
    settings = settings.model_copy(update={"evaluation": given})
    run_task = load_run_task(settings)
    only_train = settings.data.model_copy(update={"eval": None})
    examples, _ = load_data(settings.model_copy(update={"data": only_train}), run_task)
    model = load_evaluated_model(settings, checkpoint, server)
    task = model.prompts.adapt(run_task)
    if settings.data.on_bad_row == "skip":
        examples = model.prompts.select_usable(examples, task, skip=True)
    folder = settings.run_dir / "sampled" / f"{name_outputs(model, checkpoint)}-{count}"
    log = open_log(folder, model, checkpoint, task, examples, "train")
    resized, flat = generate_all(model, task, examples, log)
    with build_scorer(settings, initialize_distributed().process_index) as scorer:
        scores = score_all(task, resized, flat, scorer)
    own = [slice(start, start + count) for start in range(0, len(flat), count)]
    samples = [flat[part] for part in own], [scores[part] for part in own]
    return SampledExamples(settings, task, model.prompts, resized, *samples)


def write_difficulty(found: SampledExamples, path: Path) -> list[float]:
    """Write id, pass rate, mean reward and number of samples of each example; return the rates.

    The pass rate is the mean of ``measure_pass`` over the samples.
    """
    rows, rates = [], []
    for example, scores in zip(found.examples, found.scores, strict=True):
        rates.append(fmean(measure_pass(found.task, example, score) for score in scores))
        rewards = [score.total for score in scores if score.total is not None]
        mean = fmean(rewards) if rewards else None
        more = {"reward": mean, "samples": len(scores)}
        rows.append({"id": example.id, "pass_rate": rates[-1], **more})
    write_atomic(path, format_rows(rows))
    return rates


def write_completions(
    found: SampledExamples, path: Path, least: float | None = None, keep: int = 1
) -> tuple[int, int]:
    """Write the examples with the completions that earned enough, as rows for training on them.

    A truncated completion, one with the text of a control token, and one that called a tool is left
    out. At most ``keep`` of an example are written: those with the highest reward, of equal ones
    the first. ``least`` is the reward that they must have earned; None: the full one. Return the
    number of rows, and of the examples that have one.
    """
    data = found.settings.data
    columns: dict[Any, str] = {} if is_mixture(data.train) else {**data.columns}
    tasks = {}  # by ``Example.source``
    for source in data.get_sources("train"):
        tasks |= {f"{source.label}/{name}": name for name in source.tasks}
        tasks[source.label] = source.task or found.settings.task
    rows, count = [], 0
    for example, outputs, scores in zip(found.examples, found.outputs, found.scores, strict=True):
        enough = get_gold_reward(found.task, example) if least is None else least
        totals: dict[str, float] = {}
        for output, score in zip(outputs, scores, strict=True):
            text = output.text
            if len(output.turns) < 2 and earns(score, enough) and _is_complete(text, found):
                totals[text] = max(totals.get(text, score.total or 0.0), score.total or 0.0)
        best = sorted(totals, key=lambda text: -totals[text])[:keep]
        count += bool(best)
        row = _build_row(example, tasks, path.parent) if best else {}
        meta = {name: value for name, value in example.meta.items() if name != TARGET_COLUMN}
        meta |= {"source": example.source} if example.source else {}
        for number, text in enumerate(best, start=1):
            row["id"] = example.id if number == 1 else f"{example.id}#{number}"
            named = {columns.get(name, name): value for name, value in row.items()}
            rows.append({**named, "meta": meta, TARGET_COLUMN: text})
    if not rows:
        totals_of_all = [s.total for scores in found.scores for s in scores if s.total is not None]
        wanted = "the full reward" if least is None else f"a reward of {least:g}"
        raise UserError(
            f"no complete completion earned {wanted}; the highest reward is "
            f"{max(totals_of_all, default=0.0):g}: lower --min-reward, or take more --samples"
        )
    write_atomic(path, format_rows(rows))
    return len(rows), count


def _is_complete(text: str, found: SampledExamples) -> bool:
    """Return whether training can use the text: it ends before the limit, without control tokens.

    Of a server's model without a known tokenizer, only an empty text is refused.
    """
    if not text or not isinstance(found.prompts, PromptBuilder):
        return bool(text)
    tokens = found.prompts.processor.tokenizer(text, add_special_tokens=False)["input_ids"]
    is_short = len(tokens) < found.settings.rollout.max_completion_length
    return is_short and found.prompts.remove_control_tokens(text) == text


def _build_row(example: Example, tasks: Mapping[str, str], folder: Path) -> dict[str, Any]:
    row: dict[str, Any] = {"id": example.id}
    if example.source:
        row["task"] = tasks[example.source]
    row["images"] = [_write_image(image, folder) for image in example.images]
    if example.history:
        turns = (*example.history, Turn("user", example.question))
        row["messages"] = [{"role": turn.role, "content": turn.text} for turn in turns]
    else:
        row["question"] = example.question
    return {**row, "answer": example.answer}


def _write_image(image: ImageRef, folder: Path) -> str:
    """Return the path of an image, from the folder if that contains it, or else its content."""
    if image.path is None:
        content = base64.b64encode(image.read_bytes()).decode()
        return f"data:image;base64,{content}"
    path, root = (Path(os.path.realpath(given)) for given in (image.path, folder))
    return str(path.relative_to(root)) if path.is_relative_to(root) else str(path)


def find_outside_folder(found: SampledExamples, path: Path) -> Path | None:
    """Return the folder of the images that are not in the folder of a file; None if all are."""
    folder = os.path.realpath(path.parent)
    images = [image.path for example in found.examples for image in example.images]
    paths = [Path(os.path.realpath(file.parent)) for file in images if file is not None]
    outside = [file for file in paths if not file.is_relative_to(folder)]
    return Path(os.path.commonpath(outside)) if outside else None
