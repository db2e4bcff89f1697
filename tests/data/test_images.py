"""Images and clips of a dataset: every form of reference, and why each bad one is refused."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dataset_files import encode_image, get_load_error, load, make_row, png, write_files, write_rows
from PIL import ExifTags, Image, ImageOps
from video_files import level, make_video

from vlm_grpo.config.data import VideoSettings
from vlm_grpo.data.images import Clip, MediaReader
from vlm_grpo.data_scripts import make_shapes
from vlm_grpo.types import VideoRef

FRAMES = [f"frames/{number}.png" for number in range(5)]


def test_an_image_is_read_from_every_form_of_reference_up_to_the_limit_of_pixels(folder):
    source = write_rows(folder, make_row())
    assert "8x6 pixels" in get_load_error(source, max_image_pixels=47)
    assert load(source, max_image_pixels=48)
    data = png(8, 6)
    for value, name in (
        *(("a.png", "a.png"), ({"path": "a.png"}, "a.png"), (data, "row 1")),
        ({"bytes": data, "path": "x.png"}, "x.png"),
        ({"bytes": data, "path": None}, "row 1"),
        (Image.new("RGB", (8, 6), (200, 10, 10)), "row 1"),
    ):
        reference = MediaReader(folder, max_pixels=48).read(value, "row 1")
        found = reference.name, reference.size, reference.resized_size
        assert found == (name, (8, 6), (8, 6))
        assert reference.load().getpixel((7, 5)) == (200, 10, 10)


def test_a_rotated_image_has_one_size_in_every_form(tmp_path):
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    data = encode_image(Image.new("RGB", (8, 6)), "JPEG", exif=exif)
    (tmp_path / "a.jpg").write_bytes(data)
    image = Image.open(io.BytesIO(data))
    reader = MediaReader(tmp_path, 100)
    for value in ("a.jpg", data, image, image.copy(), ImageOps.exif_transpose(image)):
        assert reader.read(value, "row 1").size == (6, 8)


def test_a_pil_image_is_read_as_its_file_is(monkeypatch):
    reader, image = MediaReader(None, 100), Image.new("CMYK", (8, 6), (0, 255, 255, 0))
    assert reader.read(image, "row 1").load().getpixel((0, 0)) == (255, 0, 0)
    with pytest.raises(ValueError, match="image row 1 cannot be read: it has 32 bits per channel"):
        reader.read(Image.new("F", (8, 6)), "row 1")
    monkeypatch.setattr("vlm_grpo.data.images.encode_png", lambda *_: pytest.fail("it was encoded"))
    with pytest.raises(ValueError, match="image row 1 has 20x6 pixels, more than"):
        reader.read(Image.new("RGB", (20, 6)), "row 1")


def test_a_pil_image_without_pixels_is_a_bad_row():
    data = make_shapes.draw_examples("counting", 1)[0].images[0].read_bytes()
    closed = Image.new("RGB", (8, 6))
    closed.close()
    lazy = Image.open(io.BytesIO(data))
    lazy.close()
    images = [Image.open(io.BytesIO(data[:-200])), closed, lazy, Image.new("RGB", (0, 0))]
    message = get_load_error([{"image": i, "question": "?", "answer": 1} for i in images])
    for number in range(1, 5):
        assert f"row {number}: image data.eval row {number} image 1 cannot be" in message
    assert message.count("a PIL image must be complete and still open") == 4


def test_what_is_not_an_image_and_a_path_without_a_root_or_with_an_endless_one_are_named(tmp_path):
    for value, name in (
        (np.zeros((90, 90, 3)), r"numpy\.ndarray: use Image\.fromarray"),
        *((io.BytesIO(), r"_io\.BytesIO"), (iter(["a.png"]), "list_iterator"), (None, "None")),
    ):
        problem = f"^an image must be a path, encoded bytes or a PIL image, not {name}$"
        with pytest.raises(ValueError, match=problem):
            MediaReader(None, 100).read(value, "row 1")
    with pytest.raises(ValueError, match=r"image a\.png is a path: set data\.image_root"):
        MediaReader(None, 10**6).read("a.png", "row 1")
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    with pytest.raises(ValueError, match=r"image a\.png (is missing|cannot be read)"):
        MediaReader(loop, 10**6).read("a.png", "row 1")


@pytest.fixture
def clips(tmp_path: Path) -> Path:
    frames = (Image.new("RGB", (8, 6), (10 * number,) * 3) for number in range(5))
    files: dict[str, Any] = dict(zip(FRAMES, map(encode_image, frames), strict=True))
    files |= {"a.mp4": make_video(), "still.mp4": make_video(count=1), "a.txt": "no video"}
    files |= {"cut.mp4": make_video()[:300], "other.png": png(9, 6)}
    return write_files(tmp_path, files)


def read(folder: Path, value: Any, **settings: Any) -> VideoRef:
    reader = MediaReader(folder, 10_000, VideoSettings(**settings))
    clip = reader.read(Clip(value), "row 1 video")
    assert isinstance(clip, VideoRef)
    return clip


def test_a_clip_is_read_from_every_form_of_reference(clips):
    for value, options, times, seconds, levels in (
        # 2 seconds at 10 fps: from the first frame to the last one, at least four.
        ("a.mp4", {"fps": 3}, (0, 0.4, 0.8, 1.1, 1.5, 1.9), 2.0, [0, 4, 8, 11, 15, 19]),
        ("a.mp4", {"fps": 1}, (0, 0.6, 1.3, 1.9), 2.0, [0, 6, 13, 19]),
        ("a.mp4", {"fps": 30, "max_frames": 2}, (0, 1.9), 2.0, [0, 19]),
        ({"bytes": make_video(), "path": None}, {}, (0, 0.6, 1.3, 1.9), 2.0, [0, 6, 13, 19]),
        ("frames", {}, (0, 0.5, 1, 1.5, 2), 2.5, [0, 1, 2, 3, 4]),
        (FRAMES, {"max_frames": 3}, (0, 1, 2), 2.5, [0, 2, 4]),
        ({"frames": FRAMES[:3], "fps": 1}, {}, (0, 1, 2), 3.0, [0, 1, 2]),
        ({"frames": FRAMES[:3], "times": [1, 2.5, 5]}, {}, (1, 2.5, 5), 7.0, [0, 1, 2]),
    ):
        clip = read(clips, value, **options)
        assert clip.times == pytest.approx(times)
        assert clip.seconds == pytest.approx(seconds)
        assert [level(frame) for frame in clip.load_frames()] == levels
        assert clip.load().size == clip.picture_size == (clip.size[0] * len(levels), clip.size[1])


def test_bad_clips_are_refused(clips):
    for value, settings, reason in (
        ("b.mp4", {}, r"video b\.mp4 is missing in"),
        ("../b.mp4", {}, r"video \.\./b\.mp4 is missing in|outside the image folder"),
        ("https://x/b.mp4", {}, "is a URL: download it"),
        ("cut.mp4", {}, r"video cut\.mp4 cannot be read: it is corrupt or no video"),
        ("a.txt", {}, r"video a\.txt cannot be read: it is corrupt or no video"),
        ("still.mp4", {}, "has one frame: give it as an image"),
        ("a.mp4", {"max_seconds": 1.5}, "has 2 seconds, more than data.video.max_seconds=1.5"),
        ({"frames": FRAMES, "fps": 0.01}, {"max_seconds": 99}, "has 500 seconds, more than"),
        (make_video(size=(160, 90)), {}, "160x90 pixels, more than data.max_image_pixels=10000"),
        (FRAMES[:1], {}, "has 1 frames; it must have at least 2"),
        ([*FRAMES, "other.png"], {}, r"frames of unequal sizes, such as other\.png"),
        ([*FRAMES, "gone.png"], {}, r"image gone\.png is missing"),
        *(
            ({"frames": FRAMES, "times": times}, {}, "an ascending time in seconds for each frame")
            for times in ([0, 1], [0, 1, 1, 2, 3], [0, 1, float("nan"), 2, 3])
        ),
        ({"frames": FRAMES, "fps": 0}, {}, "a positive number as fps, not 0"),
        ({"frames": 3}, {}, "a list of frames or an object with frames, not int"),
        (3, {}, "a list of frames or an object with frames, not int"),
        ("other.png", {}, r"video other\.png"),
    ):
        with pytest.raises(ValueError, match=reason):
            read(clips, value, **settings)
    row = {"question": "?", "answer": 1, "videos": ["a.mp4"]}
    message = get_load_error(write_rows(clips, row), video={"max_seconds": 1})
    assert "rows.jsonl:1: video a.mp4 has 2 seconds" in message


def test_frames_of_a_folder_are_sorted_by_their_numbers(clips):
    write_files(clips, {f"frames/{number}.png": png(8, 6) for number in range(5, 12)})
    clip = read(clips, "frames")
    assert [int(Path(frame.name).stem) for frame in clip.frames] == list(range(12))


def test_each_file_is_opened_once_and_a_clip_is_no_image(clips):
    reader = MediaReader(clips, 10_000, VideoSettings())
    image, clip = reader.read("other.png", "row 1"), reader.read(Clip("a.mp4"), "row 1")
    for name, reason in (("b.png", "is missing"), ("a.mp4", "cannot be read")):
        with pytest.raises(ValueError, match=f"image {name} {reason}"):
            reader.read(name, "row 2")
    for name, value, first in (("other.png", "other.png", image), ("a.mp4", Clip("a.mp4"), clip)):
        (clips / name).unlink()
        assert reader.read(value, "row 3") is first
    with pytest.raises(ValueError, match=r"video a\.mp4 cannot be read"):
        clip.load()
