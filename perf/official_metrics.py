"""Compare the metrics of benchmarks with the code of their official scripts.

    python perf/official_metrics.py lmms-eval=~/lmms-eval R1-V=~/R1-V …

Each argument is a repository and a git checkout of it, which the user has made; its committed files
are read, so a bare clone is enough. Every comparison whose repository is given draws outputs at
random, half of them adversarial, scores them with the official functions and with ours, and counts
the outputs with another score, by class. Functions are taken from the scripts by name: several of
them load a model when they are imported. The table goes into docs/parity.md.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import logging
import random
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import official_scripts as scripts
import random_objects as shapes
import random_outputs as outputs
import random_pages as pages
import torch
from official_scripts import Checkout, Score
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from random_formulas import draw_formula
from random_outputs import draw_scene, make_example
from random_pages import change_page
from scipy.stats import spearmanr

from vlm_grpo.benchmarks.definition import load_benchmark
from vlm_grpo.data_scripts.omnidocbench import build_markdown
from vlm_grpo.task.registry import load_task
from vlm_grpo.tasks import segmentation
from vlm_grpo.tasks.document import edit_distance, order_distance
from vlm_grpo.tasks.graders.masks import decode_mask
from vlm_grpo.types import Example


@dataclass(frozen=True)
class Comparison:
    """One benchmark's metric, its official script, and the outputs to score with both.

    Attributes:
        benchmark: name of the benchmark.
        repository: name of the official repository.
        file: its script.
        load: maps a checkout to the official score of an output.
        draw: draws an example and an output.
        metric: the benchmark's metric; None: the headline.
        what: what is drawn, if it is a part of the benchmark.
    """

    benchmark: str
    repository: str
    file: str
    load: Callable[[Checkout, str], Score]
    draw: Callable[[random.Random], tuple[Example, str]]
    metric: str | None = None
    what: str = ""


_PALIGEMMA = "big_vision/evaluators/proj/paligemma/transfers/tallyqa.py"
_SUPER_CLEVR = "src/eval/test_qwen2vl_counting_superclevr.py"
_REFCOCO = "lmms_eval/tasks/refcoco/utils_rec.py"
_ANLS = "lmms_eval/api/metrics.py"
_VSI_BENCH = "lmms_eval/tasks/vsibench/utils.py"
COMPARISONS = [
    Comparison(*row)
    for row in (
        ("refcoco", "lmms-eval", _REFCOCO, scripts.load_refcoco, outputs.draw_grounding),
        ("refcocoplus", "lmms-eval", _REFCOCO, scripts.load_refcoco, outputs.draw_grounding),
        ("refcocog", "lmms-eval", _REFCOCO, scripts.load_refcoco, outputs.draw_grounding),
        ("lisa_grounding", "VLM-R1", "src/eval/test_rec_r1.py", scripts.load_vlm_r1,
         outputs.draw_tagged_grounding),
        ("ref_l4", "Ref-L4", "ref_l4/evaluation.py", scripts.load_ref_l4, outputs.draw_grounding),
        ("flickr30k", "mdetr", "datasets/flickr_eval.py", scripts.load_flickr30k,
         outputs.draw_grounding),
        ("tallyqa", "big_vision", _PALIGEMMA, scripts.load_tallyqa, outputs.draw_counting),
        ("countbenchqa", "big_vision", _PALIGEMMA, scripts.load_tallyqa, outputs.draw_counting),
        ("super_clevr_200", "R1-V", _SUPER_CLEVR, scripts.load_r1_v, outputs.draw_tagged_counting),
        ("screenspot", "SeeClick", "pretrain/screenspot_test.py", scripts.load_seeclick,
         outputs.draw_clicking),
        ("cv_bench", "lmms-eval", "lmms_eval/tasks/cv_bench/utils.py", scripts.load_cv_bench,
         outputs.draw_choosing, "exact"),
        ("vstar", "lmms-eval", "lmms_eval/tasks/vstar_bench/utils.py", scripts.load_vstar,
         outputs.draw_choosing),
        ("hr_bench_4k", "HR-Bench", "hrbench/vlmeval/utils/matching_util.py",
         scripts.load_hr_bench, outputs.draw_choosing),
        ("ocrbench", "MultimodalOCR", "OCRBench/example.py", scripts.load_ocrbench,
         outputs.draw_ocrbench),
        ("textvqa", "mmf", "mmf/utils/m4c_evaluators.py", scripts.load_textvqa,
         outputs.draw_annotated),
        ("docvqa", "lmms-eval", _ANLS, scripts.load_anls, outputs.draw_reading),
        ("infovqa", "lmms-eval", _ANLS, scripts.load_anls, outputs.draw_reading),
        ("stvqa", "lmms-eval", _ANLS, scripts.load_anls, outputs.draw_reading, "anls_rrc"),
        ("chartqa", "lmms-eval", "lmms_eval/tasks/chartqa/utils.py",
         scripts.load_lmms_eval_chartqa, outputs.draw_numeric),
        ("chartqa", "pix2struct", "pix2struct/metrics.py", scripts.load_pix2struct,
         outputs.draw_numeric),
        ("mathvista", "MathVista", "evaluation/calculate_score.py", scripts.load_mathvista,
         outputs.draw_mathvista),
        ("iiit5k", "deep-text-recognition", "test.py", scripts.load_words, outputs.draw_word_image),
        ("icdar2015", "deep-text-recognition", "test.py", scripts.load_words,
         outputs.draw_word_image),
        ("sroie", "ViBERTgrid", "eval_SROIE.py", scripts.load_sroie, outputs.draw_field),
        ("clevr", "clevr-iep", "iep/preprocess.py", scripts.load_clevr, outputs.draw_counting),
        ("pubtabnet", "PubTabNet", "src/metric.py", scripts.load_teds, pages.draw_table),
        *(
            ("olmocr_bench", "olmocr", "olmocr/bench/tests.py", scripts.load_olmocr,
             partial(pages.draw_page, kind=kind), "passed", f"tests `{kind}`")
            for kind in ("present", "order", "table", "baseline")
        ),
        ("olmocr_bench", "olmocr", "olmocr/bench/tests.py", scripts.load_olmocr_formulas,
         draw_formula, "passed", "tests `math`"),
        ("charades_sta", "Time-R1", "evaluate.py", scripts.load_charades, pages.draw_interval,
         "iou"),
        *(
            ("charades_sta", "Time-R1", "evaluate.py",
             partial(scripts.load_charades, threshold=threshold / 100), pages.draw_interval,
             f"recall_{threshold}")
            for threshold in (30, 50, 70)
        ),
        ("reason_seg_masks", "Seg-Zero", "verl/utils/reward_score/vision_reasoner.py",
         scripts.load_vision_reasoner, shapes.draw_objects, "located"),
    )
]  # fmt: skip


def compare(
    comparison: Comparison, checkout: Checkout, count: int, seed: int
) -> tuple[Counter[str], float]:
    """Return the number of outputs with another score than the script's, by class, and its mean."""
    benchmark = load_benchmark(comparison.benchmark)
    task, metric = benchmark.load_task(), comparison.metric or benchmark.metric
    rng = random.Random(f"{seed} {comparison.benchmark}")
    official = comparison.load(checkout, comparison.file)
    found: Counter[str] = Counter()
    total = 0.0
    for _ in range(count):
        example, text = comparison.draw(rng)
        score = task.score(text, example)
        ours = {**score.rewards, **score.metrics}[metric]
        with redirect_stdout(io.StringIO()):
            theirs = official(text, example)
        total += theirs
        if ours is None or abs(ours - theirs) > 1e-9:
            kind = example.meta.get("kind") or classify(text)
            passed, failed = ("here", "the script")[:: 1 if (ours or 0.0) > theirs else -1]
            kind = kind.format(passed=passed, failed=failed)
            found["other" if task.tags else kind] += 1
            logging.info("%s", (comparison.benchmark, text[-90:], example.answer, ours, theirs))
    return found, total / count


