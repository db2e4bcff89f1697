"""Random commands of the program, drawn from what it declares, each judged by how it ends.

    python tests/helpers/fuzz.py --seed 1 --count 2000 [--only NUMBER]

docs/testing.md says what they are drawn from. The results are kept in build/fuzz: the same call
continues.
"""

import json
import os
import random
import re
import shlex
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from inspect import unwrap
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import typer
import yaml
from dataset_files import png, write_files, write_table
from forked import SERVER, run_alone, start
from published_formats import FORMATS, write_format
from safetensors import SafetensorError, deserialize

from vlm_grpo.cli.app import app
from vlm_grpo.cli.new_task import write_task
from vlm_grpo.config.recipes import recipe_names
from vlm_grpo.config.run import Settings
from vlm_grpo.task.registry import task_names

LIMIT = 60
"""Seconds after which a command hangs."""
TEMPORARY = re.compile(r"\.tmp|\.partial|\.old$|\.lock-")
CONTROLS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
RECORD = re.compile(r"runs/[^/]+/(metrics\.jsonl|checkpoints|sampled)")
"""Files that show that a run has begun. It may keep its own files however it ends."""
REPORTS = ("--preview", "--difficulty")
"""Options with a file that is a result even if what it shows is not good enough to go on."""


SMALL = (
    "model=embedded", "policy.dtype=float32", "data.train_limit=4", "data.eval_limit=2",
    "optim.prompts_per_step=2", "optim.max_steps=1", "optim.warmup_steps=0",
    "rollout.max_completion_length=2", "rollout.num_generations=2", "logging.trackers=[]",
)  # fmt: skip
"""Settings of a run of one or two seconds."""
RUNS = (
    ["train", "counting", *SMALL, "checkpoint.keep_best=true", "evaluation.every=1"],
    ["train", "counting", *SMALL, "checkpoint.keep_best=true", "evaluation.every=1", "name=mine",
     "policy.lora.r=2"],
    ["export", "mine", "merged"], ["export", "mine", "lora", "--adapter"],
)  # fmt: skip


def write_template(folder: Path, runs: Iterable[list[str]] = RUNS) -> Path:
    """Write valid files of every kind, under the names of the help's examples."""
    rows = [
        {"id": f"r{n}", "images": [f"images/{n}.png"], "question": "How many?", "answer": n}
        for n in range(4)
    ]
    solved = [{**row, "completion": f"<answer>{row['answer']}</answer>"} for row in rows]
    names = ("train", "test", "val", "rows", "d", "YOUR")
    data = {"train": "train.jsonl", "eval": "test.jsonl"}
    recipe = {"task": "counting", "model": "embedded", "data": data}
    files: dict[str, Any] = {
        **{f"images/{n}.png": png(64, 56 + n) for n in range(4)},
        **{f"{name}.jsonl": rows for name in names}, "rows.json": rows, "solved.jsonl": solved,
        **{name: png(60, 50) for name in ("a.jpg", "photo.jpg", "photo.png")},
        "outputs.jsonl": [{"id": row["id"], "output": "1"} for row in rows],
        "difficulty.jsonl": [{"id": row["id"], "pass_rate": 0.5} for row in rows],
        "rows.csv": "id,images,question,answer\nr0,images/0.png,How many?,3\n",
        "recipe.yaml": yaml.safe_dump(recipe), "frames/1.png": png(32, 32),
        "frames/2.png": png(32, 32),
        "mine.yaml": "task: counting\nmetric: accuracy\ntitle: x\nconverter: x\nasked: x\n",
    }  # fmt: skip
    write_files(folder, files)
    write_task("my_task", folder)
    write_table(folder / "train.parquet", [{**row, "images": None} for row in rows])
    for name in FORMATS:
        write_format(folder / "sets" / name, name)
    for words in runs:
        status, output = execute(words, folder, {})
        if status != 0:
            raise RuntimeError(output)
    return folder


