"""The commands, settings, files and tests that the guides name exist, and every statement about
another trainer has a source."""

import ast
import json
import re
import shlex
import subprocess

import pytest
import typer
import yaml
from dataset_files import png, write_files
from guide_commands import GUIDES, ROOT, read_blocks, read_commands
from video_files import make_video

from vlm_grpo.cli.app import app
from vlm_grpo.config.recipes import load_settings, recipe_names
from vlm_grpo.config.run import Settings
from vlm_grpo.config.section import known_keys
from vlm_grpo.data.loading import load_examples
from vlm_grpo.task.registry import load_task, task_names

KEYS = set(known_keys(Settings))
BLOCKS = {key.split(".")[0] for key in KEYS if "." in key}


def read(path: str) -> str:
    return (ROOT / path).read_text("utf-8")


COMPARISON, COMING_FROM = read("docs/comparison.md"), read("docs/coming-from.md")
guides = pytest.mark.parametrize("guide", GUIDES, ids=lambda path: path.name)


def test_the_examples_are_short():
    assert len(read("docs/examples/clock.py").splitlines()) < 60
    assert len(read("docs/examples/loop.py").splitlines()) <= 100


def test_the_numbers_and_the_cards_of_the_readme_are_those_of_the_files_and_plans():
    (table,) = [t for t in read("docs/benchmarks.md").split("### ") if t.startswith("Sources\n")]
    converters = len(re.findall(r"^\| `\w+` \|", table, re.MULTILINE))
    benchmarks = len(list(ROOT.glob("configs/benchmarks/*.yaml")))
    assert f"{converters} dataset converters and {benchmarks} benchmarks" in read("README.md")
    assert f"lists {converters} converters" in read("docs/your-own-data.md")
    planned, rows = (
        [line.strip("| ").split(" | ") for line in lines if "B-" in line and line[0] == "|"]
        for lines in (read("docs/planning.md").splitlines(), read("README.md").splitlines())
    )
    smallest = {(row[0], row[1]): row[-1] for row in planned}
    assert len(rows) >= 5
    for model, *cards in rows:
        assert cards == [smallest[model, kind] for kind in ("LoRA, 4 bits", "LoRA", "full")]


