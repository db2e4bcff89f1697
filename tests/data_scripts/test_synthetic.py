"""Drawn examples: reproducible, written as they are drawn, and answers that match the pixels."""

import hashlib
import itertools
import json
import re
import sys
from collections import defaultdict
from importlib import import_module
from typing import Any

import numpy as np
import pytest
from scipy import ndimage

from vlm_grpo.data.loading import load_examples
from vlm_grpo.data_scripts import make_figures, make_shapes, make_tables, make_words
from vlm_grpo.data_scripts.make_shapes import COLORS, MAX_COUNT, RELATIONS, SIDE
from vlm_grpo.data_scripts.make_tables import CELL
from vlm_grpo.data_scripts.make_words import DIGITS, LETTERS
from vlm_grpo.data_scripts.synthetic import write_examples
from vlm_grpo.errors import UserError
from vlm_grpo.task.registry import load_task
from vlm_grpo.types import Example, VideoRef

NAMES = "charts clips distances figures pictures screens shapes tables tiny_words words"
MODULES = [import_module(f"vlm_grpo.data_scripts.make_{name}") for name in NAMES.split()]
GENERATORS = {kind: m.draw_examples for m in MODULES for kind in m.draw_examples.kinds}
RECORDED = {
    **{"counting": "9c3c933de746ab70", "cluttered": "86cdc55bed639260", "ocr": "22e1c26bab8420fe"},
    **{"grounding": "1b666cd1b84bf784", "crowded": "71569a9980a2043a"},
}
"""Digests of 100 examples of each kind, of seed 1, drawn before there were dials."""
SCENE = "size=12,spread=4,distractors=1,noise=0,clutter=0,occlusion=0"
SCENE_DIALS = {"noise": 40, "clutter": 10, "occlusion": 0.5, "contrast": 0.3, "distractors": 4}
SCENE_DIALS |= {"size": 14, "spread": 10}
TEXT_DIALS = {"noise": 40, "clutter": 10, "contrast": 0.5, "longest": 5, "tilt": 15, "fonts": 6}
BOTH_SPLITS = pytest.mark.parametrize("split", ["train", "eval"])


def draw(world: str, count: int, seed: int = 0, split: str = "train") -> list[Example]:
    """Draw examples of a kind or a world, perhaps with dials; without scikit-learn, skip it."""
    kind = world.partition(":")[0]
    if kind == "handwriting":
        pytest.importorskip("sklearn")
    return GENERATORS[kind](world, count, seed, split)


def get_pixels(row: Example, mode: str = "RGB") -> np.ndarray:
    return np.asarray(row.images[0].load().convert(mode))


def list_images(rows: list[Example]) -> list[bytes]:
    return [
        image.load_frames()[0].tobytes() + image.load().tobytes()
        if isinstance(image, VideoRef)
        else image.read_bytes()
        for row in rows
        for image in row.images
    ]


@pytest.mark.parametrize("kind", RECORDED)
def test_the_examples_of_the_recipes_stay_the_same(kind):
    digest = hashlib.sha256()
    for row in draw(kind, 100, seed=1):
        answer = repr((row.id, row.question, row.answer, row.meta))
        digest.update(row.images[0].load().tobytes() + answer.encode())
    assert digest.hexdigest()[:16] == RECORDED[kind]


@pytest.mark.parametrize(
    "kind", [*GENERATORS, "clips:hard", *(f"tables:{n}" for n in make_tables.Tables.levels)]
)
def test_an_example_depends_on_seed_split_and_index_only(kind):
    ten = draw(kind, 10, seed=4)
    assert draw(kind, 3, seed=4) == ten[:3]
    assert len({*list_images(ten)}) == 10
    assert draw(kind, 3, seed=5) != ten[:3]
    assert list_images(draw(kind, 3, seed=4, split="eval")) != list_images(ten[:3])