ODD = [
    *(None, -1, 0, 1, 0.5, 1e308, 10**30, 10**400, float("nan"), float("inf"), "", "x", "é\u202e"),
    *(True, [], {}, ["a", "b"], {"a": 1}, "\x1b[31mred\x07", "x" * 100_000, "../../etc", "\udcff"),
    *("/", "-1", "nan", "${a.b}", "{{ a", "null", json.loads("[" * 300 + "]" * 300)),
]  # fmt: skip
"""Values in the place of others."""


def damage(path: Path, others: list[Path], rng: random.Random) -> str:
    """Change one file, or one file of a folder; return what was done."""
    inside = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else []
    path = rng.choice(inside or [path])
    data = b"" if path.is_dir() else path.read_bytes()
    if path.is_dir():
        return ""
    path.unlink()  # weights are links
    path.write_bytes(data)
    if rng.random() < 0.5 and (changed := change_value(path, data, rng)) is not None:
        path.write_bytes(changed)
        return f"{path}: a value"
    at = rng.randrange(len(data) + 1)
    new = {
        "empty": b"", "truncated": data[:at], "doubled": data + data, "binary": bytes(range(256)),
        "flipped": data[:at] + bytes(b ^ 64 for b in data[at : at + 1]) + data[at + 1 :],
        "UTF-16": data.decode("utf-8", "replace").encode("utf-16"), "deep": b"[" * 100_000,
        "swapped": next(p for p in rng.sample(others, len(others)) if p.is_file()).read_bytes(),
    }  # fmt: skip
    kind = rng.choice([*new, "missing", "folder", "loop", "locked"])
    if kind in new:
        path.write_bytes(new[kind])
    elif kind == "locked":
        path.chmod(0)
    else:
        path.unlink()
        if kind == "folder":
            path.mkdir()
        elif kind == "loop":
            path.symlink_to(path.name)
    return f"{path}: {kind}"


def change_value(path: Path, data: bytes, rng: random.Random) -> bytes | None:
    """Return JSON, JSON Lines or YAML with another value or without a key; None for other files."""
    if path.suffix not in (".json", ".jsonl", ".yaml"):
        return None
    lines = data.splitlines() if path.suffix == ".jsonl" else [data]
    if not lines:
        return None
    number = rng.randrange(len(lines))
    root = [yaml.safe_load(lines[number]) if path.suffix == ".yaml" else json.loads(lines[number])]
    places: list[tuple[Any, Any]] = [(root, 0)]
    for container, key in places:  # grows
        value = container[key]
        if isinstance(value, dict | list):
            keys = value if isinstance(value, dict) else range(len(value))
            places += [(value, inner) for inner in keys]
    container, key = rng.choice(places[-2000:])
    if rng.random() < 0.2 and container is not root:
        del container[key]
    else:
        container[key] = rng.choice(ODD)
    lines[number] = json.dumps(root[0]).encode()  # JSON is YAML
    return b"\n".join(lines) + b"\n"


