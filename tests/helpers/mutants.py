"""Mutation testing: change the library in one place at a time, and run the tests of that place.

    python tests/helpers/mutants.py --jobs 2             # all mutants; continues an earlier run
    python tests/helpers/mutants.py --only training/rollout  # those whose name has this text
    python tests/helpers/mutants.py --retry              # again those that survived
    python tests/helpers/mutants.py --names

docs/testing.md says which changes there are, and which of them run. The library and its tests are
imported once. Each mutant is a fork, in which the function's code is replaced and tests run until
one fails or the time limit is exceeded (killed), or all pass or a fortieth of the time of all tests
is spent (survived).
cosmic-ray would import all for each mutant; mutmut's wrappers meet the hook that checks shapes.
Results are kept with a checksum of the function. After other changes than of functions, delete
``build/mutants.jsonl`` to run all.
"""

import ast
import gc
import hashlib
import json
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, TextIO

import coverage
import pytest
import typer

ROOT = Path(__file__).resolve().parents[2]
SHARES: dict[float, str] = {
    0.08: (
        "model/engine/decode_attention model/engine/kv_cache model/engine/linear "
        "model/engine/slot_scheduler training/checkpoint/checksums training/checkpoint/files"
    ),
    0.1: "model/chat_template model/engine/shared model/prompts serve/chat_client",
    0.12: (
        "model/engine/repeated training/checkpoint/manager training/checkpoint/resume "
        "training/trainer"
    ),
    0.2: (
        "model/engine/attention model/engine/sampling model/engine/vision model/policy "
        "model/sharing_check task/scorer training/objective/advantages training/run_dir"
    ),
    0.25: "training/objective/kl training/objective/losses",
    0.3: (
        "data/messages dist/balance model/engine/packing model/engine/logprobs "
        "model/families/family training/rollout"
    ),
    0.4: "config/prompt dist/optimizer training/methods/warm_start training/learning_rate",
    0.5: "training/methods/kl training/objective/token_batch training/update utils/chat",
    0.6: "training/step_batch",
    0.7: "dist/strategy",
}
TARGETS = {f"{name}.py": share for share, names in SHARES.items() for name in names.split()}
"""The share of each module's mutants to run."""
OTHERS = ("benchmarks", "data_scripts", "docs", "environments", "media", "tasks", "vllm")
"""Folders of tests that are left out: most of them make no step."""