@pytest.mark.parametrize("kind", GENERATORS)
def test_files_hold_the_same_examples_as_memory(kind, tmp_path):
    out, generator, drawn = tmp_path / "new" / "scenes", GENERATORS[kind], draw(kind, 3, 2, "eval")
    argv = ["--count", "3", "--seed", "2", "--split", "eval", "--out", str(out)]
    argv += [] if kind == generator.kinds[0] else ["--task", kind]  # the default
    assert generator.main(argv) == 0
    rows = [json.loads(line) for line in (out / f"{kind}.jsonl").read_text().splitlines()]
    for row, example in zip(rows, drawn, strict=True):
        assert (row["id"], row["question"]) == (example.id, example.question)
        assert row["answer"] == example.answer
        for path, image in zip(row["images"], example.images, strict=False):
            assert (out / path).read_bytes() == image.data
    assert [path.name for path in out.parent.iterdir()] == ["scenes"], "no temporary folder is left"


def test_a_folder_in_use_and_a_count_of_0_are_errors(tmp_path, capsys):
    (tmp_path / "mine.txt").write_text("keep")
    for count, out, message in (("1", "", "not an empty folder"), ("0", "x", "count is 0")):
        argv = ["--count", count, "--out", str(tmp_path / out)]
        assert GENERATORS["counting"].main(argv) == 1
        assert message in capsys.readouterr().err
        assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_wrong_kinds_and_dials_are_one_clear_error():
    with pytest.raises(ValueError, match=r"'ocr': choose counting, cluttered, .*, choices$"):
        GENERATORS["counting"]("ocr", 1)
    for dials, message in (
        ("relations:oclusion=0.3", r"unknown key oclusion \(did you mean occlusion\?\)\nLevels: "),
        ("relations:occlusion=2", 'occlusion="2" should be less than or equal to 0.6'),
        ("relations:hrad", "relations:hrad: .*\n.*key hrad.*\nLevels: easy, medium, hard; dials: "),
        ("relations:easy,hard", "unknown key hard"),
        ("relations:noise=", 'noise="" should be a whole number'),
        ("attributes:size=30", "shapes of 30 to 34 pixels do not fit into a scene of 84×84: lower"),
        ("charts:easy,bars=9", "Levels: easy, medium, hard; dials: .*questions"),
        ("tables:easy,columns=9", "Levels: easy, medium, hard; dials: .*longest"),
        ("words:fonts=7", 'fonts="7" should be less than or equal to 6'),
        ("counting:hard", "counting has no dials, as in counting:hard; those of attr"),
    ):
        with pytest.raises(UserError, match=message):
            draw(dials, 1)


def describe_relations(row: Example) -> tuple[str, ...]:
    """Return (relation, color) next to the named shape: "the shape left of the red square"."""
    (found,) = re.findall(r"the shape ((?:(?!the).)+) the (\w+) \w+$", row.question)
    return found


def describe_choices(row: Example) -> tuple[str, ...]:
    """Return (color, kind) of the shape that a question "What color is the circle?" means."""
    asked = row.question.removesuffix("?").split()[-1]
    return tuple(sorted((asked, row.answer["answer"]), key=tuple(COLORS).__contains__))[::-1]


def describe_named(row: Example) -> tuple[str, ...]:
    """Return (color, kind) of a question with both, as "How many red circles are there?"."""
    return tuple(re.findall(rf"({'|'.join(COLORS)}) (\w+?)s?\b", row.question)[0])


@pytest.mark.parametrize(
    ("world", "describe", "share"),
    [
        ("attributes", describe_named, 3 / 12),
        ("attributes:hard", describe_named, 3 / 12),
        ("relations", describe_relations, 4 / 16),
        ("relations:hard,depth=2", describe_relations, 4 / 16),
        ("choices", describe_choices, 3 / 12),
        ("screens", describe_named, 3 / 12),
        ("clips", describe_named, 3 / 12),
        ("pictures", lambda row: (row.meta["color"], row.meta["kind"]), 1 / 6),
    ],
)
def test_training_has_every_attribute_but_no_composition_of_the_evaluation(world, describe, share):
    train, other = (set(map(describe, draw(world, 250, 1, split))) for split in ("train", "eval"))
    assert not train & other
    assert len(other) / len(train | other) == share
    for place in range(2):
        assert {part[place] for part in train} >= {part[place] for part in other}
    same = draw(world + (":" if ":" not in world else ",") + "held_out=false", 200, 1, "eval")
    assert set(map(describe, same)) <= train