GROUP: Any = typer.main.get_command(app)
SCHEMA = Settings.model_json_schema()
SLOW = re.compile(
    "max_steps|num_train_epochs|prompts_per_step|num_generations|max_completion_length|samples|pool"
    "|_timeout|max_restarts|max_resample|steps|eval_limit|num_workers|reward_workers|eval$|train$"
)
"""Settings and options that may take long with a large value."""
MODEL_FREE = ("report", "tasks", "settings", "new-task", "check", "plan")
FILES = (
    *("train.jsonl", "test.jsonl", "rows.json", "rows.csv", "train.parquet", "solved.jsonl"),
    *("outputs.jsonl", "difficulty.jsonl", "recipe.yaml", "my_task.py", "photo.png", "frames"),
    *("runs/counting", "runs/mine", "runs/mine/checkpoints/step-1", "merged", "lora", "runs"),
    *("runs/mine/config.yaml", "mine.yaml"),
    *(f"sets/{name}/{FORMATS[name][0]}" for name in FORMATS),
)  # fmt: skip
PATHS = (
    *("gone", "gone/x", "x" * 300, "/dev/null", "/etc/passwd/x", "", "..", "~", "\udcff", "a\nb"),
    *("nobody/nothing", "hf:", "hf:gone", "hf:sets", "embedded:gone", "embedded:ocr", "*.jsonl"),
)
OPTIONS: dict[str, tuple[str, ...]] = {
    "recipe": ("counting", "recipe.yaml", "my_task.py", "runs/mine", *recipe_names()),
    "task": (*task_names(), "my_task.py"), "model": ("embedded", "merged", "mine", "runs/mine"),
    "run": ("mine", "counting@best", "mine@1", "mine@7", "runs/counting"),
    "runs": ("mine", "counting", "runs/mine"), "checkpoint": ("mine", "counting@best", "lora"),
    "out": ("out", "out/a", "out.png", "out.jsonl"), "difficulty": ("rates.jsonl",),
    "python": ("/bin/true",),
    "preview": ("out.html",), "gpu": ("H100", "24GB", "0GB", "x"), "image": ("photo.png", "frames"),
    "question": ("How many?",), "server": ("http://127.0.0.1:9", "localhost:9", "ftp://a", "http://["),
    "name": ("read_clock", "a b", "class"), "frame": ("permille", "resized", "x"),
    "dtype": ("float32", "bfloat16"),
    "predictions": ("outputs.jsonl",), "argument": ("--x",), "step": ("1",),
}  # fmt: skip
"""Texts of options by name; others are drawn from the files."""


