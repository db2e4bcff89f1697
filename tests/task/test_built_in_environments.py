"""The built-in environments: what they show, their demonstrations and their rewards."""

from dataclasses import replace

import pytest
from PIL import Image, ImageChops
from small_environments import EXAMPLE, see, write
from video_files import level, make_video

from vlm_grpo.data_scripts import make_clips
from vlm_grpo.environments.maze import AT_GOAL, Maze
from vlm_grpo.media.images import encode_png
from vlm_grpo.task.coordinates import FRAMES
from vlm_grpo.task.episodes import EnvironmentRunner, demonstrate
from vlm_grpo.task.registry import load_environment, load_task
from vlm_grpo.task.soundness import check_task
from vlm_grpo.types import EpisodeTurn, Example, VideoRef

WORD = Example("maze-1", (), "Find the word.", "KUQ")
BOX = (20, 10, 90, 60)


def test_zoom_shows_the_part_of_the_original_that_the_evidence_names():
    example = replace(EXAMPLE, meta={"evidence": [list(BOX)]})
    for frame in FRAMES.values():
        zoom = load_environment({"name": "zoom", "min_side": 100}).adapt(frame)
        zoom.begin(example)
        (call,) = zoom.demonstrate(example)
        _, observed = zoom.step(zoom.write(call))
        (image,) = see(observed).images
        expected = EXAMPLE.images[0].load().crop(BOX).resize((140, 100), Image.Resampling.LANCZOS)
        if frame.span == "original":
            assert ImageChops.difference(image.load(), expected).getbbox() is None
        assert image.size == pytest.approx(expected.size, abs=4)  # edges rounded to the frame


@pytest.mark.parametrize("seconds", [0, 1.4, 3, 4])
def test_select_frame_shows_the_frame_of_a_time(seconds):
    (example,) = make_clips.draw_examples("clips", 1)
    example = replace(example, meta={"evidence": [seconds]})
    environment = load_environment({"name": "select_frame", "min_side": 112})
    environment.begin(example)
    (call,) = environment.demonstrate(example)
    _, observed = environment.step(environment.write(call))
    number = min(3, round(seconds))
    assert see(observed).text == f"{number} s:<image>"
    clip = example.images[0]
    assert isinstance(clip, VideoRef)
    shown = clip.frames[number].load().resize((112, 112), Image.Resampling.LANCZOS)
    assert ImageChops.difference(see(observed).images[0].load(), shown).getbbox() is None


def test_select_frame_decodes_a_file_at_any_time_of_it_and_answers_others(tmp_path):
    path = tmp_path / "a.mp4"
    path.write_bytes(make_video(20))  # at 10 frames per second
    clip = VideoRef("a", (64, 48), (64, 48), path=path, times=(0.0, 1.9), seconds=2.0)
    environment = load_environment("select_frame")
    environment.begin(Example("a", (clip,), "", None))
    for seconds, number in ((0.5, 5), (1.23, 12), (2.0, 19)):
        _, observed = environment.step(write("select_frame", seconds=seconds))
        (image,) = see(observed).images
        assert level(image.load()) == number
        assert image.size == (448, 336)
    outside = write("select_frame", seconds=2.1), write("select_frame", seconds=-1)
    for text in (*outside, write("select_frame", seconds=1e9)):
        assert "the video lasts 2 seconds" in see(environment.step(text)[1]).text
    environment.begin(EXAMPLE)
    assert "there is no video" in see(environment.step(outside[0])[1]).text


def test_a_maze_depends_on_the_id_alone_and_is_solved_by_its_demonstration():
    task = load_task("ocr", environment="maze")
    starts = []
    sign, other = (encode_png(Maze().draw_sign(answer)) for answer in (["KUQ"], "KUO"))
    assert sign != other
    with EnvironmentRunner(seconds=20.0) as runner:
        for number in range(6):
            row = replace(WORD, id=f"maze-{number}")
            example, start = runner.begin(task.environment, row)
            assert example.question.startswith("Find the word.\nMove the red disk to the green")
            (image,) = example.images
            assert image.size == (84, 84)
            assert runner.begin(task.environment, row)[0].images[0].data == image.data
            starts.append(image.data)
            turns = demonstrate(runner, start, task, example)
            assert 2 <= len(turns) <= 8
            *way, last = (see(turn.observed) for turn in turns)
            assert last.text == f"{AT_GOAL}<image>"
            assert {observed.text for observed in way} == {"<image>"}
            assert last.images[0].size == (84, 28)
            assert encode_png(last.images[0].load()) == sign
            assert task.score("KUQ", example, turns=turns).rewards["goal"] == 1.0
            short = task.score("KUQ", example, turns=turns[:-1])
            assert (short.rewards["goal"], short.metrics["moves"]) == (0.0, len(turns) - 1)
            assert task.score("KUQ", example).rewards["goal"] == 0.0
            ways = ("up", "down", "left", "right")
            walls = runner.step([start.state] * 4, [write("move", direction=way) for way in ways])
            blocked = [EpisodeTurn("", call, seen) for _, call, seen in walls if see(seen).is_error]
            assert 1 <= len(blocked) <= 3
            assert task.score("", example, turns=blocked).metrics["moves"] is None
    assert len({*starts}) > 1


def test_tasks_are_checked_with_their_environment():
    task = load_task("ocr", environment="maze", weights={"goal": 2.0})
    lines = list(check_task(task, [replace(WORD, id=str(n), answer=f"KU{n}") for n in range(3)]))
    assert lines[0] == "Maze has the tools move"
    assert f"{AT_GOAL}<image>" in "".join(lines)
    assert "demonstrations with gold answers earn 3.000 on average" in lines
    assert any(line.startswith("5 hostile calls are answered in text; the l") for line in lines)
    assert lines[-1] == "OCR is sound on this data"
    task = load_task("ocr", environment="maze", weights={"exact": 0, "character_accuracy": 0})
    lines = list(check_task(task, [WORD]))
    assert lines[-3] == "all rewards are for whole episodes: what answers alone earn is not checked"
