"""Functions of the official scripts of benchmarks, taken from a git checkout by name.

Several scripts load a model when they are imported, so only the named definitions are imported.
"""

from __future__ import annotations

import ast
import atexit
import copy
import importlib
import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
import textwrap
import types
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from vlm_grpo.benchmarks.definition import load_benchmark
from vlm_grpo.types import Example

SIDE = 100
"""Width and height of the image of every example, in pixels."""
Score = Callable[[str, Example], float]


class Checkout:
    """A git checkout of an official repository."""

    def __init__(self, path: Path) -> None:
        self.path = path.expanduser()
        self.commit = self._git("rev-parse", "--short=7", "HEAD").strip()
        self._temporary = tempfile.TemporaryDirectory()
        self.folder = Path(self._temporary.name)

    def _git(self, *arguments: str) -> str:
        command = ["git", "-C", str(self.path), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    def read(self, file: str) -> str:
        """Return the text of a committed file."""
        return self._git("show", f"HEAD:{file}")

    def list_files(self, folder: str) -> list[str]:
        """Return the paths of a folder's committed files of Python."""
        names = self._git("ls-tree", "-r", "--name-only", "HEAD", folder).splitlines()
        return [name for name in names if name.endswith(".py")]

    def load(self, file: str, *names: str, header: str = "") -> Any:
        """Load functions, classes and variables of a file as a module; none named: the whole file.

        ``header`` is code before them, such as their imports.
        """
        tree = ast.parse(self.read(file))
        kept = [node for node in tree.body if not names or _get_names(node) & set(names)]
        return self.import_source(f"{header}\n{ast.unparse(ast.Module(kept, []))}")

    def find_loop(self, file: str, content: str, kind: type[ast.stmt] = ast.For) -> Any:
        """Return the outermost loop, or statement of a kind, of a file that contains a text."""
        nodes = [node for node in ast.walk(ast.parse(self.read(file))) if isinstance(node, kind)]
        return next(node for node in nodes if content in ast.unparse(node))

    def import_source(self, source: str) -> Any:
        """Import Python source as a module."""
        path = self.folder / f"official_{len(list(self.folder.iterdir()))}.py"
        path.write_text(source)
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module


def _get_names(node: ast.stmt) -> set[str]:
    """Return the names that a statement defines."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else []
    return {target.id for target in targets if isinstance(target, ast.Name)}


def load_refcoco(checkout: Checkout, file: str) -> Score:
    names = ("parse_float_sequence_within", "compute_iou", "compute_accuracy")
    code = checkout.load(file, *names, header="import re")

    def score(text: str, example: Example) -> float:
        predicted = code.parse_float_sequence_within(text)
        return float(code.compute_accuracy(example.answer["boxes"][0], predicted, 0.5))

    return score


def load_vlm_r1(checkout: Checkout, file: str) -> Score:
    code = checkout.load(file, "extract_bbox_answer", "iou", "resize_bbox", header="import re")

    def score(text: str, example: Example) -> float:
        box = code.resize_bbox(code.extract_bbox_answer(text), SIDE, SIDE, SIDE, SIDE)
        return float(code.iou(box, example.answer["boxes"][0]) > 0.5)

    return score


def load_ref_l4(checkout: Checkout, file: str) -> Score:
    overlaps = checkout.load("ref_l4/overlaps.py")
    header = "RefL4Dataset = None\nfrom statistics import mean\nimport torch, math, numpy as np"
    code = checkout.load(file, "RefL4Evaluator", header=header)
    code.bbox_overlaps = overlaps.bbox_overlaps
    reader = load_benchmark("ref_l4").load_task()

    def score(text: str, example: Example) -> float:
        ((box, *_),) = [reader.read(text, example) or [(0.0, 0.0, 0.0, 0.0)]]
        pair = (torch.tensor([box]), torch.tensor([example.answer["boxes"][0]]).float())
        _, accuracy = code.RefL4Evaluator.calculate_iou_acc(*pair, thresh=0.5)
        return accuracy[0.5]

    return score


def load_flickr30k(checkout: Checkout, file: str) -> Score:
    names = ("box_area", "_box_inter_union", "box_iou", "RecallTracker")
    header = (
        "import numpy as np\nfrom collections import defaultdict\nfrom typing import *\n"
        "from pathlib import Path"
    )
    code = checkout.load(file, *names, "Flickr30kEntitiesRecallEvaluator", header=header)
    reader = load_benchmark("flickr30k").load_task()

    def score(text: str, example: Example) -> float:
        ((box, *_),) = [reader.read(text, example) or [(0.0, 0.0, 0.0, 0.0)]]
        evaluator = code.Flickr30kEntitiesRecallEvaluator.__new__(
            code.Flickr30kEntitiesRecallEvaluator
        )
        evaluator.topk, evaluator.iou_thresh, evaluator.all_ids = (1,), 0.5, ["1_0"]
        evaluator.imgid2boxes = {"1": {"7": example.answer["boxes"]}}
        evaluator.imgid2sentences = {"1": [[{"phrase_id": "7", "phrase_type": ["people"]}]]}
        predictions = [{"image_id": 1, "sentence_id": 0, "boxes": [[box]]}]
        return evaluator.evaluate(predictions)[1]["all"]

    return score


def load_seeclick(checkout: Checkout, file: str) -> Score:
    """Load SeeClick's parser; its script compares the point with the box inline, edges included."""
    reading = checkout.find_loop(file, "'box' in response", ast.If)
    code = checkout.load("pretrain/process_utils.py", header="import re")
    read = checkout.import_source(
        f"def read(response, extract_bbox, pred_2_point):\n"
        f"{textwrap.indent(ast.unparse(reading), '    ')}\n    return click_point"
    ).read

    def score(text: str, example: Example) -> float:
        try:
            x, y = read(text, code.extract_bbox, code.pred_2_point)
        except (IndexError, UnboundLocalError):  # no place, which its script catches
            return 0.0
        # After "box" they are shares of the sides; points are in pixels here.
        side = SIDE if "box" in text else 1
        x1, y1, x2, y2 = (edge / side for edge in example.answer["boxes"][0])
        return float(x1 <= x <= x2 and y1 <= y <= y2)

    return score


def load_cv_bench(checkout: Checkout, file: str) -> Score:
    code = checkout.load(file, "_extract_answer_letter", header="import re")
    extract = vars(code)["_extract_answer_letter"]

    def score(text: str, example: Example) -> float:
        gold = "ABCD"[example.answer["options"].index(example.answer["answer"])]
        return float(extract(text) == gold)

    return score


def load_vstar(checkout: Checkout, file: str) -> Score:
    code = checkout.load(file, "extract_answer_letter", header="import re")
    extract, task = vars(code)["extract_answer_letter"], load_benchmark("vstar").load_task()

    def score(text: str, example: Example) -> float:
        return float(extract(text) == task.write(task.gold_answer(example), example))

    return score


def load_hr_bench(checkout: Checkout, file: str) -> Score:
    """Return the rule that comes before a language model, which reads the outputs without one."""
    names = ("can_infer_option", "can_infer_text", "can_infer")
    code = checkout.load(file, *names, header="import os, string\nimport copy as cp")

    def score(text: str, example: Example) -> float:
        options = example.answer["options"]
        choices = dict(zip("ABCD", options, strict=False))
        gold = "ABCD"[options.index(example.answer["answer"])]
        return float(vars(code)["can_infer"](text, choices) == gold)

    return score


def load_tallyqa(checkout: Checkout, file: str) -> Score:
    code = checkout.load(file, "_number_word_to_numeral", "REPLACEMENTS")
    to_numeral = vars(code)["_number_word_to_numeral"]
    return lambda text, example: float(to_numeral(text) == to_numeral(str(example.answer)))


def load_r1_v(checkout: Checkout, file: str) -> Score:
    code = checkout.load(file, "extract_number_answer", header="import re")
    return lambda text, example: float(code.extract_number_answer(text) == example.answer)


def load_ocrbench(checkout: Checkout, file: str) -> Score:
    loop = ast.unparse(checkout.find_loop(file, "data[i]['result'] = 1"))
    code = checkout.import_source(f"def loop(data):\n{textwrap.indent(loop, '    ')}")

    def score(text: str, example: Example) -> float:
        row = {"type": "", "dataset_name": example.meta["dataset_name"], "predict": text}
        code.loop([row := row | {"answers": list(example.answer)}])
        return float(row["result"])

    return score


def load_textvqa(checkout: Checkout, file: str) -> Score:
    evaluator = checkout.load(file).TextVQAAccuracyEvaluator()
    return lambda text, example: evaluator.eval_pred_list(
        [{"pred_answer": text, "gt_answers": example.meta["given"]}]
    )


def load_anls(checkout: Checkout, file: str) -> Score:
    code = checkout.load(file, "levenshtein_distance", "anls", header=_REGISTER)
    return lambda text, example: float(code.anls(list(example.answer), [text])["anls"])


_REGISTER = "def register_metric(**options):\n    return lambda function: function"


def load_words(checkout: Checkout, file: str) -> Score:
    header = (
        "import re, time, torch\nimport torch.nn.functional as F\n"
        "device = torch.device('cpu')\nedit_distance = lambda a, b: 0"
    )
    code = checkout.load(file, "validation", header=header)
    code.Averager = checkout.load("utils.py", "Averager", header="import torch").Averager
    options = types.SimpleNamespace(
        batch_max_length=1, Prediction="CTC", baiduCTC=True, sensitive=True, data_filtering_off=True
    )
    ones = torch.ones(1, 1, dtype=torch.int32)

    def score(text: str, example: Example) -> float:
        converter = types.SimpleNamespace(
            encode=lambda labels, batch_max_length: (ones, ones), decode=lambda *given: [text]
        )
        arguments = (lambda *given: torch.zeros(1, 1, 2), lambda *given: torch.zeros(1))
        loader = [(torch.zeros(1, 1), example.answer)]
        return code.validation(*arguments, loader, converter, options)[1] / 100.0

    return score


def load_lmms_eval_chartqa(checkout: Checkout, file: str) -> Score:
    code = checkout.load(file, "relaxed_correctness")
    return lambda text, example: float(code.relaxed_correctness(text, example.answer))


def load_pix2struct(checkout: Checkout, file: str) -> Score:
    names = ("aggregate_metrics", "relaxed_correctness")
    code = checkout.load(file, *names, header="from typing import *")

    def score(text: str, example: Example) -> float:
        golds = [[example.answer]]
        return code.aggregate_metrics(golds, [text], code.relaxed_correctness) / 100

    return score


def load_mathvista(checkout: Checkout, file: str) -> Score:
    names = ("get_most_similar", "normalize_extracted_answer", "safe_equal")
    header = "import re\nfrom rapidfuzz.distance.Levenshtein import distance"
    code = checkout.load(file, *names, header=header)

    def score(text: str, example: Example) -> float:
        meta = example.meta
        kind = "multi_choice" if meta["choices"] else "free_form"
        more = (kind, meta["answer_type"], meta["precision"])
        found = code.normalize_extracted_answer(text, meta["choices"], *more)
        return float(code.safe_equal(found, example.answer))

    return score


def load_teds(checkout: Checkout, file: str) -> Score:
    """Load PubTabNet's TEDS, which needs ``apted``; a table that it raises on scores 0."""
    header = (
        "from apted import APTED, Config\nfrom apted.helpers import Tree\n"
        "from lxml import etree, html\nfrom collections import deque\n"
        "from types import SimpleNamespace\nfrom rapidfuzz.distance import Levenshtein\n"
        "distance = SimpleNamespace(levenshtein=Levenshtein.distance)"
    )
    teds = checkout.load(file, "TableTree", "CustomConfig", "TEDS", header=header).TEDS()

    def score(text: str, example: Example) -> float:
        pages = (f"<html><body>{table}</body></html>" for table in (text, example.answer))
        try:
            return max(0.0, teds.evaluate(*pages))
        except ValueError:  # a span that is no number
            return 0.0

    return score


def load_olmocr(checkout: Checkout, file: str) -> Score:
    """Load olmOCR's unit tests, which need ``beautifulsoup4``."""
    return _load_olmocr(checkout, file, types.SimpleNamespace())


def load_olmocr_formulas(checkout: Checkout, file: str) -> Score:
    """Load olmOCR's tests of formulas with its renderer, which needs playwright and a chromium.

    All formulas are rendered one after the other in the same page.
    """
    folder = Path(file).with_name("katex")
    for name in ("katex.min.js", "katex.min.css"):
        (checkout.folder / name).write_text(checkout.read(str(folder / name)))
    header = (
        "import json, os, re\nfrom dataclasses import dataclass, replace\nfrom typing import *\n"
        "PlaywrightError = ()"
    )
    names = ("BoundingBox", "SpanInfo", "RenderedEquation", "compare_rendered_equations")
    code = checkout.load(str(folder / "render.py"), *names, "_do_render", header=header)
    render, context = vars(code)["_do_render"], _OnePage()
    code.render_equation = lru_cache(maxsize=None)(
        lambda equation: render(context, equation, "white", "black", 24, False)
    )
    return _load_olmocr(checkout, file, code)


@lru_cache(maxsize=1)
def _open_page() -> Any:
    try:
        library = importlib.import_module("playwright.sync_api")
    except ImportError as error:
        raise ImportError("pip install playwright, and install a chromium") from error
    playwright = library.sync_playwright().start()
    atexit.register(playwright.stop)
    path = shutil.which("chromium") or shutil.which("google-chrome")
    try:  # a sandbox refuses to start as root
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
    except library.Error as error:
        raise ImportError("install a chromium, or playwright install chromium") from error
    return browser.new_context(viewport={"width": 800, "height": 400}).new_page()


class _OnePage:
    """A browser's context whose new pages are all the same one, in which KaTeX stays loaded."""

    _ONCE = ("set_content", "add_style_tag", "add_script_tag", "wait_for_load_state")

    def __init__(self) -> None:
        self.page, self.is_loaded = _open_page(), False

    def new_page(self) -> _OnePage:
        return self

    def close(self) -> None:
        self.is_loaded = True

    def __getattr__(self, name: str) -> Any:
        is_done = self.is_loaded and name in self._ONCE
        return (lambda *given, **named: None) if is_done else getattr(self.page, name)


def _load_olmocr(checkout: Checkout, file: str, renderer: Any) -> Score:
    names = ("TestType", "TestChecked", "ValidationError", "normalize_text", "BasePDFTest")
    tests = ("TextPresenceTest", "TextOrderTest", "TableTest", "BaselineTest", "MathTest")
    header = (
        "import json, re, unicodedata\nfrom dataclasses import dataclass\nfrom enum import Enum\n"
        "from typing import *\nfrom rapidfuzz import fuzz\nfrom fuzzysearch import *"
    )
    code = checkout.load(file, *names, *tests, "load_single_test", header=header)
    code.RepeatDetector = checkout.load("olmocr/repeatdetect.py").RepeatDetector
    tables = checkout.load(str(Path(file).with_name("table_parsing.py")))
    code.parse_html_tables = tables.parse_html_tables
    code.parse_markdown_tables = tables.parse_markdown_tables
    vars(code).update({name: value for name, value in vars(renderer).items() if name[0] != "_"})

    def score(text: str, example: Example) -> float:
        (row,) = example.answer["tests"]
        test = code.load_single_test({"pdf": "a.pdf", "page": 1, "id": "a", **row})
        return float(test.run(text)[0])

    return score


def load_sroie(checkout: Checkout, file: str) -> Score:
    """Load ViBERTgrid's scorer of SROIE's fields, which follows the competition's rules.

    Its filters of dates and totals belong to its model and are left out.
    """
    loop = checkout.find_loop(file, "recall_accum += 1")
    (fields,) = [
        node
        for node in loop.body
        if isinstance(node, ast.For) and "recall_accum" in ast.unparse(node)
    ]
    code = checkout.import_source(
        "SROIE_CLASS_LIST, curr_log = ['others', 'field'], ''\n"
        "SROIE_result_filter = lambda text, class_index: text\n"
        "def count(pred_key_list, key_dict, num_classes=2):\n"
        "    log, recall_accum, precision_accum, curr_num_det = {}, 0, 0, 0\n"
        f"{textwrap.indent(ast.unparse(fields), '    ')}\n"
        "    return recall_accum"
    )
    return lambda text, example: float(code.count(["", text], [{"field": example.answer[0]}]))


def load_clevr(checkout: Checkout, file: str) -> Score:
    """Load the vocabulary of CLEVR's authors; an answer is right if it is the gold one's entry."""
    names = ("SPECIAL_TOKENS", "tokenize", "build_vocab", "encode")
    code = checkout.load(file, *names)
    vocabulary = code.build_vocab(map(str, range(101)))

    def score(text: str, example: Example) -> float:
        found, gold = (
            code.encode([answer], vocabulary, allow_unk=True)
            for answer in (text, str(example.answer))
        )
        return float(found == gold)

    return score


def load_lisa(checkout: Checkout) -> Callable[[list[Any], list[Any]], tuple[float, float]]:
    """Load LISA's gIoU and cIoU of lists of predicted and gold masks."""
    utils = checkout.load("utils/utils.py", "intersectionAndUnionGPU", header="import torch")
    loop = checkout.find_loop("train_ds.py", "acc_iou_meter.update")
    start = next(i for i, line in enumerate(loop.body) if ", acc_iou = " in ast.unparse(line))
    lines = [ast.unparse(line) for line in loop.body[start : start + 2]]
    body = textwrap.indent("\n".join(lines), "    ")
    code = checkout.import_source(
        "from numpy import float64\n"
        f"def measure(output_list, masks_list):\n{body}\n"
        "    ciou = intersection / (union + 1e-10)\n"
        "    return float(acc_iou[1] / len(masks_list)), float(ciou[1])"
    )
    code.intersectionAndUnionGPU = vars(utils)["intersectionAndUnionGPU"]
    return code.measure


def load_vsi_bench(checkout: Checkout, file: str) -> tuple[Score, Callable[[], float]]:
    """Load the score of an output of VSI-Bench, and the overall score of all that were given."""
    names = ("MCA_QUESTION_TYPES", "NA_QUESTION_TYPES", "METRICS_FOR_MCA", "METRICS_FOR_NA")
    names += ("WORST_CASE_FOR_METRICS", "fuzzy_matching", "exact_match", "abs_dist_norm")
    names += ("mean_relative_accuracy", "to_float", "vsibench_process_results")
    names += ("vsibench_aggregate_results",)
    header = (
        "import logging, numpy as np, pandas as pd\nfrom collections import OrderedDict\n"
        "from functools import partial\neval_logger = logging.getLogger('vsi')"
    )
    code = checkout.load(file, *names, header=header)
    rows: list[dict[str, Any]] = []

    def score(text: str, example: Example) -> float:
        row = code.vsibench_process_results({**example.meta["row"]}, [text])["vsibench_score"]
        rows.append(row)
        return float(next(row[key] for key in code.WORST_CASE_FOR_METRICS if key in row))

    return score, lambda: float(code.vsibench_aggregate_results(rows)["overall"]) / 100


def load_vision_reasoner(checkout: Checkout, file: str) -> Score:
    """Load VisionReasoner's accuracy reward, from 0 to 1."""
    names = ("vision_reasoner_accuracy_reward", "batch_iou", "batch_l1_distance")
    names += ("batch_points_distance", "batch_points_in_box")
    header = "import json, re, numpy as np\nfrom scipy.optimize import linear_sum_assignment\n"
    code = checkout.load(file, *names, header=header)
    with_pixel = code.batch_iou

    def without_pixel(boxes: Any, others: Any) -> Any:
        return with_pixel(boxes - [0, 0, 1, 1], others - [0, 0, 1, 1])

    def score(text: str, example: Example) -> float:
        answer = example.answer
        objects = zip(answer["boxes"], answer["points"], strict=True)
        gold = json.dumps([{"bbox_2d": box, "point_2d": point} for box, point in objects])
        found = []
        for measure in (without_pixel, with_pixel):
            code.batch_iou = measure
            found.append(code.vision_reasoner_accuracy_reward(f"<answer>{text}</answer>", gold) / 3)
        if found[0] != found[1] and "kind" not in example.meta:
            example.meta["kind"] = "a pixel more along each side"  # type: ignore[index]
        return float(found[1])

    return score


def load_visual_jigsaw(checkout: Checkout) -> Score:
    """Load Visual Jigsaw's reward of an order, without thinking and without its form."""
    names = ("compute_score", "has_excessive_repetition")
    code = checkout.load("verl/utils/reward_score/visual_jigsaw.py", *names)

    def score(text: str, example: Example) -> float:
        return code.compute_score(text, list(example.answer["order"]), nothink=True)["score"]

    return score


def load_rela(checkout: Checkout) -> Callable[[list[Any]], dict[str, float]]:
    """Load ReLA's scores of gRefCOCO from predicted and gold masks, and whether each is empty."""
    header = (
        "import itertools, json, logging, os, numpy as np, torch\n"
        "from collections import OrderedDict\nDatasetEvaluator = object"
    )
    names = ("computeIoU", "ReferEvaluator")
    code = checkout.load("gres_model/evaluation/refer_evaluation.py", *names, header=header)

    def measure(rows: list[Any]) -> dict[str, float]:
        evaluator = code.ReferEvaluator("grefcoco", distributed=False)
        evaluator.reset()
        fields = ("pred_mask", "gt_mask", "pred_nt", "gt_nt")
        other = {"img_id": 0, "source": "grefcoco", "sent": "", "sent_info": {}}
        evaluator._predictions += [  # noqa: SLF001
            other | dict(zip(fields, row, strict=True)) for row in rows
        ]
        return evaluator.evaluate()["grefcoco"]

    return measure


def load_omnidocbench(checkout: Checkout) -> Callable[[Any, str], tuple[float, float]]:
    """Load OmniDocBench's errors of a page's text and order, which need its requirements.

    These are ``Levenshtein``, ``func_timeout``, ``loguru``, ``pylatexenc`` and ``beautifulsoup4``.
    Both errors are 1 if no block is matched.
    """
    for package in ("dataset", "registry", "utils"):
        for path in checkout.list_files(package):
            target = checkout.folder / path
            target.parent.mkdir(exist_ok=True)
            # The packages themselves import the other benchmarks' code.
            target.write_text("" if target.name == "__init__.py" else checkout.read(path))
    sys.path.insert(0, str(checkout.folder))
    sys.modules.setdefault("evaluate", types.ModuleType("evaluate"))  # for metrics not used here
    dataset = importlib.import_module("dataset.end2end_dataset").End2EndDataset
    header = (
        "import io, json, Levenshtein, pandas as pd, types\nfrom collections import defaultdict\n"
        "METRIC_REGISTRY = types.SimpleNamespace(register=lambda name: lambda item: item)\n"
        "open = lambda *given, **named: io.StringIO()"
    )
    metric = vars(checkout.load("metrics/cal_metric.py", "call_Edit_dist", header=header))
    reader = dataset.__new__(dataset)
    reader.match_method = "quick_match"

    def measure(page: Any, text: str) -> tuple[float, float]:
        copied = copy.deepcopy(page)  # the script writes into it
        matched, _, _, _, order = reader.process_get_matched_elements(copied, text, "a.jpg", 0)
        for row in matched:
            row["img_id"] = "a.jpg"
        if not matched:
            return 1.0, 1.0
        _, result = metric["call_Edit_dist"](matched).evaluate()
        return float(result["Edit_dist"]["ALL_page_avg"]), order["edit"] if order else 1.0

    return measure


def load_charades(checkout: Checkout, file: str, threshold: float | None = None) -> Score:
    """Load Time-R1's parser, and the IoU that its loop computes, or whether that is a hit."""
    code = checkout.load(file, "parse_timestamp_output", header="import re")
    loop = checkout.find_loop(file, "iou_ = ")
    line = next(line for line in ast.unparse(loop).split("\n") if "iou_ = " in line)
    body = f"{line.strip()}\n    return iou_"
    iou = checkout.import_source(f"def compute(s, e, sp, ep):\n    {body}")

    def score(text: str, example: Example) -> float:
        start, end = code.parse_timestamp_output(text)
        value = 0.0 if start is None else max(0.0, iou.compute(*example.answer, start, end))
        return value if threshold is None else float(threshold <= value)

    return score