def classify(text: str) -> str:
    """Return the class of an output that is scored differently."""
    if "<answer>" in text or "<think>" in text:
        return "in tags or after thinking"
    return "white space at the ends" if text != text.strip() else "other"


def build_coco(scenes: Sequence[tuple[Example, str]]) -> tuple[dict[str, list], list[dict]]:
    """Return scenes as COCO's annotations and results, as a user of its API would write them."""
    names = ["bus", "cat", "red dog"]
    annotations, results = [], []
    for image, (example, text) in enumerate(scenes):
        crowd = example.meta.get("crowd", {"boxes": [], "labels": []})
        for is_crowd, objects in enumerate([example.answer, crowd]):
            for box, label in zip(objects["boxes"], objects["labels"], strict=True):
                row = {"id": len(annotations) + 1, "iscrowd": is_crowd, **to_row(image, box)}
                annotations.append(row | {"category_id": names.index(label)})
        for found in json.loads(text):
            row = {"score": 1.0, "category_id": names.index(found["label"])}
            results.append(row | to_row(image, found["bbox_2d"]))
    images = [{"id": image} for image in range(len(scenes))]
    categories = [{"id": number, "name": name} for number, name in enumerate(names)]
    return {"images": images, "categories": categories, "annotations": annotations}, results


def to_row(image: int, box: Sequence[float]) -> dict[str, Any]:
    x1, y1, x2, y2 = box
    return {
        "image_id": image,
        "bbox": [x1, y1, x2 - x1, y2 - y1],
        "area": (x2 - x1) * (y2 - y1),
    }