WRITTEN = """\
training/step_batch.py: "advantages": self. → "advantages": -self.
training/update.py: old if has_ratio else None) → None)
training/update.py: if number == 0 and old is not None → if old is not None
training/update.py: if skipped < len(norms): → if True:
training/update.py: settings.optim.max_grad_norm or math.inf → math.inf
training/update.py: self.surrogate, self.methods → None, self.methods
training/objective/losses.py: .sigmoid() * 4 → .sigmoid() * 2
training/objective/losses.py: vespo_k_pos, settings.vespo_k_neg → vespo_k_neg, settings.vespo_k_pos
training/objective/losses.py: inputs.surrogate is vespo_loss → False
training/objective/losses.py: policy = kept / completions → policy = kept / tokens
training/step_batch.py: logprobs=scores.logprobs, → logprobs=torch.cat([torch.cat([part[:-1], \
part[-1:].detach()]) for part in scores.logprobs.split(given["lengths"].tolist())]),
training/step_batch.py: values[index]) if → values[index.flip(0)]) if
training/step_batch.py: entropies=scores.entropies → entropies=None
training/methods/kl.py: self.snapshot.move() → pass
training/methods/kl.py: done == 0 < rollout.step or → nothing
training/methods/warm_start.py: self.run.strategy.optimizer.state.clear() → pass
training/update.py: with_entropy, batch.is_written, others) → with_entropy, False, others)
training/methods/warm_start.py: own, self.end) → own)
training/methods/warm_start.py: (*before, *own, self.end) → (self.end, *before, *own)
training/update.py: / max(totals.active_tokens, 1)} → / max(len(lengths), 1)}
training/update.py: signal = torch.stack( → torch.stack(
training/objective/advantages.py: .flip(0).cumsum(0).flip(0) → .cumsum(0)
training/learning_rate.py: else rate(step - first) → else rate(step)
training/learning_rate.py: supervised(step) if settings.is_supervised(step) else  → nothing
training/methods/kl.py: weights=self.snapshot.in_place() → nothing
training/methods/kl.py: self.own.beta * estimate( → estimate(
training/step_batch.py: "length" and objective.mask_truncated_completions → False
training/update.py: (completions, tokens, → (completions, int(lengths.sum()),
training/update.py: [k and p == part for → [k for
training/update.py: number % len(batch.mini_batches) → 0
training/update.py: {name: weight * count for → {name: weight for
training/update.py: old = score_slices(self.policy → _ = score_slices(self.policy
dist/balance.py: place * mini_batches // len(every) → place % mini_batches
training/step_batch.py: weights.new_tensor([-1.0]) → weights.new_tensor([1.0])
training/step_batch.py: rewards @ weights → rewards.sum(1)
training/methods/kl.py: and done % every == 0 → nothing
training/methods/kl.py: done % every == 0 → done == 0
dist/strategy.py: self.max_norm) → math.inf)
dist/strategy.py: if math.isfinite(norm): → if True:
model/engine/sampling.py: .div_(self.temperature or 1.0) → nothing
training/objective/losses.py: policy = kept / tokens → policy = torch.ones_like(kept) / tokens
training/objective/losses.py: entropy_coef * kept → entropy_coef * torch.ones_like(kept)
utils/chat.py: IMAGE * count + turns[first].text → turns[first].text + IMAGE * count
utils/chat.py: if found and found != count: → if found > count:
utils/chat.py: text = self.opening + text → pass
data/messages.py: images[0].count(IMAGE) < count → False
data/messages.py: {_BESIDE: iter(others) → {_BESIDE: iter(others[::-1])
config/prompt.py: and not (turns and turns[0].role == "system") → nothing
config/prompt.py: (*turns, message) → (message,)
model/chat_template.py: is_native=is_open or is_on → is_native=is_open
model/chat_template.py: is_open = text.rstrip() → is_open = text
model/chat_template.py: **special, **arguments, **given → **special, **given
model/prompts.py: thinking_tags=self.thinking_tags) → thinking_tags=THINK_TAGS)
model/chat_template.py: for turn in turns: → for turn in turns[-1:]:
serve/chat_client.py: if turn.role == "user" else turn.text → nothing
"""
"""A mutant per line: its module, a text, and the replacement. They change signs, constants, and the
arguments that a part of the step passes to the next."""

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


