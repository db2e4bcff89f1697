"""The mutants of the library: changes of one place, and the test files that should notice them."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TARGETS = {
    "training/update.py": (
        0.5,
        "training/test_batch.py test_wiring.py training/methods/test_kl.py "
        "training/methods/test_warm_start.py training/test_targets_trl.py",
    ),
    "training/batch.py": (0.6, "test_wiring.py training/test_update.py training/test_rollout.py"),
    "training/rollout.py": (0.3, "test_wiring.py"),
    "training/methods/warm_start.py": (
        0.4,
        "training/methods/test_targets.py training/test_targets_trl.py",
    ),
    "training/run_dir.py": (0.2, ""),
    "training/methods/kl.py": (0.5, "test_wiring.py"),
    "training/objective/advantages.py": (0.2, "training/objective/test_trl.py"),
    "training/objective/batch.py": (
        0.5,
        "training/objective/test_losses.py training/objective/test_trl.py",
    ),
    "training/objective/losses.py": (
        0.25,
        "training/objective/test_trl.py test_wiring.py "
        "training/objective/test_brute_force_kl.py training/test_targets_trl.py",
    ),
    "model/engine/attention.py": (
        0.2,
        "model/engine/test_shared.py model/engine/test_devices.py model/engine/test_decode.py",
    ),
    "model/engine/batch.py": (0.3, "model/engine/test_shared.py"),
    "model/engine/kv_cache.py": (0.08, "model/engine/test_decode.py"),
    "model/engine/linear.py": (0.08, ""),
    "model/engine/logprobs.py": (0.3, "test_wiring.py"),
    "model/engine/repeated.py": (
        0.12,
        "model/engine/test_decode.py model/engine/test_shared.py model/engine/test_sampling.py "
        "model/test_policy.py",
    ),
    "model/engine/sampling.py": (0.2, "model/engine/test_decode.py test_wiring.py"),
    "model/engine/shared.py": (
        0.1,
        "model/engine/test_decode.py model/engine/test_graphs.py model/engine/test_kv_cache.py "
        "model/test_policy.py test_wiring.py",
    ),
    "model/engine/vision.py": (0.2, "test_wiring.py"),
    "model/families/family.py": (0.3, "model/families/test_every_family.py"),
    "model/form_check.py": (0.2, ""),
    "task/scorer.py": (0.2, "task/test_batch_rules.py"),
    "training/checkpoint/manager.py": (0.12, "training/test_stops.py"),
    "training/checkpoint/store.py": (0.08, "training/checkpoint/test_manager.py"),
    "dist/optimizer.py": (0.4, "test_wiring.py training/checkpoint/test_manager.py"),
    "training/schedule.py": (0.4, "training/methods/test_warm_start.py"),
    "dist/strategy.py": (0.7, "test_wiring.py training/checkpoint/test_manager.py"),
    "utils/chat.py": (0.5, "task/test_form_rewards.py"),
    "data/messages.py": (0.3, ""),
    "config/prompt.py": (0.4, ""),
    "model/chat.py": (0.3, ""),
    "model/policy.py": (0.2, "model/test_form_check.py"),
    "model/prompts.py": (0.1, "model/test_chat.py training/test_trainer_chats.py"),
    "serve/chat.py": (0.1, ""),
    "training/trainer.py": (0.12, "test_wiring.py training/test_stops.py"),
}
"""The share of each module's mutants to run, and the test files beside its own."""