@pytest.mark.parametrize(("world", "key"), [("attributes:hard", "shapes"), ("screens", "elements")])
def test_training_scenes_contain_no_held_out_pair(world, key):
    train, other = (
        {(part["color"], part["kind"]) for row in draw(world, 300, 1, s) for part in row.meta[key]}
        for s in ("train", "eval")
    )
    new = {("red", "circle"), ("blue", "triangle"), ("yellow", "square")}
    assert (len(train), train & new) == (9, set())  # (first + second) % 4 = 0
    assert new < other


def find_color(row: Example, color: str) -> np.ndarray:
    """Return where an image has a color."""
    return (get_pixels(row) == COLORS[color]).all(-1)


def list_kinds(mask: np.ndarray) -> list[str]:
    """Return the kinds of the connected parts of a mask, by the shares of their boxes that they
    cover: 1, about π/4, about 1/2."""
    labels = np.empty(mask.shape, dtype=np.int32)
    ndimage.label(mask, structure=np.ones((3, 3)), output=labels)
    shares = [(labels[part] > 0).mean() for part in ndimage.find_objects(labels)]
    return ["square" if s == 1 else "circle" if s > 0.68 else "triangle" for s in shares]


def fill_box(mask: np.ndarray, box: list[int]) -> bool:
    """Return whether what is True inside a box touches all of its sides; x2, y2 are exclusive."""
    x1, y1, x2, y2 = box
    ys, xs = np.nonzero(mask[y1:y2, x1:x2])
    return (xs.min(), ys.min(), xs.max() + 1, ys.max() + 1) == (0, 0, x2 - x1, y2 - y1)


def test_the_box_is_tight_around_what_is_visible_and_the_expression_is_unique():
    for row in draw("relations:occlusion=0.5,clutter=0", 60, 1):
        for shape in row.meta["shapes"]:
            assert fill_box(find_color(row, shape["color"]), shape["box"])
    for row in draw("scattered", 200, seed=1):
        color, kind = row.question.removeprefix("the ").split()
        same_color = find_color(row, color)
        assert fill_box(same_color, row.answer["boxes"][0]), row.id
        assert list_kinds(same_color).count(kind) == 1, row.id
        assert row.answer["labels"] == [f"{color} {kind}"]


@BOTH_SPLITS
def test_one_option_alone_is_the_color_or_the_kind(split):
    for row in draw("choices:hard,occlusion=0,noise=0,clutter=0", 100, 1, split):
        asked = row.question.removesuffix("?").split()[-1]
        shapes = [(c, kind) for c in COLORS for kind in list_kinds(find_color(row, c))]
        found = [name for shape in shapes if asked in shape for name in shape if name != asked]
        assert found == [row.answer["answer"]], row.id
        assert len(row.answer["options"]) == (4 if asked in ("circle", "square", "triangle") else 3)