class Finder:
    def __init__(self, module: str) -> None:
        self.module, self.source = module, read_source(module)
        self.offsets = [*accumulate(map(len, self.source.splitlines(keepends=True)), initial=0)]
        self.found: list[Mutant] = []
        self._visit(ast.parse(self.source), "")

    def _span(self, node: Any) -> tuple[int, int]:
        start = self.offsets[node.lineno - 1] + node.col_offset
        return start, self.offsets[node.end_lineno - 1] + node.end_col_offset

    def _text(self, node: Any) -> str:
        start, stop = self._span(node)
        return self.source[start:stop].decode()

    def _add(self, scope: str, node: Any, new: str) -> None:
        """Replace a node in a function; the mutant's name shows its line, or the node if longer."""
        start, stop = self._span(node)
        first, last = start, stop
        if node.lineno == node.end_lineno:
            first, last = self.offsets[node.lineno - 1], self.offsets[node.lineno]
        before, after = self.source[first:start].decode(), self.source[stop:last].decode()
        texts = (" ".join(f"{before}{text}{after}".split()) for text in (self._text(node), new))
        name = f"{self.module} {scope}: {' → '.join(texts)}"
        count = sum(known.name.partition(" #")[0] == name for known in self.found)
        name += f" #{count + 1}" if count else ""
        self.found.append(Mutant(self.module, name, start, stop, new))

    def _swap(self, scope: str, node: Any, left: Any, operator: ast.AST, right: Any) -> None:
        """Replace the operator between two operands of a node."""
        if type(operator) in SWAPS:
            (first, last), stop, start = self._span(node), self._span(left)[1], self._span(right)[0]
            between = self.source[stop:start].decode()
            middle = between.replace(between.strip("() \n\\"), SWAPS[type(operator)], 1).encode()
            new = self.source[first:stop] + middle + self.source[start:last]
            self._add(scope, node, new.decode())

    def _visit(self, node: Any, scope: str) -> None:
        """Add the mutants of a node and of those in it. Only function bodies have any."""
        add, swap = partial(self._add, scope, node), partial(self._swap, scope, node)
        inner = [*ast.iter_child_nodes(node)]
        match node:
            case ast.Module() | ast.ClassDef():
                inner = [n for n in node.body if isinstance(n, ast.ClassDef | ast.FunctionDef)]
            case ast.FunctionDef():
                inner = node.body
            case ast.AnnAssign():
                inner = [node.value] if node.value else []
            case ast.Raise() | ast.JoinedStr() | ast.Assert() | ast.keyword(arg="strict"):
                return  # messages, and a check of the arguments
            case ast.Expr(ast.Call()):
                if self._text(node).partition(".")[0] in QUIET:
                    return
                add("pass")
            case ast.AugAssign():
                add("pass")
            case ast.Compare():
                operands = [node.left, *node.comparators]
                for left, operator, right in zip(operands, node.ops, operands[1:], strict=False):
                    swap(left, operator, right)
            case (
                ast.BinOp(ast.List() | ast.JoinedStr())
                | ast.BinOp(right=ast.List() | ast.JoinedStr())
            ):
                pass  # no operator but + and * would even run
            case ast.BinOp():
                swap(node.left, node.op, node.right)
            case ast.BoolOp():
                swap(node.values[0], node.op, node.values[1])
            case ast.UnaryOp(operand=ast.Constant()):
                pass
            case ast.UnaryOp():
                add(self._text(node.operand))
            case ast.Constant(bool() as value):
                add(str(not value))
            case ast.Constant(int() | float() as value):
                add(str(value + 1))
            case ast.If(test) | ast.IfExp(test):
                if "cuda" in self._text(test):  # not reached by tests without a GPU
                    return
                if not isinstance(test, ast.Compare | ast.UnaryOp):  # these are changed themselves
                    self._add(scope, test, f"not ({self._text(test)})")
            case ast.Call(function):
                owner, text = getattr(function, "value", None), self._text(function)
                name = text.rpartition(".")[2]
                if name in NAMES and (name != "sum" or owner):
                    self._add(scope, function, text.removesuffix(name) + NAMES[name])
                if name in DROPPED_CALLS:
                    add(self._text(owner or node.args[0]))
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            scope = f"{scope}.{node.name}".lstrip(".")
        for child in inner:
            self._visit(child, scope)


@cache
def read_source(module: str) -> bytes:
    """Return the module's source, as it was at the first call."""
    return (ROOT / "vlm_grpo" / module).read_bytes()


def find_mutants(only: str = "") -> list[Mutant]:
    """Return the mutants whose name has this text, in the order of their modules."""
    mutants = []
    for module, share in TARGETS.items():
        mutants += [m for m in Finder(module).found if _place(m.name) < share]
    for name in WRITTEN.splitlines():
        module, change = name.split(": ", 1)
        old, new = change.replace(" → nothing", " → ").split(" → ")
        start = read_source(module).index(old.encode())  # a ValueError: the text is to be updated
        mutants.append(Mutant(module, name, start, start + len(old.encode()), new))
    return [mutant for mutant in mutants if only in mutant.name]