@guides
def test_what_a_guide_names_exists(guide):
    text = guide.read_text("utf-8")
    known = set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    named = re.findall(r"(?:^|`|cli )(?:vlm-grpo) ([a-z][a-z-]*)", text, re.MULTILINE)
    assert set(named) <= known
    targets = re.findall(r"^([a-z][a-z-]*):", read("Makefile"), re.MULTILINE)
    assert set(re.findall(r"`make ([a-z]+)`", text)) <= set(targets)
    assert {*re.findall(r"vlm-grpo train ([a-z0-9_]+)(?=[\s`])", text)} <= {*recipe_names()}
    files = re.findall(r"--config_file (configs/\S+)|`(tests/[\w/]+\.py)`", text)
    assert not [path for pair in files for path in pair if not (ROOT / path).exists()]
    targets = [target for target in re.findall(r"\]\(([^)#\s]+)", text) if "://" not in target]
    assert not [target for target in targets if not (guide.parent / target).exists()]
    written = "".join(path.read_text("utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    for name in set(re.findall(r"`(test_\w+)`", text)):
        assert f"def {name}(" in written, name


def test_each_task_has_a_recipe_of_three_or_four_billion_parameters():
    table = read("docs/choosing-settings.md").partition("## A recipe for each")[2]
    rows = re.findall(r"^\| `([a-z_]+)` \| (.*?) \|", table.partition("\n## ")[0], re.MULTILINE)
    needed = ["data.train=a.jsonl", "data.eval=b.jsonl"]
    judge = ["task_options.address=http://a", "task_options.judge_model=b"]
    for task, recipes in rows:
        for command in re.findall(r"`(.*?)`", recipes):
            recipe, *overrides = command.split()
            options = judge if task == "judged" else []
            settings = load_settings(recipe, [*needed, *options, *overrides])
            assert (recipe, settings.task) == (recipe, task)
            assert re.search(r"-[34]B", settings.model), command
    assert {task for task, _ in rows} == {*task_names()} - {"verifiers"}


@guides
def test_commands_have_known_options_settings_and_files(guide):
    """Those in sentences, and those in blocks, of which some need a GPU, a server or a dataset."""
    prose = re.sub(r"^```.*?^```", "", guide.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    known = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    blocks = [line for line in read_commands(guide) if "vlm-grpo " in line]
    blocks = [line[line.find("vlm-grpo ") :] for line in blocks]
    lines = re.findall(r"`(?:vlm-grpo|\w+=1 python|python) [^`]+`", prose)
    for line in [*lines, *(line.partition(";")[0] for line in blocks)]:
        words = shlex.split(line.strip("`").partition("python ")[2] or line.strip("`"))
        if words[0].endswith(".py"):
            assert words[0] == "convert_hf_to_gguf.py" or (ROOT / words[0]).is_file(), line
        elif words[0] == "vlm-grpo" and words[1] in known:
            options = {option for part in known[words[1]].params for option in part.opts}
            options.add("--trust-code")  # of all commands
            assert {word for word in words if word.startswith("--")} <= options, line
            if words[1] in ("train", "sft", "plan") and words[2:3] and words[2] in recipe_names():
                settings = [word for word in words[3:] if "=" in word and "FOLDER" not in word]
                if re.search(r"_\d+b$", words[2]):  # a recipe without data
                    settings = ["data.train=a.jsonl", "data.eval=b.jsonl", *settings]
                settings += ["warm_start.steps=all"] * (words[1] == "sft")
                load_settings(words[2], settings)


def test_rows_of_the_guides_are_read(tmp_path):
    names = ("README", "docs/your-own-data", "docs/your-own-task")
    blocks = [block for name in names for block in read_blocks(ROOT / f"{name}.md", "json")]
    tasks = ("grounding", "grounding", "counting", "ocr", "counting")
    for number, (block, task) in enumerate(zip(blocks, tasks, strict=True)):
        row = json.loads(block)
        media = dict.fromkeys(row.get("images", ()), png(200, 300))
        media |= dict.fromkeys(row.get("videos", ()), make_video())
        write_files(tmp_path, {**media, f"{number}.jsonl": [row]})
        (example,) = load_examples(tmp_path / f"{number}.jsonl", load_task(task))
        assert len(example.images) == len(media)


@guides
def test_settings_exist_and_recipes_in_yaml_are_valid(guide, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_files(tmp_path, {"my_task.py": read("docs/examples/clock.py")})
    for block in read_blocks(guide, "yaml"):
        if "ground_truth:" not in block:  # OmniDocBench's
            load_settings("counting", yaml.safe_load(block))
    text = guide.read_text("utf-8")
    if guide.name == "coming-from.md":  # its tables' first column holds other projects' names
        text = re.sub(r"^\| `[^|]+", "", text, flags=re.MULTILINE)
    dotted = re.findall(rf"\b((?:{'|'.join(sorted(BLOCKS))})\.[a-z_.]+[a-z_])", text)
    wrong = {
        key
        for key in dotted
        if key not in KEYS and key not in {k.rpartition(".")[0] for k in KEYS}
        # mappings of any names
        if not key.startswith(("data.columns.", "prompt.chat_template_kwargs."))
        # a file's name may begin like a block: objective.md
        and not key.endswith((".md", ".py", ".jsonl", ".yaml", ".svg", ".parquet"))
    }
    assert not wrong


def test_the_script_of_a_cluster_and_equivalents_of_other_trainers_settings_are_valid(monkeypatch):
    monkeypatch.chdir(ROOT)
    (script,) = read_blocks(ROOT / "docs/scaling.md", "bash")
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    (arguments,) = re.findall(r"vlm_grpo\.cli train ([^']+)'", script)
    recipe, *overrides = arguments.split()
    load_settings(recipe, overrides)
    text = COMING_FROM.partition("\n## Score")[0]
    trainers = ["TRL's GRPOConfig", "VLM-R1", "EasyR1", "ms-swift", "Unsloth"]
    assert re.findall(r"^## (.+)$", text, re.MULTILINE) == trainers
    cells = [row.split(" | ")[1] for row in text.splitlines() if row.startswith("| `")]
    quoted = [part for cell in cells for part in re.findall(r"`([a-z_.]+=[^`]+)`", cell)]
    settings = {setting for part in quoted for setting in shlex.split(part)}
    settings = {setting for setting in settings if "…" not in setting and "NAME" not in setting}
    assert len(settings) > 20
    servers = ["rollout.sampler=vllm", "rollout.vllm.urls=[http://127.0.0.1:8000]"]
    needed = {  # settings that are valid only with others
        **dict.fromkeys(("rollout.sampler=vllm", "rollout.steps_ahead=1"), servers),
        "objective.loss_type=cispo": ["objective.epsilon_high=5"],
        "data.eval=null": ["data.eval_share=0.1"],
        "task_options.weights.overlong=1": ["task_options.overlong_cache=2"],
    }
    for setting in settings:
        load_settings("counting", [setting, *needed.get(setting, [])])


def flatten(text: str) -> str:
    """Return a text of the program in one line, with … for its values."""
    return re.sub("…+", "…", re.sub(r"\{[^}]*\}|%[ds]", "…", " ".join(text.split())))


def read_program_texts() -> str:
    """Return the texts of the library's code and tables, one per line."""
    texts = []
    for path in (ROOT / "vlm_grpo").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = (p.value if isinstance(p, ast.Constant) else "…" for p in node.values)
                texts.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    rows = yaml.safe_load(read("vlm_grpo/config/combinations.yaml"))
    texts += [row["say"] for group in rows.values() for row in group]
    return "\n".join(map(flatten, texts))


def test_the_page_of_symptoms_lists_its_sections_and_quotes_alarms_and_what_the_program_says():
    """Every alarm, and no more than that."""
    page = read("docs/symptoms.md")
    quotes = {flatten(q.replace("\n>", " ")[2:]) for q in re.findall(r"(?:^> .*\n)+", page, re.M)}
    alarms = {
        flatten(f"{name}: {alarm['message']}; {alarm['remedy']}")
        for name, alarm in yaml.safe_load(read("vlm_grpo/report/alarms.yaml")).items()
    }
    assert alarms <= quotes  # a section of docs/symptoms.md for each
    known = read_program_texts()
    assert not [quote for quote in quotes - alarms if quote not in known]
    head, *sections = re.split(r"^## ", page, flags=re.MULTILINE)
    titles = [section.partition("\n")[0] for section in sections]
    anchors = [re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles]
    assert sorted(re.findall(r"\]\(#([\w-]+)\)", head)) == sorted(anchors)


def test_the_settings_of_each_paper_are_valid_and_its_tests_exist(monkeypatch):
    monkeypatch.chdir(ROOT)
    for section in re.split(r"^### ", read("docs/papers.md"), flags=re.MULTILINE)[1:]:
        title = section.partition("\n")[0]
        blocks = re.findall(r"^```\n(.*?)^```", section, re.DOTALL | re.MULTILINE)
        tests = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", section)
        assert blocks, title
        assert tests, title
        for block in blocks:
            recipe, *overrides = shlex.split(block)
            load_settings({"RECIPE": "counting"}.get(recipe, recipe), overrides)
        for file, name in tests:
            assert f"def {name}(" in read(file), (title, name)


def read_sources(page: str) -> dict[str, tuple[str, str]]:
    """Return the repository and commit of each link of a page, by its label."""
    link = r"^\[([\w.-]+)\]: https://github\.com/([\w.-]+/[\w.-]+)/(?:blob|tree)/([\w.]+)/\S+"
    found = re.findall(link, page, re.MULTILINE)
    return {label: (repository, commit) for label, repository, commit in found}


def test_every_statement_about_another_trainer_and_each_of_its_names_links_to_its_source():
    commits = set(re.findall(r"\[`([\w./-]+)`\]\(https://\S+\) ([\w.]+) \|", COMPARISON))
    used: list[str] = []
    for question in COMPARISON.partition("\n## Differences")[0].split("\n## ")[1:]:
        for trainer, text in re.findall(r"^- \*\*(.+)\*\*: (.+)$", question, re.MULTILINE):
            labels = re.findall(r"\]\[([\w-]+)\]", text)
            assert labels or trainer == "vlm-grpo", f"{question.splitlines()[0]}: {trainer}"
            used += labels
    sources = read_sources(COMPARISON)
    assert set(used) == set(sources)
    assert len(used) > 16 * 5 + 13 * 4  # every question, for the trainers and the frameworks
    assert set(sources.values()) == commits
    tables = COMING_FROM.partition("\n## Score")[0]
    rows = [row.split(" | ") for row in re.findall(r"^\| (.*)\|$", tables, re.MULTILINE)]
    rows = [cells for cells in rows if len(cells) == 3]
    used = {label for cells in rows for label in re.findall(r"\]\[(.+?)\]", cells[2])}
    assert all("][" in cells[2] for cells in rows if "`" in cells[0])
    assert used == set(read_sources(COMING_FROM))
    assert len(rows) > 100
