"""Mutation testing: change the library in one place at a time, and run the tests of that place.

    python tests/helpers/mutants.py --jobs 2             # all mutants; continues an earlier run
    python tests/helpers/mutants.py --only grpo/update   # those whose name has one of these texts
    python tests/helpers/mutants.py --retry              # again those that survived
    python tests/helpers/mutants.py --list

Mutants are changed operators, constants, conditions, calls and statements in function bodies, a
fixed share of all that are possible, chosen by a hash of their names; and some written by hand, to
the wiring between functions (``mutations.py``). The library and its tests are imported once. Each
mutant is a fork, in which the function's code is replaced and the tests of its module run, its own
test file first, until one fails (killed) or all pass (survived). A mutant that exceeds the time
limit is killed. Processes that a test starts run the library without the mutant.

Results are kept with a checksum of the function: if that has changed since, its mutants run again.
After other changes, delete ``build/mutants.jsonl`` to run all.

Why not cosmic-ray or mutmut: cosmic-ray starts pytest for each mutant, which spends more time on
importing torch, transformers and TRL than most mutants live. mutmut forks, but replaces each
function by a wrapper of all its mutated copies, which then meets the import hook that checks tensor
shapes in tests. Neither runs mutants that a person has written.
"""

from __future__ import annotations

import argparse
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
from functools import cache
from types import CodeType, FunctionType
from typing import Any, TextIO

import pytest
from mutations import ROOT, Mutant, find_mutants, list_test_files, read_source

RESULTS = ROOT / "build" / "mutants.jsonl"
CPU_LIMIT, LIMIT = 20, 1500
"""Seconds of processor time of a test, and of time of a mutant, after which they are ended."""


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
    source = read_source(mutant.module)
    changed = source[: mutant.start] + mutant.new.encode() + source[mutant.stop :]
    line = source[: mutant.start].count(b"\n") + 1
    before, after = (
        list(_functions(compile(text, ROOT / "vlm_grpo" / mutant.module, "exec")))
        for text in (source, changed)
    )
    (index,) = (index for index, code in enumerate(before) if line in _lines(code))
    for function in functions[mutant.module, before[index].co_qualname]:
        function.__code__ = after[index]


def _functions(code: CodeType) -> Iterator[CodeType]:
    """Yield the code of module-level functions and of methods."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            if "__qualname__" in constant.co_names:  # the body of a class
                yield from _functions(constant)
            else:
                yield constant


def _lines(code: CodeType) -> range:
    """Return the lines of a function, with those of the functions inside it."""
    last = max(line for _, _, line in code.co_lines() if line is not None)
    inner = [_lines(c).stop for c in code.co_consts if isinstance(c, CodeType)]
    return range(code.co_firstlineno, max([last + 1, *inner]))


class Runner:
    """A pytest plugin that runs the mutants in place of the collected tests.

    Args:
        mutants: the mutants.
        jobs: number of mutants that run at once.
        output: where results are printed.
    """

    def __init__(self, mutants: Sequence[Mutant], jobs: int, output: TextIO) -> None:
        self.mutants, self.jobs, self.output = mutants, jobs, output
        self.failed = ""
        self.checked: set[str] = set()
        self.functions: Functions = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed = self.failed or report.nodeid

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self.functions = find_functions()
        gc.collect()
        gc.freeze()  # a fork would copy the memory of every object that its collections visit
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

    def _print(self, text: str) -> None:
        print(text, file=self.output, flush=True)

    def _run_job(self, items: Sequence[pytest.Item], mutants: Sequence[Mutant]) -> None:
        """Run the mutants one by one, append each result to the file, and exit."""
        for mutant in mutants:
            chosen: dict[pytest.Item, None] = {}
            for file in list_test_files(mutant):
                chosen |= dict.fromkeys(i for i in items if i.nodeid.startswith(file))
            result = self._run(list(chosen), mutant)
            self._check([item for item in chosen if item.nodeid == result["test"]])
            with RESULTS.open("a") as file:
                file.write(json.dumps(result, ensure_ascii=False) + "\n")
            self._print(f"{result['result']:12} {result['seconds']:6.1f} s  {mutant.name}")
        os._exit(0)

    def _check(self, items: Sequence[pytest.Item]) -> None:
        """Check that a test that kills mutants passes without one."""
        for item in items:
            if item.nodeid not in self.checked:
                if self._run([item], None)["test"]:
                    raise RuntimeError(f"without a mutant, this test fails: {item.nodeid}")
                self.checked.add(item.nodeid)

    def _run_until_failure(self, items: Sequence[pytest.Item]) -> None:
        for item, following in zip(items, [*items[1:], None], strict=True):
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


def compute_checksum(mutant: Mutant) -> str:
    """Return the checksum of the function, or method, that the mutant changes."""
    line = read_source(mutant.module)[: mutant.start].count(b"\n") + 1
    (code,) = (code for lines, code in _list_functions(mutant.module) if line in lines)
    return hashlib.sha256(code.encode()).hexdigest()[:12]


@cache
def _list_functions(module: str) -> list[tuple[range, str]]:
    """Return the lines of each function and method of a module, and its code without comments."""
    nodes = ast.parse(read_source(module)).body
    nodes += [node for parent in nodes if isinstance(parent, ast.ClassDef) for node in parent.body]
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef)]
    return [(range(f.lineno, (f.end_lineno or f.lineno) + 1), ast.dump(f)) for f in functions]


def read_results(mutants: Sequence[Mutant]) -> list[dict[str, Any]]:
    """Return the newest results of these mutants, without those of other code."""
    lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    newest = {(result["name"], result["source"]): result for result in map(json.loads, lines)}
    keys = [(mutant.name, compute_checksum(mutant)) for mutant in mutants]
    return [newest[key] for key in keys if key in newest]


def run_mutants(mutants: Sequence[Mutant], jobs: int) -> None:
    """Run the mutants, and print and store their results."""
    RESULTS.parent.mkdir(exist_ok=True)
    output = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # pytest's own output
    files = sorted({file for mutant in mutants for file in list_test_files(mutant)})
    arguments = ["-q", "-m", "not slow", f"--rootdir={ROOT}"]
    arguments += ["-p", "no:cacheprovider", "-p", "no:faulthandler"]  # a mutant may crash
    status = pytest.main([*arguments, *files], [Runner(mutants, jobs, output)])
    os.dup2(output.fileno(), 1)
    if status:
        sys.exit(f"pytest ended with {status}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Run the tests on mutants of the library.")
    parser.add_argument("--jobs", type=int, default=1, help="mutants that run at once")
    parser.add_argument("--only", nargs="+", default=[""], help="run those with one of these texts")
    parser.add_argument("--retry", action="store_true", help="run again those that survived")
    parser.add_argument("--list", action="store_true", help="list the mutants")
    options = parser.parse_args()
    mutants = find_mutants(options.only)
    if options.list:
        print("\n".join(mutant.name for mutant in mutants))
        return
    known = read_results(mutants)
    done = {r["name"] for r in known if not (options.retry and r["result"] == "survived")}
    left = [mutant for mutant in mutants if mutant.name not in done]
    if left:
        os.chdir(ROOT)
        run_mutants(left, options.jobs)
    results = read_results(mutants)
    survivors = [result["name"] for result in results if result["result"] == "survived"]
    killed = len(results) - len(survivors)
    print(f"{killed} of {len(results)} mutants killed ({killed / max(1, len(results)):.1%})")
    for name in survivors:
        print(f"survived: {name}")


if __name__ == "__main__":
    main()