def _place(name: str) -> float:
    """Return a number in [0, 1) that depends on the name alone."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4]) / 2**32


RESULTS = ROOT / "build" / "mutants.jsonl"
REACHED = ROOT / "build" / "mutants-reached.json"
"""The seconds of each test, and the tests that reach each line of each module."""
CPU_LIMIT, LIMIT = 20, 1500
"""Seconds of processor time of a test, and of time of a mutant, after which they are ended."""
MOST = 1 / 40
"""The share of the seconds of all tests that a mutant meets: the same tests on any machine."""


Functions = dict[tuple[str, str], list[FunctionType]]
"""The library's functions by module and qualified name."""


def find_functions() -> Functions:
    """Return every function of the library, decorated ones too."""
    folder, found = f"{ROOT}/vlm_grpo/", Functions()
    for function in gc.get_objects():
        if type(function) is FunctionType and function.__code__.co_filename.startswith(folder):
            code = function.__code__
            key = code.co_filename.removeprefix(folder), code.co_qualname
            found.setdefault(key, []).append(function)
    return found


def apply(mutant: Mutant, functions: Functions) -> None:
    """Replace the code of the mutant's function, or of the one that contains it."""
    source, (name, *_) = read_source(mutant.module), find_function(mutant)
    changed = source[: mutant.start] + mutant.new.encode() + source[mutant.stop :]
    compiled = compile(changed, ROOT / "vlm_grpo" / mutant.module, "exec")
    (code,) = (code for code in _functions(compiled) if code.co_qualname == name)
    for function in functions[mutant.module, name]:
        unused = () if code.co_freevars else function.__code__.co_freevars  # such as of ``super()``
        function.__code__ = code.replace(co_freevars=code.co_freevars + unused)


