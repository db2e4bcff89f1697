"""The gallery stays within its size limit and reads thumbnails only."""

import itertools
import json
from dataclasses import replace
from pathlib import Path

from report_runs import GROUP_SIZE, load_few_examples, make_group, make_run

from vlm_grpo import Task, load_task
from vlm_grpo.report import gallery
from vlm_grpo.report.page import build_report
from vlm_grpo.report.run import read_run
from vlm_grpo.report.samples import write_samples
from vlm_grpo.types import Example, Group
from vlm_grpo.utils.chat import ThinkingTags, Turn


def test_training_groups_are_thinned_out_evenly(tmp_path):
    run = read_run(make_run(tmp_path, "ocr", steps=12, held_out=2, samples_every=1))
    full = gallery.build_gallery([("", run)])
    assert (len(full.entries), full.omitted) == (2 + 48, 0)  # four groups per step
    texts = sum(len(gallery.to_script_json(entry)) for entry in full.entries)
    pictures = sum(len(uri) for uri in full.pictures.values())
    thinned = gallery.build_gallery([("", run)], limit=(texts + pictures) // 2)
    steps = sorted({e["step"] for e in thinned.entries if e["view"] == "training"})
    assert (steps[0], steps[-1]) == (0, 11)  # the ends are kept
    assert 3 <= len(steps) <= 6  # about half of the twelve
    assert max(b - a for a, b in itertools.pairwise(steps)) <= 4  # evenly spaced
    assert thinned.omitted == 4 * (12 - len(steps))


COUNTING = load_task("counting")
(EXAMPLE,) = load_few_examples("counting", COUNTING)


def write_group(folder: Path, group: Group, step: int = 0, task: Task = COUNTING) -> Path:
    """Write the samples of one group, and return their file."""
    advantages = [[0.0] * len(group.completions)]
    return write_samples(folder / "samples", step, [group], advantages, task)


def read_entries(folder: Path) -> list[gallery.Entry]:
    entries, skipped = gallery.build_training_entries(read_run(folder))
    assert skipped == 0
    return entries


def test_rows_cannot_read_other_files(tmp_path):
    (tmp_path / "secret.webp").write_bytes(b"secret")
    path = write_group(tmp_path, make_group(COUNTING, EXAMPLE, ["1"]))
    row = json.loads(path.read_text())
    row["pictures"] = ["../../secret.webp"]
    row["gold_marks"] = str(tmp_path / "secret.webp")
    path.write_text(json.dumps(row))
    found = gallery.build_gallery([("", read_run(tmp_path))])
    assert (len(found.entries), found.pictures) == (1, {})


def test_entries_have_the_answers_of_their_group_or_of_all_evaluations(counting_run):
    entries = read_entries(counting_run)
    assert len(entries) == 8  # four groups at each of the steps 0 and 10
    for entry in entries:
        assert len(entry["answers"]) == GROUP_SIZE
        rewards = [answer["reward"] for answer in entry["answers"]]
        assert entry["spread"] == max(rewards) - min(rewards)
        for answer in entry["answers"]:
            assert (answer["kind"] == "correct") == (answer["rewards"]["exact"] == 1.0)
    entries, _ = gallery.build_held_out_entries([("", read_run(counting_run))])
    assert len(entries) == 24
    for entry in entries:
        assert [answer["step"] for answer in entry["answers"]] == [0, 5, 10, 15, 20]
        first, last = entry["answers"][0], entry["answers"][-1]
        assert entry["change"] == last["rewards"]["exact"] - first["rewards"]["exact"]
    assert any(entry["change"] for entry in entries)
    # Examples over the limit are left out, those of training first.
    found = gallery.build_gallery([("", read_run(counting_run))], limit=20_000)
    assert 0 < len(found.entries) < 24
    assert {entry["view"] for entry in found.entries} == {"held-out"}


def test_kind_of_an_answer(tmp_path):
    task = load_task("counting", tags=True)
    texts = [task.gold(EXAMPLE), "<answer>99</answer>", "many", "<answer>", ""]
    sampled = make_group(task, EXAMPLE, texts)
    first, second, third, *others = sampled.completions
    completions = (first, second, replace(third, stop="eos"), *others)
    broken = replace(sampled.scores[-1], total=None, rewards={"exact": None})
    scores = (*sampled.scores[:-1], broken)
    write_group(tmp_path, replace(sampled, completions=completions, scores=scores), task=task)
    (entry,) = read_entries(tmp_path)
    kinds = ["correct", "incorrect", "no answer", "truncated", "unscorable"]
    assert [answer["kind"] for answer in entry["answers"]] == kinds


def test_change_from_one_run_to_the_other_and_from_one_sample_to_the_next(tmp_path):
    worse, better = (
        read_run(make_run(tmp_path, "counting", steps=4, seed=seed, skill=(skill, skill)))
        for seed, skill in enumerate((0.0, 1.0))
    )
    entries, _ = gallery.build_held_out_entries([("worse", worse), ("better", better)])
    assert {entry["change"] for entry in entries} == {1.0}  # from all wrong to all right
    first, *_, last = [answer["label"] for answer in entries[0]["answers"]]
    assert (first, last) == ("worse · step 0", "better · step 4")
    right, wrong = COUNTING.gold(EXAMPLE), "99"
    for step, texts in ((0, [right, wrong]), (5, [right, right])):
        write_group(tmp_path, make_group(COUNTING, EXAMPLE, texts), step)
    changes = [entry["change"] for entry in read_entries(tmp_path)]
    assert changes == [None, 0.5]  # from half right to all


def test_a_chat_is_shown_with_its_turns_and_the_model_s_own_thinking(tmp_path):
    tags = ThinkingTags("[THINK]", "[/THINK]", is_open=True, is_native=True)
    task = load_task("ocr", thinking_tags=tags)
    chat = Turn("system", "Be brief."), Turn("user", "Hello?"), Turn("assistant", "Hi.")
    example = Example("plain", (), "What is written?", "A", history=chat)
    write_group(tmp_path, make_group(task, example, ["An A?[/THINK]A", "An A?"]), task=task)
    (entry,) = read_entries(tmp_path)
    turns = ["system: Be brief.", "user: Hello?", "assistant: Hi.", "user: What is written?"]
    assert entry["question"] == "\n\n".join(turns)
    parts = [answer["parts"] for answer in entry["answers"]]
    assert parts == [[("thinking", "An A?"), ("answer", "A")], [("thinking", "An A?")]]
    assert entry["pictures"] == []  # there is no image
    assert build_report(tmp_path).is_file()


def test_completion_is_split_into_parts():
    for text, parts in (
        ("<think>a</think> <answer>7</answer>", [("thinking", "a"), ("answer", "7")]),
        ("<think>a", [("thinking", "a")]),
        ("a</think>b", [("thinking", "a"), ("answer", "b")]),
        ("x<answer>7</answer>y", [("text", "x"), ("answer", "7"), ("text", "y")]),
        ("<answer>7", [("answer", "7")]),
        ("  ", []),
    ):
        assert gallery.split_text(text) == parts


def test_no_text_ends_a_row_or_a_script_element_and_long_texts_are_cut(tmp_path):
    texts = ["a\u2028b", "a\x85b", "a\ud800b", "x" * 100_000]
    write_group(tmp_path, make_group(COUNTING, EXAMPLE, texts))
    assert read_run(tmp_path).unreadable == 0
    (entry,) = read_entries(tmp_path)
    shown = [answer["parts"][0][1] for answer in entry["answers"]]
    long = "x" * 4000 + " … (96,000 characters more)"
    assert shown == ["a⟨U+2028⟩b", "a⟨U+0085⟩b", "a?b", long]
    text = gallery.to_script_json({"a": "</script><!--\u2028&"})
    assert not set("<>&\u2028") & set(text)
    assert json.loads(text) == {"a": "</script><!--\u2028&"}