def compute_official_ap(dataset: Any, results: list[dict]) -> float:
    with redirect_stdout(io.StringIO()):
        coco = COCO()
        coco.dataset = dataset
        coco.createIndex()
        evaluation = COCOeval(coco, coco.loadRes(results), "bbox")
        for step in (evaluation.evaluate, evaluation.accumulate, evaluation.summarize):
            step()
    return float(evaluation.stats[0])


def _has_flat_box(results: Sequence[dict]) -> bool:
    """Return whether a detection has no area: the reader leaves it out, and COCO counts it."""
    return any(min(row["bbox"][2:]) <= 0 for row in results)


def compare_detection(name: str, nms: Any | None, count: int, seed: int) -> tuple[int, Counter]:
    """Return the number of images, in sets of 25, and of sets with another AP by class.

    Args:
        name: name of the benchmark.
        nms: OVDEval's functions; None: COCO's AP, with crowds and more than 100 boxes per image.
        count: least number of images.
        seed: seed of the scenes.
    """
    task, rng, wrong = load_benchmark(name).load_task(), random.Random(seed), Counter()
    sets = range(-(-count // 25))
    for _ in sets:
        scenes = [draw_scene(rng, nms is None, 400 if nms is None else 6) for _ in range(25)]
        dataset, results = build_coco(scenes)
        if nms is not None:
            by_image: dict[int, list] = {image: [] for image in range(25)}
            for row in results:
                by_image[row["image_id"]].append(row)
            golds = {i: [a for a in dataset["annotations"] if a["image_id"] == i] for i in by_image}
            results = [
                row
                for i, rows in by_image.items()
                if rows
                for row in nms.nms_threaded(golds[i], rows, 0.5, 1)
            ]
        answers = [task.read(text, example) for example, text in scenes]
        metrics = task.corpus_metrics(answers, [example for example, _ in scenes])
        ours, theirs = metrics[task.primary_metric], compute_official_ap(dataset, results)
        if abs(ours - theirs) > 1e-9:
            wrong[f"sets of 25, {'with' if _has_flat_box(results) else 'without'} a flat box"] += 1
        logging.info("%s %s", ours, theirs)
    return 25 * len(sets), wrong


def compare_fsc147(checkout: Checkout, count: int, seed: int) -> tuple[int, Counter]:
    """Return the number of counts, and which of MAE and RMSE differ."""
    loop = checkout.find_loop("test.py", "SAE += err")
    lines = [ast.unparse(statement) for statement in loop.body]
    lines = [line for line in lines if line.startswith(("cnt =", "err =", "SAE +=", "SSE +="))]
    body = textwrap.indent("\n".join(lines), " " * 8)
    code = checkout.import_source(
        f"def total(pairs):\n    cnt = SAE = SSE = 0\n    for gt_cnt, pred_cnt in pairs:\n{body}\n"
        "    return SAE / cnt, (SSE / cnt) ** 0.5"
    )
    rng, task = random.Random(seed), load_benchmark("fsc147").load_task()
    golds = [rng.randint(7, 3731) for _ in range(count)]
    texts = [rng.choice(["", "many", str(gold + rng.randint(-7, 99))]) for gold in golds]
    examples = [make_example(gold) for gold in golds]
    answers = [task.read(text, row) for text, row in zip(texts, examples, strict=True)]
    values = [
        task.score(text, row).metrics["mae"] for text, row in zip(texts, examples, strict=True)
    ]
    answers = [task.read(text, row) for text, row in zip(texts, examples, strict=True)]
    ours = (
        float(np.mean(np.array(values, float))),
        task.corpus_metrics(answers, examples)["rmse_all"],
    )
    # The script always has a count: an output without one is 0.
    theirs = code.total(
        [(g, int(t) if t.isdigit() else 0) for g, t in zip(golds, texts, strict=True)]
    )
    names = ("mae", "rmse_all")
    return count, Counter(
        n for n, a, b in zip(names, ours, theirs, strict=True) if abs(a - b) > 1e-9
    )


def compare_reason_seg(checkout: Checkout, count: int, seed: int) -> tuple[int, Counter]:
    """Return the number of boxes, filled to masks, and of those with another IoU, by measure."""
    measure, rng = scripts.load_lisa(checkout), random.Random(seed)
    task, wrong, masks = load_benchmark("reason_seg").load_task(), Counter(), []
    for _ in range(count):
        gold = outputs.draw_box(rng)
        found = [round(edge) for edge in outputs.draw_box_near(rng, gold)]
        example = make_example({"boxes": [gold]})
        text = outputs.write_box(rng, found)
        score = task.score(text, example)
        ours = {**score.rewards, **score.metrics}["iou"]
        boxes = [(task.read(text, example) or [(0, 0, 0, 0)])[0], gold]
        masks.append([_fill(box) for box in boxes])
        theirs, _ = measure(*([mask] for mask in masks[-1]))
        is_outside = min(boxes[0]) < 0 or max(boxes[0]) > scripts.SIDE
        # The script adds 1e-5 to the union, in single precision.
        kind = "a box beyond the edge of the image" if is_outside else "other"
        wrong[kind] += abs(ours - theirs) > 1e-5
        logging.info("%s", ("reason_seg", text, gold, ours, theirs))
    giou, ciou = measure(*zip(*masks, strict=True))
    print(f"reason_seg: gIoU {giou:.4f}, cIoU {ciou:.4f}")
    return count, wrong


def _fill(box: Sequence[float]) -> torch.Tensor:
    mask = torch.zeros(scripts.SIDE, scripts.SIDE)
    x1, y1, x2, y2 = (max(0, int(edge)) for edge in box)
    mask[y1:y2, x1:x2] = 1
    return mask


def compare_masks(
    name: str, measure: Callable[[list[Any]], dict[str, float]], count: int, seed: int
) -> tuple[int, Counter]:
    """Return the number of outputs, in sets of 25, and of sets with other scores, by score.

    A box of an answer stands for the mask that a segmenter makes of it.

    Args:
        name: name of the benchmark.
        measure: the official scores of predicted masks, gold masks, in which 255 is left out, and
            whether each is stated to be empty.
        count: least number of outputs.
        seed: seed of the scenes.
    """
    task, wrong = load_benchmark(name).load_task(), Counter()
    rng = random.Random(f"{seed} {name}")
    least = 0 if name == "grefcoco" else 1
    segmentation._segment = lambda _, image, answer: shapes.fill([b for b, _ in answer])  # noqa: SLF001
    sets = range(-(-count // 25))
    for _ in sets:
        examples, answers, rows = [], [], []
        while len(rows) < 25:
            example, text = shapes.draw_objects(rng, least)
            if not least and "ignored_mask" in example.meta:  # a field of ReasonSeg alone
                continue
            answer, gold = task.read(text, example), shapes.fill(example.answer["boxes"])
            gold = gold.astype(np.uint8)
            if "ignored_mask" in example.meta:
                gold[decode_mask(example.meta["ignored_mask"], (scripts.SIDE, scripts.SIDE))] = 255
            found = shapes.fill([box for box, _ in answer or ()])
            rows.append((found, gold, answer == (), not example.answer["boxes"]))
            examples.append(example)
            answers.append(answer)
        ours, theirs = task.corpus_metrics(answers, examples), measure(rows)
        # LISA adds 1e-5 to a union, in single precision; ReLA has 0 where no example is empty.
        wrong.update(key for key, value in theirs.items() if abs(ours.get(key, 0.0) - value) > 1e-5)
        logging.info("%s", (name, ours, theirs))
    return 25 * len(sets), Counter({f"sets of 25 by `{k}`": n for k, n in wrong.items()})


def measure_by_lisa(checkout: Checkout) -> Callable[[list[Any]], dict[str, float]]:
    measure = scripts.load_lisa(checkout)

    def compute(rows: list[Any]) -> dict[str, float]:
        pairs = [[torch.from_numpy(mask.astype(np.float32)) for mask in row[:2]] for row in rows]
        giou, ciou = measure(*([pair[i].clone() for pair in pairs] for i in (0, 1)))
        return {"mask_giou": giou, "mask_ciou": ciou}

    return compute


def measure_by_rela(checkout: Checkout) -> Callable[[list[Any]], dict[str, float]]:
    measure = scripts.load_rela(checkout)

    def compute(rows: list[Any]) -> dict[str, float]:
        found = measure(rows)
        return {
            "mask_giou": found["gIoU"] / 100,
            "mask_ciou": found["cIoU"] / 100,
            "n_acc": found["N_acc"],
            "t_acc": found["T_acc"],
        }

    return compute


def compare_vsi_bench(checkout: Checkout, count: int, seed: int) -> tuple[str, Counter, Counter]:
    """Return the number of outputs with their mean score, those with another score by class, and
    whether the overall score differs, of all outputs and of those alone that are scored alike."""
    task, rng = load_benchmark("vsi_bench").load_task(), random.Random(f"{seed} vsi_bench")
    found, totals = Counter(), []
    for alike in (False, True):
        official, overall = scripts.load_vsi_bench(checkout, _VSI_BENCH)
        examples, answers, total = [], [], 0.0
        while len(examples) < count:
            example, text = shapes.draw_estimate(rng)
            if alike and "kind" in example.meta:
                continue
            score, theirs = task.score(text, example), official(text, example)
            total += theirs
            if abs(score.metrics["mra"] - theirs) > 1e-9:
                found[example.meta.get("kind") or ("other, alike" if alike else "other")] += 1
                logging.info("%s", ("vsi_bench", text, example.answer, score.metrics, theirs))
            examples.append(example)
            answers.append(task.read(text, example))
        ours = task.corpus_metrics(answers, examples)["category_mean"]
        totals.append((ours, overall()))
        if not alike:
            mean = f"{count:,} ({total / count:.2f})"
    (ours, theirs), (own, other) = totals
    overall = Counter({f"{ours:.4f} here and {theirs:.4f} there, of all": 1})
    overall[f"{own:.4f} and {other:.4f}, of outputs in the form that is asked for"] = 1
    return mean, found, overall


def compare_visual_jigsaw(checkout: Checkout, count: int, seed: int) -> tuple[int, Counter]:
    """Return the number of orders, and of those with another reward by class."""
    official, task = scripts.load_visual_jigsaw(checkout), load_task("self_supervised")
    rng, wrong = random.Random(seed), Counter()
    for _ in range(count):
        example, text = shapes.draw_order(rng)
        ours, theirs = task.score(text, example).rewards["solved"], official(text, example)
        if abs(ours - theirs) > 1e-9:
            is_small = ours > theirs and len(example.answer["order"]) == 4
            wrong["a part of 4 tiles" if is_small else "no order of the tiles"] += 1
            logging.info("%s", ("jigsaw", text, example.answer, ours, theirs))
    return count, wrong


def compare_omnidocbench(checkout: Checkout, count: int, seed: int) -> tuple[int, Counter]:
    """Return the number of outputs for the demo pages, and of those with other errors."""
    measure = scripts.load_omnidocbench(checkout)
    demo = "demo_data/omnidocbench_demo/OmniDocBench_demo.json"
    pages, rng = json.loads(checkout.read(demo)), random.Random(seed)
    rows = []
    for i in range(count):
        page = pages[i % len(pages)]
        gold = build_markdown(page)
        form, text = change_page(rng, gold)
        with redirect_stdout(io.StringIO()):
            theirs = measure(page, text)
        ours = (edit_distance(text, gold), order_distance(text, gold)) if text.strip() else (1, 1)
        rows.append((*ours, *theirs))
        logging.info("%s", ("omnidocbench", page["page_info"]["image_path"], form, ours, theirs))
    values, found = np.array(rows), Counter()
    for i, name in enumerate(("text", "order")):
        ours, theirs = values[:, i], values[:, i + 2]
        means = f"means {ours.mean():.3f} here and {theirs.mean():.3f}"
        likeness = f"rank correlation {spearmanr(ours, theirs).statistic:.2f}"
        found[f"of the {name} ({means}, {likeness})"] = int(np.sum(abs(ours - theirs) > 1e-9))
    return count, found


def compare_logs(checkout: Checkout) -> tuple[int, Counter]:
    """Return the number of outputs in R1-V's own logs, and of those with another score."""
    task, count, wrong = load_benchmark("super_clevr_200").load_task(), 0, Counter()
    for name in ("grpo100", "instruct"):
        middle = "instruct_grpo100" if name == "grpo100" else name
        file = f"src/eval/logs/counting_results_superclevr_200_qwen2vl_2b_{middle}_legacy.json"
        log = json.loads(checkout.read(file))
        rows = log["results"]
        scores = [
            task.score(row["model_output"], make_example(int(row["ground_truth"]))).rewards["exact"]
            for row in rows
        ]
        mean = 100 * np.mean(np.array(scores, float))
        print(f"{file}: {mean:.1f}; the log says {log['accuracy']:.1f}")
        count += len(rows)
        wrong["outputs"] += sum(
            score != float(row["extracted_answer"] == row["ground_truth"])
            for score, row in zip(scores, rows, strict=True)
        )
    return count, wrong


def compare_formulas(checkout: Checkout) -> tuple[int, Counter]:
    """Return the number of pairs of formulas in olmOCR's own tests and samples, and differences."""
    tree = ast.parse(checkout.read("tests/test_katex_render.py"))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and node.args]
    render = "render_equation"
    formulas = {ast.literal_eval(c.args[0]) for c in calls if ast.unparse(c.func) == render}
    samples = checkout.read("olmocr/bench/sample_data/dataset.jsonl").splitlines()
    formulas |= {row["math"] for row in map(json.loads, filter(None, samples)) if "math" in row}
    official = scripts.load_olmocr_formulas(checkout, "olmocr/bench/tests.py")
    task, found = load_benchmark("olmocr_bench").load_task(), Counter()
    for gold, output in product(sorted(formulas), repeat=2):
        example, text = make_example({"tests": [{"type": "math", "math": gold}]}), f"${output}$"
        with redirect_stdout(io.StringIO()):
            theirs = official(text, example)
        if (ours := task.score(text, example).rewards["passed"]) != theirs:
            found["passed here" if ours > theirs else "passed by the script"] += 1
            logging.info("%s", ("formulas", text, gold, ours, theirs))
    return len(formulas) ** 2, found


def format_classes(found: Counter[str]) -> str:
    return "; ".join(f"{number} {name}" for name, number in found.most_common() if number) or "0"


def list_results(
    checkouts: dict[str, Checkout], count: int, seed: int
) -> Iterator[tuple[str, str, str, str]]:
    """Yield benchmark, source, number of outputs and their mean, and differences by class."""
    for comparison in COMPARISONS:
        if (checkout := checkouts.get(comparison.repository)) is None:
            continue
        source = f"{comparison.repository} {checkout.commit}, `{comparison.file}`"
        name = comparison.benchmark + (f", `{comparison.metric}`" if comparison.metric else "")
        name += comparison.what and f", {comparison.what}"
        try:
            found, mean = compare(comparison, checkout, count, seed)
        except ImportError as error:
            yield name, source, "–", f"not compared: {error}"
            continue
        yield name, source, f"{count:,} ({mean:.2f})", format_classes(found)
    rows: list[tuple[str, str, tuple[int, Counter]]] = []
    if checkout := checkouts.get("R1-V"):
        source = f"R1-V {checkout.commit}, `src/eval/logs`"
        rows.append(("super_clevr_200, its logs", source, compare_logs(checkout)))
    if checkout := checkouts.get("olmocr"):
        source = f"olmocr {checkout.commit}, `tests/test_katex_render.py`"
        with suppress(ImportError):  # the row of its tests says what is missing
            rows.append(("olmocr_bench, pairs of its formulas", source, compare_formulas(checkout)))
    if checkout := checkouts.get("LearningToCountEverything"):
        source = f"LearningToCountEverything {checkout.commit}, `test.py`"
        rows.append(("fsc147", source, compare_fsc147(checkout, count, seed)))
    if checkout := checkouts.get("LISA"):
        source = f"LISA {checkout.commit}, `train_ds.py`"
        rows.append(
            ("reason_seg, `iou`, filled boxes", source, compare_reason_seg(checkout, count, seed))
        )
        for name in ("reason_seg_masks", "refcoco_masks"):
            numbers = compare_masks(name, measure_by_lisa(checkout), count, seed)
            rows.append((f"{name}, gIoU and cIoU", source, numbers))
    if checkout := checkouts.get("ReLA"):
        source = f"ReLA {checkout.commit}, `gres_model/evaluation/refer_evaluation.py`"
        numbers = compare_masks("grefcoco", measure_by_rela(checkout), count, seed)
        rows.append(("grefcoco, gIoU, cIoU, N-acc and T-acc", source, numbers))
    if checkout := checkouts.get("thinking-in-space"):
        source = f"thinking-in-space {checkout.commit}, `{_VSI_BENCH}`"
        mean, found, overall = compare_vsi_bench(checkout, count, seed)
        yield "vsi_bench, `mra`", source, mean, format_classes(found)
        yield "vsi_bench, overall", source, f"{2 * count:,}", "; ".join(overall)
    if checkout := checkouts.get("visual_jigsaw"):
        source = f"visual_jigsaw {checkout.commit}, `verl/utils/reward_score/visual_jigsaw.py`"
        rows.append(
            (
                "no benchmark: `solved` of a jigsaw",
                source,
                compare_visual_jigsaw(checkout, count, seed),
            )
        )
    if checkout := checkouts.get("OmniDocBench"):
        source = f"OmniDocBench {checkout.commit}, `dataset/end2end_dataset.py`"
        numbers = compare_omnidocbench(checkout, count, seed)
        rows.append(("omnidocbench, its demo pages", source, numbers))
    if checkout := checkouts.get("OVDEval"):
        nms = checkout.load("eval.py", "calculate_iou", "nms_threaded", header="import numpy as np")
        numbers = compare_detection("ovdeval", nms, count, seed)
        rows.append(("ovdeval", f"OVDEval {checkout.commit}, `eval.py`", numbers))
    numbers = compare_detection("coco", None, count, seed)
    rows.append(("coco", f"pycocotools {version('pycocotools')}", numbers))
    for name, source, (total, wrong) in rows:
        yield name, source, f"{total:,}", format_classes(wrong)


def main() -> None:
    """Print the table of docs/parity.md."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("checkouts", nargs="*", metavar="REPOSITORY=FOLDER")
    parser.add_argument("--count", type=int, default=2000, help="outputs for each benchmark")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--verbose", action="store_true", help="print every difference")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO if options.verbose else logging.WARNING)
    known = {comparison.repository for comparison in COMPARISONS}
    known |= {"LearningToCountEverything", "OVDEval", "LISA", "OmniDocBench", "ReLA"}
    known |= {"thinking-in-space", "visual_jigsaw"}
    pairs = [argument.partition("=")[::2] for argument in options.checkouts]
    if unknown := sorted({name for name, _ in pairs} - known):
        parser.error(f"{', '.join(unknown)}: give some of {', '.join(sorted(known))}")
    checkouts = {name: Checkout(Path(folder)) for name, folder in pairs}
    columns = ("benchmark", "official code", "outputs (mean score)", "scored differently")
    print(f"| {' | '.join(columns)} |\n|{' --- |' * len(columns)}")
    for row in list_results(checkouts, options.count, options.seed):
        print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