def _functions(code: CodeType) -> Iterator[CodeType]:
    """Yield the code of module-level functions and of methods."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            if "__qualname__" in constant.co_names:  # the body of a class
                yield from _functions(constant)
            else:
                yield constant


class Runner:
    """A pytest plugin that runs the mutants in place of the collected tests, ``jobs`` at once."""

    def __init__(self, mutants: Sequence[Mutant], jobs: int, output: TextIO) -> None:
        self.mutants, self.jobs, self.output = mutants, jobs, output
        self.failed = ""
        self.fit: dict[str, bool] = {}  # tests that failed with a mutant, and pass without
        self.functions: Functions = {}
        self.reached: dict[str, Any] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed = self.failed or report.nodeid

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        gc.unfreeze()  # conftest.py has frozen the functions, too
        self.functions = find_functions()
        gc.collect()
        gc.freeze()  # a fork would copy the memory of every object that its collections visit
        self.reached = self._find_reached(session.items)
        jobs = []
        for number in range(self.jobs):
            jobs.append(os.fork())
            if jobs[-1] == 0:
                try:
                    self._run_job(session.items, self.mutants[number :: self.jobs])
                finally:  # an error
                    self._print(traceback.format_exc())
                    os._exit(1)
        for job in jobs:
            os.waitpid(job, 0)
        gc.unfreeze()  # what is left at the end of Python would be reported as leaked
        return True

    def _find_reached(self, items: Sequence[pytest.Item]) -> dict[str, Any]:
        """Return what ``REACHED`` holds of these files, recorded in a fork where it is another."""
        files = [*(ROOT / "vlm_grpo").rglob("*.py"), *(ROOT / "tests").rglob("*.py")]
        state = hashlib.sha256(b"".join(file.read_bytes() for file in sorted(files))).hexdigest()
        known = json.loads(REACHED.read_text()) if REACHED.exists() else {}
        if known.get("state") == state and {i.nodeid for i in items} <= set(known["seconds"]):
            return known
        self._print("recording which lines each test reaches")
        if (child := os.fork()) == 0:
            try:
                REACHED.write_text(json.dumps({"state": state} | record(items)))
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        return json.loads(REACHED.read_text())

    def _choose(self, items: Sequence[pytest.Item], mutant: Mutant) -> list[pytest.Item]:
        """Return the tests that reach the mutant's lines, the shortest first, up to ``MOST``."""
        source, tests = read_source(mutant.module), self.reached["tests"][mutant.module]
        first, last = (source[:place].count(b"\n") + 1 for place in (mutant.start, mutant.stop))
        reaching = {test for line in range(first, last + 1) for test in tests.get(str(line), ())}
        if not reaching:  # a part of a longer statement
            reaching = {test for n in find_function(mutant)[2] for test in tests.get(str(n), ())}
        seconds = self.reached["seconds"]
        chosen = sorted((i for i in items if i.nodeid in reaching), key=lambda i: seconds[i.nodeid])
        spent, most = accumulate(seconds[i.nodeid] for i in chosen), MOST * sum(seconds.values())
        return [item for item, end in zip(chosen, spent, strict=True) if end < most]

    def _print(self, text: str) -> None:
        print(text, file=self.output, flush=True)

    def _run_job(self, items: Sequence[pytest.Item], mutants: Sequence[Mutant]) -> None:
        """Run the mutants one by one, append each result to the file, and exit."""
        for mutant in mutants:
            found, test = self._choose(items, mutant), None
            while test is None or not self._is_fit(items, test):
                chosen = [item for item in found if self.fit.get(item.nodeid, True)]
                test = (result := self._run(chosen, mutant))["test"]
            with RESULTS.open("a") as file:
                file.write(json.dumps(result, ensure_ascii=False) + "\n")
            self._print(f"{result['result']:12} {result['seconds']:6.1f} s  {mutant.name}")
        os._exit(0)

    def _is_fit(self, items: Sequence[pytest.Item], test: str) -> bool:
        """Return whether a test passes without a mutant, too; some need a quiet machine."""
        if test and test not in self.fit:
            alone = [item for item in items if item.nodeid == test]
            self.fit[test] = not self._run(alone, None)["test"]
            if not self.fit[test]:
                self._print(f"left out, since it fails without a mutant: {test}")
        return self.fit.get(test, True)

    def _run_until_failure(self, items: Sequence[pytest.Item]) -> None:
        for item, following in zip(items, [*items[1:], None], strict=False):
            limit = int(time.process_time()) + CPU_LIMIT  # a mutant may loop for ever
            resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if self.failed:
                return

    def _run(self, items: Sequence[pytest.Item], mutant: Mutant | None) -> dict[str, Any]:
        """Run the tests with a mutant, or without, in a fork; return the result."""
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.setsid()
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the report of a crash
            try:
                if mutant is not None:
                    apply(mutant, self.functions)
                self._run_until_failure(items)
                os.write(writer, self.failed.encode() or b"survived")
            finally:
                os._exit(0)
        os.close(writer)
        end, usage, status = time.monotonic() + LIMIT, None, 0
        while usage is None:
            done, status, measured = os.wait4(child, os.WNOHANG)
            usage = measured if done else None
            if time.monotonic() > end:
                os.killpg(child, signal.SIGKILL)
            time.sleep(0.02)
        with os.fdopen(reader) as pipe:
            failed = pipe.read()
        if not failed and status == 0:
            raise RuntimeError(f"the tests could not run with {mutant}")
        code = os.waitstatus_to_exitcode(status)  # negative: of a signal, as at the time limit
        result = "killed" if failed else f"killed: exit {code}"
        return {
            "name": mutant.name if mutant else "",
            "result": "survived" if failed == "survived" else result,
            "seconds": round(usage.ru_utime + usage.ru_stime, 1),
            "test": failed.removeprefix("survived"),
            "source": compute_checksum(mutant) if mutant else "",
        }