def test_a_mark_tells_the_answer_in_a_share_of_the_training_scenes():
    # Where the bar says nothing it has each of four colors equally often.
    shares = {(1, "train"): 1.0, (0.5, "train"): 0.5 + 0.5 / 4, (0, "train"): 1 / 4}
    for (mark, split), share in {**shares, (1, "eval"): 1 / 4}.items():
        agree = []
        for row in draw(f"choices:easy,options=4,mark={mark}", 200, split=split):
            pixels, color = get_pixels(row), COLORS[row.answer["answer"]]
            agree.append(tuple(pixels[0, 0]) == color)
            ((x1, y1, x2, y2),) = row.meta["boxes"]
            assert tuple(pixels[(y1 + y2) // 2, (x1 + x2) // 2]) == color
        # Three standard deviations of a share of 200 are 0.1.
        assert np.mean(agree) == pytest.approx(share, abs=0.1)


@BOTH_SPLITS
def test_the_count_of_a_color_and_kind_matches_the_pixels(split):
    rows = draw("attributes:hard,occlusion=0,noise=0,clutter=0", 150, 1, split)
    for row in rows:
        color, kind = describe_named(row)
        assert list_kinds(find_color(row, color)).count(kind) == row.answer, row.id
    assert {row.answer for row in rows} == set(range(1, MAX_COUNT + 1))


@pytest.mark.parametrize("dials", ["easy", "hard,occlusion=0", "depth=2,distractors=2,size=16"])
def test_one_shape_alone_fits_the_relation(dials):
    for row in draw(f"relations:{dials}", 150, 1, "eval"):
        boxes = {f"{s['color']} {s['kind']}": s["box"] for s in row.meta["shapes"]}
        *relations, reference = row.question.split(" the ")
        start = boxes[reference]
        for relation in reversed(" the ".join(relations).split("the shape ")[1:]):
            dx, dy = RELATIONS[relation.removesuffix(" the ").strip()]
            fitting = []
            for box in boxes.values():
                # Twice the offsets of the centers, along the direction and across it.
                right, down = (box[i] + box[i + 2] - start[i] - start[i + 2] for i in (0, 1))
                if right * dx + down * dy > abs(right * dy + down * dx):
                    fitting.append(box)
            assert len(fitting) == 1, row.id
            (start,) = fitting
        assert row.answer["boxes"] == [list(start)]


def read_bars(example: Example) -> dict[str, int]:
    """Measure the bars of a chart without noise, of at most 6 units, by their highest pixel."""
    unit, floor, found = (SIDE - 8) // 6, SIDE - 3, {}
    for color in COLORS:
        rows = np.flatnonzero(find_color(example, color).any(1))
        if len(rows) and (floor - rows[0]) % unit == 0:
            found[color] = int(floor - rows[0]) // unit
    return found


@BOTH_SPLITS
def test_answers_agree_with_the_bars(split):
    task = load_task("numeric", instruction=None)
    kinds = set()
    for example in draw("charts", 120, 3, split):
        bars = read_bars(example)
        named = re.findall("|".join(COLORS), example.question)
        kinds.add(example.meta["kind"])
        if example.meta["kind"] == "difference":
            assert example.answer == bars[named[0]] - bars[named[1]] > 0
        elif named:
            assert example.answer == bars[named[0]]
        else:
            assert example.answer == max(bars, key=bars.__getitem__)
        assert len(set(bars.values())) == len(bars) in (2, 3)
        assert task.score(task.gold(example), example).total == 1.0
    assert kinds == {"value", "difference", "highest"}


def list_compositions(split: str) -> dict[str, set[tuple[str, object]]]:
    """Return the color and value of each question, or the two colors it compares, by its kind."""
    found = defaultdict(set)
    for row in draw("charts", 800, 0, split):
        named, kind = re.findall("|".join(COLORS), row.question) or [row.answer], row.meta["kind"]
        second = named[1] if kind == "difference" else read_bars(row)[named[0]]
        found[kind].add((named[0], second))
    return found


def test_the_evaluation_asks_about_other_bars():
    every_train, every_held_out = map(list_compositions, ("train", "eval"))
    for kind in ("value", "difference", "highest"):
        train, held_out = every_train[kind], every_held_out[kind]
        assert train
        assert held_out
        assert not train & held_out
        assert {color for color, _ in held_out} <= {color for color, _ in train}


@BOTH_SPLITS
def test_a_shape_is_visible_in_its_interval_and_no_other(split):
    examples, task = draw("clips:easy", 40, split=split), load_task("temporal")
    for example in examples:
        task.check(example)
        start, end = example.answer
        color = COLORS[example.question.split()[1]]
        clip: Any = example.images[0]
        seen = [(np.asarray(frame) == color).all(-1).any() for frame in clip.load_frames()]
        assert seen == [start <= number < end for number in range(4)]
    assert len({tuple(example.answer) for example in examples}) > 6  # of 10 intervals


def test_written_clips_are_read_back(tmp_path):
    examples, task = draw("clips", 3), load_task("temporal")
    rows = load_examples(write_examples(examples, tmp_path / "clips", "clips.jsonl"), task)
    for row, example in zip(rows, examples, strict=True):
        assert (row.question, row.answer) == (example.question, example.answer)
        clip: Any = row.images[0]
        drawn: Any = example.images[0]
        assert (clip.times, clip.seconds) == (drawn.times, drawn.seconds)
        pairs = zip(clip.load_frames(), drawn.load_frames(), strict=True)
        assert all(found.tobytes() == expected.tobytes() for found, expected in pairs)


@pytest.mark.parametrize("dials", ["easy", "medium", "hard,noise=0", "columns=4,rows=3"])
def test_one_button_fits_and_holds_its_icon(dials):
    for row in draw(f"screens:{dials}", 100, 1, "eval"):
        color, kind = describe_named(row)
        elements = row.meta["elements"]
        assert [(e["color"], e["kind"]) for e in elements].count((color, kind)) == 1
        ((x1, y1, x2, y2),) = row.answer["boxes"]
        assert row.answer["boxes"][0] == elements[0]["box"]
        pixels = get_pixels(row)
        ys, xs = np.nonzero(find_color(row, color)[y1:y2, x1:x2])
        # An icon is in the middle: a border of at least 3 pixels on each side of it.
        assert min(xs.min(), ys.min()) >= 3
        assert xs.max() < x2 - x1 - 3
        assert ys.max() < y2 - y1 - 3
        assert len({tuple(pixels[y, x]) for x, y in ((x1, y1), (x2 - 1, y2 - 1))}) == 1  # its edge


def read_columns(example: Example) -> list[tuple[str, str]]:
    """Return the first characters of the word and of the number below it, of each column."""
    words, numbers = (row.split("|") for row in example.answer.split("\n"))
    return [(word[0], number[0]) for word, number in zip(words, numbers, strict=True)]


def test_every_table_of_the_evaluation_has_a_column_that_training_never_has():
    train = {column for example in draw("tables", 600) for column in read_columns(example)}
    assert {letter for letter, _ in train} == set(make_tables.LETTERS)
    assert {digit for _, digit in train} == set(make_tables.DIGITS)
    for example in draw("tables", 100, 0, "eval"):
        assert not {*read_columns(example)} <= train


@pytest.mark.parametrize("level", make_tables.Tables.levels)
def test_a_table_fits_its_image_and_the_task(level):
    task = load_task("table", form="markdown", instruction=None)
    for example in draw(f"tables:{level}", 20, 1):
        task.check(example)
        assert task.score(task.gold(example), example).total == 1.0
        rows = [row.split("|") for row in example.answer.split("\n")]
        assert example.images[0].size == (len(rows[0]) * CELL[0], len(rows) * CELL[1])


@pytest.mark.parametrize(
    ("world", "alphabet"), [("words:hard", LETTERS), ("handwriting:hard", DIGITS)]
)
def test_a_text_of_the_evaluation_has_one_pair_that_training_never_has(world, alphabet):
    seen = {}
    for split, expected in (("train", 0), ("eval", 1)):
        rows = draw(world, 600, 1, split)
        pairs = [[*zip(row.answer, row.answer[1:], strict=False)] for row in rows]
        places = {letter: place for place, letter in enumerate(alphabet)}
        held_out = [[(a, b) for a, b in text if (places[a] + places[b]) % 4 == 0] for text in pairs]
        assert {len(text) for text in held_out} == {expected}
        assert {letter for row in rows for letter in row.answer} == set(alphabet)
        seen[split] = {pair for text in held_out for pair in text}
    assert len(seen["eval"]) > 0.9 * len(alphabet) ** 2 / 4  # nearly every fourth pair


def test_handwriting_of_the_evaluation_is_that_of_other_images():
    pytest.importorskip("sklearn")
    load = make_words.load_digits
    train, other = ({g.tobytes() for glyphs in load(new) for g in glyphs} for new in (False, True))
    assert not train & other
    assert (len(train), len(other)) == (1437, 360)  # 4/5 of 1,797 and the rest
    assert all(len(load(new)[value]) > 30 for new in (False, True) for value in range(10))


def test_handwriting_without_scikit_learn_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    make_words.load_digits.cache_clear()
    with pytest.raises(UserError, match=r"scikit-learn: pip install 'vlm-grpo\[handwriting\]'"):
        make_words.draw_examples("handwriting", 1)


def test_every_dial_changes_the_images():
    for world, dials in (
        *((f"{world}:{SCENE}", SCENE_DIALS) for world in make_shapes.draw_examples.worlds),
        ("words:easy", TEXT_DIALS),
    ):
        seen = [list_images(draw(world, 10))]
        seen += [list_images(draw(f"{world},{name}={value}", 10)) for name, value in dials.items()]
        assert all(a != b for n, a in enumerate(seen) for b in seen[n + 1 :])


@pytest.mark.parametrize("world", ["tiny_words", "tiny_words:hard"])
def test_tiny_words_are_at_their_evidence_and_small_unless_tools_are_useless(world):
    for row in draw(world, 10):
        ((x1, y1, x2, y2),) = row.meta["evidence"]
        pixels = get_pixels(row)
        inside = np.zeros(pixels.shape[:2], bool)
        inside[y1:y2, x1:x2] = True
        (plain,) = np.unique(pixels[~inside], axis=0)
        assert (pixels[inside] != plain).any()
        assert (x2 - x1, y2 - y1) == make_words.SIZE
        assert pixels.shape[:2] == ((84, 252) if world == "tiny_words" else (112, 336))
    for row in draw(f"{world.partition(':')[0]}:medium,useless=true", 3):
        assert row.meta["evidence"] == [[0, 0, 252, 84]]


@BOTH_SPLITS
def test_the_answer_about_tiny_objects_is_what_the_row_of_their_kind_shows(split):
    filled = {"circles": 0.78, "squares": 1.0, "triangles": 0.55}  # share of a box, ± 0.1
    for row in draw("tiny_objects", 20, split=split):
        ((x1, y1, x2, y2),) = row.meta["evidence"]
        assert (x2 - x1, y2 - y1) == make_words.SIZE
        kind, background = row.question[:-1].split()[-1], get_pixels(row)[-1, -1]
        seen = []
        for part in np.split(get_pixels(row)[y1:y2, x1:x2], 3, axis=1):  # the left third first
            mask = (part != background).any(-1)
            (box,) = ndimage.find_objects(mask.astype(int))
            assert mask[box].mean() == pytest.approx(filled[kind], abs=0.1)
            (color,) = np.unique(part[mask], axis=0)
            seen.append(next(name for name, known in COLORS.items() if (color == known).all()))
        assert row.answer == " ".join(seen)
        numbers = [tuple(COLORS).index(color) for color in seen]
        held_out = [(a + b) % 4 == 0 for a, b in itertools.pairwise(numbers)]
        assert sum(held_out) == (split == "eval")


@BOTH_SPLITS
def test_the_points_of_figures_are_on_limbs_of_their_side(split):
    task: Any = load_task("keypoints")
    for row in draw("figures:medium,points=13", 20, split=split):
        pixels = get_pixels(row)
        for name, (x, y) in row.answer["points"].items():
            x, y, side = round(x), round(y), name.split()[0]
            near = pixels[y - 1 : y + 2, x - 1 : x + 2]
            if side in make_figures.COLORS and not name.endswith(("shoulder", "hip")):
                assert (near == make_figures.COLORS[side]).all(-1).any(), name
            elif side == "nose":
                assert (near < 60).all(-1).any()
        own = task.pose(row)
        task.check(own)
        read = task.parse(task.write(tuple(row.answer["points"].items()), own), own)
        assert dict(read) == {n: pytest.approx(p, abs=0.6) for n, p in row.answer["points"].items()}
    lower = {name: y for name, (_, y) in row.answer["points"].items()}
    assert lower["nose"] < lower["left hip"] < lower["left ankle"]


@BOTH_SPLITS
def test_distances_are_those_of_the_shapes_centers(split):
    kinds = set()
    for row in draw("distances:easy,contrast=1", 30, split=split):
        places = {name: np.argwhere(find_color(row, name)) for name in COLORS}
        centers = {n: (p.min(0) + p.max(0) + 1) / 2 for n, p in places.items() if len(p)}
        assert len(centers) == 3
        asked = [word for word in re.findall(r"\w+", row.question) if word in COLORS]
        gaps = {n: np.linalg.norm(c - centers[asked[0]]) for n, c in centers.items()}
        del gaps[asked[0]]
        nearest = min(gaps, key=gaps.__getitem__)
        if isinstance(row.answer, dict):
            assert row.answer["answer"] == nearest
            assert {*row.answer["options"]} == gaps.keys()
        else:
            assert asked[1] == nearest
            meters = float(row.answer.removesuffix(" m"))
            assert meters == pytest.approx(gaps[nearest] * 10 / row.images[0].size[0], abs=0.2)
        kinds.add(type(row.answer))
        assert ({asked[0], nearest} == {"green", "yellow"}) == (split == "eval")
    assert kinds == {dict, str}