WRITTEN: list[tuple[str, str, str]] = [
    ("training/batch.py", '"advantages": self.', '"advantages": -self.'),
    ("training/update.py", "old if has_ratio else None)", "None)"),
    ("training/update.py", "if number == 0 and old is not None", "if old is not None"),
    ("training/update.py", "if skipped < len(norms):", "if True:"),
    ("training/update.py", "settings.optim.max_grad_norm or math.inf", "math.inf"),
    ("training/update.py", "self.surrogate, self.methods", "None, self.methods"),
    ("training/objective/losses.py", ".sigmoid() * 4", ".sigmoid() * 2"),
    (
        "training/objective/losses.py",
        "vespo_k_pos, settings.vespo_k_neg",
        "vespo_k_neg, settings.vespo_k_pos",
    ),
    ("training/objective/losses.py", "inputs.surrogate is vespo_loss", "False"),
    ("training/objective/losses.py", "policy = kept / completions", "policy = kept / tokens"),
    (
        "training/batch.py",
        "logprobs=scores.logprobs,",
        "logprobs=torch.cat([torch.cat([part[:-1], part[-1:].detach()]) for part in "
        'scores.logprobs.split(given["lengths"].tolist())]),',
    ),
    ("training/batch.py", "values[index]) if", "values[index.flip(0)]) if"),
    ("training/batch.py", "entropies=scores.entropies", "entropies=None"),
    ("training/methods/kl.py", "self.reference.copy_policy()", "pass"),
    ("training/methods/kl.py", "done == 0 < rollout.step or", ""),
    ("training/methods/warm_start.py", "self.run.strategy.reset_optimizer()", "pass"),
    ("training/update.py", "with_entropy, batch.is_written)", "with_entropy)"),
    ("training/methods/warm_start.py", ", self.end)\n", ")\n"),
    (
        "training/methods/warm_start.py",
        '(*self.tokenizer(text, add_special_tokens=False)["input_ids"], self.end)',
        '(self.end, *self.tokenizer(text, add_special_tokens=False)["input_ids"])',
    ),
    ("training/update.py", "/ max(totals.active_tokens, 1)}", "/ max(len(lengths), 1)}"),
    ("training/update.py", "signal = torch.stack(", "torch.stack("),
    ("training/objective/advantages.py", ".flip(0).cumsum(0).flip(0)", ".cumsum(0)"),
    ("training/schedule.py", "else rate(step - first)", "else rate(step)"),
    ("training/schedule.py", "supervised(step) if settings.is_supervised(step) else ", ""),
    ("training/methods/kl.py", "weights=self.reference.in_place()", ""),
    ("training/methods/kl.py", "self.own.beta * estimate(", "estimate("),
    ("training/batch.py", "return objective.mask_truncated_completions and", "return False and"),
    ("training/update.py", "int(sums[1])", "int(lengths.sum())"),
    ("training/update.py", "[k and p == part for", "[k for"),
    ("training/update.py", "number % len(batch.mini_batches)", "0"),
    ("training/update.py", "{name: weight * count for", "{name: weight for"),
    ("training/update.py", "old = self.logprobs(batch.layout, own, old)", "pass"),
    ("training/rollout.py", "place * mini_batches // len(every)", "place % mini_batches"),
    ("training/batch.py", "weights.new_tensor([-1.0])", "weights.new_tensor([1.0])"),
    ("training/batch.py", "rewards @ weights", "rewards.sum(1)"),
    ("training/methods/kl.py", "and done % every == 0", ""),
    ("training/methods/kl.py", "done % every == 0", "done == 0"),
    ("dist/strategy.py", "self.max_norm)", "math.inf)"),
    ("dist/strategy.py", "if math.isfinite(norm):", "if True:"),
    ("model/engine/sampling.py", ".div_(self.temperature or 1.0)", ""),
    (
        "training/objective/losses.py",
        "policy = kept / tokens",
        "policy = torch.ones_like(kept) / tokens",
    ),
    ("training/objective/losses.py", "entropy_coef * kept", "entropy_coef * torch.ones_like(kept)"),
    ("utils/chat.py", "IMAGE * count + turns[first].text", "turns[first].text + IMAGE * count"),
    ("utils/chat.py", "if found and found != count:", "if found > count:"),
    ("utils/chat.py", "text = self.opening + text", "pass"),
    ("data/messages.py", "images[0].count(IMAGE) < count", "False"),
    ("data/messages.py", "{_BESIDE: iter(others)", "{_BESIDE: iter(others[::-1])"),
    ("config/prompt.py", 'and not (turns and turns[0].role == "system")', ""),
    ("config/prompt.py", "(*turns, message)", "(message,)"),
    ("model/chat.py", "is_native=is_open or is_on", "is_native=is_open"),
    ("model/chat.py", "is_open = text.rstrip()", "is_open = text"),
    ("model/chat.py", "add_generation_prompt=True, **arguments", "add_generation_prompt=True"),
    ("model/prompts.py", "thinking_tags=self.thinking_tags)", "thinking_tags=THINK_TAGS)"),
    ("model/prompts.py", "for turn in turns:", "for turn in turns[-1:]:"),
    ("serve/chat.py", 'if turn.role == "user" else turn.text', ""),
]
"""Module, text and replacement: the signs, constants and data that join the parts of a step."""