def record(items: Sequence[pytest.Item]) -> dict[str, Any]:
    """Run the tests, and return their seconds, and by module and line the tests that reach it."""
    paths = {module: str(ROOT / "vlm_grpo" / module) for module in TARGETS}
    tracer = coverage.Coverage(data_file=None, include=[*paths.values()], config_file=False)
    seconds = {}
    tracer.start()
    sys.settrace = lambda function: None  # libraries would end what traces
    for item, following in zip(items, [*items[1:], None], strict=False):
        began = time.monotonic()
        tracer.switch_context(item.nodeid)
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        seconds[item.nodeid] = round(time.monotonic() - began, 3)
    tracer.stop()
    lines = {module: tracer.get_data().contexts_by_lineno(path) for module, path in paths.items()}
    return {"seconds": seconds, "tests": lines}


def compute_checksum(mutant: Mutant) -> str:
    """Return the checksum of the function, or method, that the mutant changes."""
    return hashlib.sha256(find_function(mutant)[1].encode()).hexdigest()[:12]


def find_function(mutant: Mutant) -> tuple[str, str, range]:
    """Return the function, or method, that the mutant changes: its name, its code, its lines."""
    line = read_source(mutant.module)[: mutant.start].count(b"\n") + 1
    ((lines, name, code),) = (f for f in _list_functions(mutant.module) if line in f[0])
    return name, code, lines


@cache
def _list_functions(module: str) -> list[tuple[range, str, str]]:
    """Return the lines, the name and the code, without comments, of each function and method."""
    found = []
    for parent in ast.parse(read_source(module)).body:
        prefix = f"{parent.name}." if isinstance(parent, ast.ClassDef) else ""
        for node in parent.body if isinstance(parent, ast.ClassDef) else [parent]:
            if isinstance(node, ast.FunctionDef):
                lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
                found.append((lines, prefix + node.name, ast.dump(node)))
    return found


def read_results(mutants: Sequence[Mutant]) -> list[dict[str, Any]]:
    """Return the newest results of these mutants, without those of other code."""
    lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    newest = {(result["name"], result["source"]): result for result in map(json.loads, lines)}
    keys = [(mutant.name, compute_checksum(mutant)) for mutant in mutants]
    return [newest[key] for key in keys if key in newest]


def run_mutants(mutants: Sequence[Mutant], jobs: int) -> None:
    RESULTS.parent.mkdir(exist_ok=True)
    output = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # pytest's own output
    left_out = [f"--ignore={ROOT / 'tests' / folder}" for folder in OTHERS]
    arguments = ["-q", "-m", "not slow", f"--rootdir={ROOT}", *left_out]
    arguments += ["-p", "no:cacheprovider", "-p", "no:faulthandler"]  # a mutant may crash
    status = pytest.main([*arguments, str(ROOT / "tests")], [Runner(mutants, jobs, output)])
    os.dup2(output.fileno(), 1)
    if status:
        sys.exit(f"pytest ended with {status}")


def main(jobs: int = 1, only: str = "", retry: bool = False, names: bool = False) -> None:
    mutants = find_mutants(only)
    if names:
        print("\n".join(mutant.name for mutant in mutants))
        return
    known = read_results(mutants)
    done = {r["name"] for r in known if not (retry and r["result"] == "survived")}
    left = [mutant for mutant in mutants if mutant.name not in done]
    if left:
        os.chdir(ROOT)
        run_mutants(left, jobs)
    results = read_results(mutants)
    survivors = [result["name"] for result in results if result["result"] == "survived"]
    killed = len(results) - len(survivors)
    print(f"{killed} of {len(results)} mutants killed ({killed / max(1, len(results)):.1%})")
    for name in survivors:
        print(f"survived: {name}")


if __name__ == "__main__":
    typer.run(main)