def find_settings(schema: Any = SCHEMA, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the key and the schema of every setting and every block."""
    for part in (schema, *schema.get("anyOf", ())):
        block = SCHEMA["$defs"][part["$ref"].rpartition("/")[2]] if "$ref" in part else part
        for name, own in block.get("properties", {}).items():
            yield f"{prefix}{name}", own
            yield from find_settings(own, f"{prefix}{name}.")


KEYS = dict(find_settings())


def draw_value(schema: Any, rng: random.Random, slow: bool = False) -> Any:
    """Draw a value that a schema allows, or one at its bounds."""
    if "$ref" in schema:
        schema = SCHEMA["$defs"][schema["$ref"].rpartition("/")[2]]
    if choices := schema.get("anyOf") or schema.get("oneOf"):
        return draw_value(rng.choice(choices), rng, slow)
    if choices := schema.get("enum"):
        return rng.choice(choices)
    kind = schema.get("type")
    if kind in ("integer", "number"):
        low = schema.get("minimum", schema.get("exclusiveMinimum", 0))
        high = schema.get("maximum", schema.get("exclusiveMaximum", 2))
        near = [low, low + 1, low - 1, 2]
        far = [high, high + 1, schema.get("default", 0), (low + high) / 2, 10**6]
        value = rng.choice(near if slow else near + far)
        return value if kind == "number" else int(value)
    if kind == "array":
        items = schema.get("items") or rng.choice(schema.get("prefixItems") or [{}])
        return [draw_value(items, rng, slow) for _ in range(rng.randrange(4))]
    if kind == "object":
        names = schema.get("propertyNames", {}).get("enum", ["a", "tags", "frame"])
        others = schema.get("additionalProperties")
        others = others if isinstance(others, dict) else {}
        inner = schema.get("properties") or dict.fromkeys(names, others)
        chosen = rng.sample(list(inner), min(len(inner), rng.randrange(4)))
        return {name: draw_value(inner[name], rng, bool(SLOW.search(name))) for name in chosen}
    if kind == "boolean":
        return rng.random() < 0.5
    if "const" in schema or kind == "null":
        return schema.get("const")
    return rng.choice([*FILES, *PATHS, *task_names(), "embedded:counting", "all", "x", "id > 1"])


def draw_setting(rng: random.Random) -> str:
    key = rng.choice(list(KEYS))
    slow = SLOW.search(key) is not None
    value = rng.choice(ODD[:10]) if rng.random() < 0.2 else draw_value(KEYS[key], rng, slow)
    if slow and isinstance(value, int | float) and value > 4:
        value = 2
    if rng.random() < 0.05:
        key = key.replace(rng.choice(key), rng.choice("x._"), 1)
    return f"{key}={value if isinstance(value, str) else json.dumps(value)[:100_000]}"


def draw_option(parameter: Any, kind: Any, rng: random.Random) -> str:
    """Draw the text of an argument or an option by its declared type."""
    if rng.random() < 0.07:
        return rng.choice(["-1", "0", "nan", "1e99", "9" * 400, "x", "", *PATHS])
    if get_origin(kind) is Literal:
        return rng.choice(get_args(kind))
    if {int, float} & {kind, *get_args(kind)}:
        return rng.choice(["1", "2", "-1", str(parameter.min or 0)])
    if parameter.name in ("key", "sweep"):
        return rng.choice([*KEYS, "learning_rate", "use_vllm"])
    known = OPTIONS.get(parameter.name)
    return rng.choice(FILES) if known is None or rng.random() < 0.1 else rng.choice(known)


def draw_command(names: tuple[str, ...], rng: random.Random) -> list[str]:
    """Draw the words of a command: an example of its help, or its arguments, and more options."""
    weights = [1 if name in MODEL_FREE[:4] else 4 for name in names]
    command = GROUP.commands[name := rng.choices(names, weights)[0]]
    kinds = get_type_hints(unwrap(command.callback))
    text = (command.help or "").replace("\\\n", " ")
    examples = re.findall(rf"^ *vlm-grpo {name} (.*?)(?:   .*)?$", text, re.MULTILINE)
    parameters = [p for p in command.params if p.name not in ("help", "overrides", "options")]
    if examples and rng.random() < 0.5:
        words = [name, *shlex.split(rng.choice(examples))]
        words = [re.sub(r"https?://.*", "http://127.0.0.1:9", word) for word in words]
        words = [re.sub(r"Qwen/\S*|…", "embedded", word) for word in words]
        words = [word.replace("step-300", "step-1").replace("DIR", "mine") for word in words]
        if name == "sample":
            words = [word.replace(".jsonl", "-2.jsonl") for word in words]
        chance = 0.1
    else:
        words, chance = [name], 0.25
        for parameter in parameters:
            if parameter.required and rng.random() < 0.97:
                flag = parameter.opts[:1] if parameter.param_type_name == "option" else []
                words += [*flag, draw_option(parameter, kinds[parameter.name], rng)]
    for parameter in parameters:
        if parameter.param_type_name == "option" and rng.random() < chance:
            words.append(rng.choice([*parameter.opts, *parameter.secondary_opts]))
            if not parameter.is_flag:
                words.append(draw_option(parameter, kinds[parameter.name], rng))
    if any(p.name == "overrides" for p in command.params):
        if name in ("train", "sample", "plan") or (name == "evaluate" and "--data" not in words):
            words += SMALL
        elif name == "sft":
            words += [word for word in SMALL if "num_gen" not in word and "warmup" not in word]
        words += [draw_setting(rng) for _ in range(rng.choice((0, 0, 1, 1, 1, 3)))]
    if rng.random() < 0.06:
        at = rng.randrange(1, len(words)) if len(words) > 1 else 0
        words[at] = rng.choice([*PATHS, *FILES])
    return words


ENVIRONMENT = {
    **dict.fromkeys(("LOCAL_RANK", "RANK", "WORLD_SIZE"), ("0", "1", "3", "-1", "x", "")),
    "CUDA_VISIBLE_DEVICES": ("", "0", "-1", "x"), "COLUMNS": ("0", "10", "-5", "x"),
    "TERM": ("dumb", "x"), "HOME": ("/proc", ""), "NO_COLOR": ("1", ""), "TMPDIR": ("/proc",),
    "HF_HUB_OFFLINE": ("1", "x"), "OMP_NUM_THREADS": ("0", "x", "1"),
    "LC_ALL": ("C", "x"), "PYTHONUTF8": ("0",), "PYTHONIOENCODING": ("ascii", "latin-1"),
}  # fmt: skip
AT_START = ("HF_HUB_OFFLINE", "OMP_NUM_THREADS", "LC_ALL", "PYTHONUTF8", "PYTHONIOENCODING")
"""Variables that a new interpreter must read."""


IMPORTS = [
    *("vlm_grpo.training.trainer", "vlm_grpo.training.export", "vlm_grpo.eval.evaluate", "peft"),
    *("vlm_grpo.eval.benchmark", "vlm_grpo.eval.predict", "vlm_grpo.eval.sampling"),
    *("vlm_grpo.report", "vlm_grpo.planning.plan", "vlm_grpo.data.report"),
    *("vlm_grpo.task.soundness", "transformers.models.qwen2_5_vl.modeling_qwen2_5_vl", "datasets"),
]
"""What commands import, once."""


def execute(words: list[str], folder: Path, environment: dict[str, str]) -> tuple[int | None, str]:
    """Run a command in a folder; return its status, or None if it hangs, and its output."""
    log = Path(tempfile.mkstemp(prefix="fuzz-")[1])
    common = {"TMPDIR": str(folder / "tmp"), "HF_HUB_OFFLINE": "1", "HF_ENDPOINT": "http://[::1]:9"}
    (folder / "tmp").mkdir(exist_ok=True)
    again = any(name in environment for name in AT_START)
    process = start(log, run_alone, words, str(folder), again, **common | environment)
    process.join(LIMIT)
    status = process.exitcode
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid or 0, 0)
        time.sleep(1)  # what it has started may be about to end
        os.killpg(process.pid or 0, signal.SIGKILL)
        status = None
    process.join()
    output = log.read_bytes().decode("utf-8", "replace")
    log.unlink()
    return status, output


def read_state(folder: Path) -> dict[str, Any]:
    """Return the size and the time of the last change of every file, but not of compiled ones."""
    state = {}
    for path in folder.rglob("*"):
        name, found = path.relative_to(folder), path.lstat()
        if not {"tmp", "__pycache__"} & {*name.parts}:
            state[str(name)] = None if path.is_dir() else (found.st_size, found.st_mtime_ns)
    return state


def find_problems(
    status: int | None, output: str, words: list[str], before: dict[str, Any], folder: Path
) -> Iterator[str]:
    """Yield what is wrong with the end of a command."""
    after = read_state(folder)
    new = after.keys() - before.keys()
    if status is None:
        yield f"it hangs for {LIMIT} seconds, or leaves a process"
    elif status not in ((0, 2, 75) if "max_hours" in str(words) else (0, 2)):
        yield f"status {status}"
    if "Traceback (most recent call last)" in output:
        yield "a traceback"
    if status == 2 and "error: " not in output.lower():
        yield "no message"
    if found := CONTROLS.search(output):
        yield f"control character {found[0]!r}"
    if left := [name for name in new if TEMPORARY.search(name)]:
        yield f"temporary files: {left}"
    if left := sorted(path.name for path in (folder / "tmp").rglob("*")):
        yield f"files in TMPDIR: {left}"
    begun = {name.split("/")[1] for name in new if RECORD.match(name)}
    changed = {name for name, value in before.items() if after.get(name) != value} | new
    made = [words[at + 1] for at, word in enumerate(words[:-1]) if word in REPORTS]
    outside = {n for n in changed if n != "runs" and not {*n.split("/")[1:2]} & begun} - {*made}
    if status == 2 and outside:
        yield f"status 2, but it changed {sorted(outside)[:5]}"
    for name in changed:
        path = folder / name
        if path.is_file() and (problem := find_damage(path)):
            yield f"{name} is half-written: {problem}"


def find_damage(path: Path) -> str:
    """Return what shows that a file is not complete, or nothing."""
    data = path.read_bytes()
    try:
        if path.suffix == ".jsonl":
            *lines, rest = data.decode().split("\n")
            _ = [json.loads(line) for line in lines]
            return f"its last line is {rest[:80]!r}" if rest else ""
        if path.suffix == ".json":
            json.loads(data)
        elif path.suffix == ".yaml":
            yaml.safe_load(data)
        elif path.suffix == ".safetensors":
            deserialize(data)
    except (ValueError, yaml.YAMLError, SafetensorError) as error:
        return str(error)
    ends = {".html": b">", ".parquet": b"PAR1"}
    whole = data.rstrip(b"\n").endswith(ends.get(path.suffix, b""))
    return "" if whole else f"its end is {data[-20:]!r}"


def link_or_copy(source: str, target: str) -> None:
    (os.link if source.endswith(".safetensors") else shutil.copy2)(source, target)


def try_command(
    template: Path,
    seed: str,
    names: tuple[str, ...] = tuple(GROUP.commands),
    run: Callable[..., tuple[int | None, str]] = execute,
) -> dict[str, Any]:
    """Draw a command by the seed, run it, and return it with its status and what is wrong."""
    rng = random.Random(seed)
    words, environment, damaged = draw_command(names, rng), {}, ""
    with tempfile.TemporaryDirectory(dir=template.parent) as temporary:
        folder = Path(temporary) / "work"
        shutil.copytree(template, folder, copy_function=link_or_copy)
        named = {word.rpartition("=")[2].partition("@")[0] for word in words} - {""}
        places = [place / name for name in sorted(named) for place in (folder, folder / "runs")]
        used = [path for path in places if os.path.exists(path)]  # of a long name, too
        used = [path for path in used if folder in path.resolve().parents]
        if used and rng.random() < 0.5:
            others = [folder / name for name in FILES if (folder / name).is_file()]
            damaged = damage(rng.choice(used), others, rng).replace(f"{folder}/", "")
        if rng.random() < 0.15:
            name = rng.choice(list(ENVIRONMENT)[: rng.choice((9, 9, 99))])
            environment = {name: rng.choice(ENVIRONMENT[name])}
        before, started = read_state(folder), time.monotonic()
        status, output = run(words, folder, environment)
        problems = list(find_problems(status, output, words, before, folder))
    seconds = round(time.monotonic() - started, 1)
    return {
        "seed": seed, "words": words, "environment": environment, "damaged": damaged,
        "status": status, "seconds": seconds, "problems": problems, "output": output,
    }  # fmt: skip


def main(seed: int = 1, count: int = 2000, only: int = -1) -> None:
    build = Path("build/fuzz").absolute()
    template, results = build / "template", build / f"results-{seed}.jsonl"
    SERVER.set_forkserver_preload(IMPORTS)
    if not (build / "complete").exists():
        shutil.rmtree(template, ignore_errors=True)
        write_template(template)
        (build / "complete").touch()
    results.touch()
    found = [json.loads(line) for line in results.read_text().splitlines()]
    if only >= 0:
        print(json.dumps(try_command(template, f"{seed}-{only}"), indent=1))
        return
    with results.open("a") as file:
        for number in range(len(found), count):
            found.append(try_command(template, f"{seed}-{number}"))
            file.write(json.dumps(found[-1]) + "\n")
            file.flush()
            if found[-1]["problems"]:
                print(json.dumps({k: v for k, v in found[-1].items() if k != "output"}), flush=True)
    statuses = Counter(str(result["status"]) for result in found)
    print(f"{len(found)} commands, {dict(statuses)}; {sum(r['seconds'] for r in found):.0f} s")


if __name__ == "__main__":
    del __file__  # or every process would run this file again
    typer.run(main)