SWAPS: dict[type[ast.AST], str] = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
    ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "*", ast.Mod: "//",
    ast.Pow: "*", ast.BitOr: "&", ast.BitAnd: "|", ast.And: "or", ast.Or: "and",
}  # fmt: skip
NAMES = {
    "min": "max", "max": "min", "any": "all", "all": "any", "minimum": "maximum",
    "maximum": "minimum", "amin": "amax", "amax": "amin", "zeros_like": "ones_like",
    "ones": "zeros", "new_zeros": "new_ones", "sum": "mean",
}  # fmt: skip
DROPPED_CALLS = {"detach", "clone", "clamp", "abs", "exp", "sorted", "reversed"}
QUIET = {"logger", "warnings"}


@dataclass(frozen=True)
class Mutant:
    """A change of one module: ``new`` replaces the bytes from ``start`` to ``stop``."""

    module: str
    name: str
    start: int
    stop: int
    new: str


class Finder(ast.NodeVisitor):
    """A finder of the possible mutants of a module."""

    def __init__(self, module: str, source: bytes) -> None:
        self.module, self.source = module, source
        lines = source.splitlines(keepends=True)
        self.offsets = [0]
        for line in lines:
            self.offsets.append(self.offsets[-1] + len(line))
        self.scope: list[str] = []
        self.found: list[Mutant] = []

    def _span(self, node: Any) -> tuple[int, int]:
        start = self.offsets[node.lineno - 1] + node.col_offset
        return start, self.offsets[node.end_lineno - 1] + node.end_col_offset

    def _text(self, node: Any) -> str:
        start, stop = self._span(node)
        return self.source[start:stop].decode()

    def _add(self, node: Any, new: str) -> None:
        """Replace a node in a function; the mutant's name shows its line, or the node if longer."""
        start, stop = self._span(node)
        first, last = start, stop
        if node.lineno == node.end_lineno:
            first, last = self.offsets[node.lineno - 1], self.offsets[node.lineno]
        before, after = self.source[first:start].decode(), self.source[stop:last].decode()
        texts = (" ".join(f"{before}{text}{after}".split()) for text in (self._text(node), new))
        name = f"{self.module} {'.'.join(self.scope)}: {' → '.join(texts)}"
        count = sum(known.name.partition(" #")[0] == name for known in self.found)
        name += f" #{count + 1}" if count else ""
        self.found.append(Mutant(self.module, name, start, stop, new))

    def _swap(self, node: Any, left: Any, operator: ast.AST, right: Any) -> None:
        """Replace the operator between two operands of a node."""
        if type(operator) in SWAPS:
            stop, start = self._span(left)[1], self._span(right)[0]
            between = self.source[stop:start].decode()
            symbol = between.strip("() \n\\")
            self._add(
                node, self._replace(node, stop, start, between, symbol, SWAPS[type(operator)])
            )

    def _replace(self, node: Any, start: int, stop: int, between: str, old: str, new: str) -> str:
        first, last = self._span(node)
        middle = between.replace(old, new, 1)
        return (self.source[first:start] + middle.encode() + self.source[stop:last]).decode()

    def visit_Module(self, node: ast.Module | ast.ClassDef) -> None:
        """Only function bodies are mutated."""
        for child in node.body:
            if isinstance(child, (ast.ClassDef, ast.FunctionDef)):
                self.visit(child)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.scope.append(node.name)
        self.visit_Module(node)
        self.scope.pop()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self.scope.append(node.name)
        for child in node.body:
            self.visit(child)
        self.scope.pop()

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_Raise(self, node: ast.Raise) -> None:
        """Messages are not mutated."""

    visit_JoinedStr = visit_Assert = visit_Raise  # type: ignore[assignment]

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call):
            root: ast.AST = node.value.func
            while isinstance(root, ast.Attribute):
                root = root.value
            if isinstance(root, ast.Name) and root.id in QUIET:
                return
            self._add(node, "pass")
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        operands = [node.left, *node.comparators]
        for left, operator, right in zip(operands, node.ops, operands[1:], strict=False):
            self._swap(node, left, operator, right)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        texts = (ast.List, ast.JoinedStr)  # no operator but + and * would even run
        if not isinstance(node.left, texts) and not isinstance(node.right, texts):
            self._swap(node, node.left, node.op, node.right)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        self._swap(node, node.values[0], node.op, node.values[1])
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if not isinstance(node.operand, ast.Constant):
            self._add(node, self._text(node.operand))
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._add(node, "pass")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self._add(node, str(not node.value))
        elif isinstance(node.value, (int, float)):
            self._add(node, str(node.value + 1))

    def visit_keyword(self, node: ast.keyword) -> None:
        if node.arg != "strict":  # a check of the arguments
            self.generic_visit(node)

    def visit_If(self, node: ast.If | ast.IfExp) -> None:
        if "cuda" in self._text(node.test):  # not reached by tests without a GPU
            return
        if not isinstance(node.test, (ast.Compare, ast.UnaryOp)):  # these are changed themselves
            self._add(node.test, f"not ({self._text(node.test)})")
        self.generic_visit(node)

    visit_IfExp = visit_If

    def visit_Call(self, node: ast.Call) -> None:
        function = node.func
        name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
        if name in NAMES and (name != "sum" or isinstance(function, ast.Attribute)):
            start, stop = self._span(function)
            text = self.source[start:stop].decode().removesuffix(name) + NAMES[name]
            self._add(function, text)
        if name in DROPPED_CALLS:
            kept = function.value if isinstance(function, ast.Attribute) else node.args[0]
            self._add(node, self._text(kept))
        self.generic_visit(node)


@cache
def read_source(module: str) -> bytes:
    """Return the module's source, as it was at the first call."""
    return (ROOT / "vlm_grpo" / module).read_bytes()


def find_mutants(only: Sequence[str] = ("",)) -> list[Mutant]:
    """Return the mutants whose name has one of these texts, in the order of their modules."""
    mutants = []
    for module, (share, _) in TARGETS.items():
        source = read_source(module)
        finder = Finder(module, source)
        finder.visit(ast.parse(source))
        mutants += [m for m in finder.found if _place(m.name) < share]
        for path, old, new in WRITTEN:
            if path == module:
                start = source.index(old.encode())  # a ValueError: the text is to be updated
                name = f"{module}: {old} → {new or 'nothing'}"
                mutants.append(Mutant(module, name, start, start + len(old.encode()), new))
    return [mutant for mutant in mutants if any(text in mutant.name for text in only)]


def list_test_files(mutant: Mutant) -> list[str]:
    """Return the test files of the mutant's module, in order."""
    path = Path(mutant.module)
    own = str(path.with_name(f"test_{path.name}"))
    files = [own] * (ROOT / "tests" / own).exists() + TARGETS[mutant.module][1].split()
    return [f"tests/{file}" for file in files]


def _place(name: str) -> float:
    """Return a number in [0, 1) that depends on the name alone."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4]) / 2**32
