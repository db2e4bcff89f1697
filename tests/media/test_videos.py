"""Videos: headers, frames at given times, and frames side by side."""

import io
import random
import wave
from types import SimpleNamespace
from typing import Any

import av
import pytest
from video_files import TITLE, level, make_video

from vlm_grpo.media import videos
from vlm_grpo.media.videos import decode_frames, read_shape

SIZE = (64, 48)
UNEVEN = [step + 7 * (step // 20) for step in range(480)]


@pytest.mark.parametrize("codec", ["mpeg4", "libx264"])
@pytest.mark.parametrize("container", ["mp4", "matroska", "avi", "mpegts"])
def test_frames_are_those_shown_at_the_times(container, codec):
    gop = (12, 2) if codec == "libx264" else None
    data = make_video(container=container, codec=codec, gop=gop)
    assert read_shape(io.BytesIO(data)) == (SIZE, 10, 20)
    frames = decode_frames(io.BytesIO(data), [0.0, 0.3, 0.94, 0.96, 1.9], SIZE)
    assert [level(frame) for frame in frames] == [0, 3, 9, 10, 19]


def test_a_frame_is_shown_until_the_next_one_where_they_are_uneven():
    data = make_video(count=4, places=[0, 1, 2, 60])
    times = [0.0, 0.1, 0.7, 3.0, 5.9, 6.0]
    shown = [0, 1, 2, 2, 2, 3]
    assert [level(frame) for frame in decode_frames(io.BytesIO(data), times, SIZE)] == shown


@pytest.mark.parametrize("places", [None, UNEVEN], ids=["even", "uneven"])
@pytest.mark.parametrize("codec", ["mpeg4", "libx264"])
@pytest.mark.parametrize("gop", [(12, 3), (400, 0)], ids=["many key frames", "few"])
@pytest.mark.parametrize("container", ["mp4", "matroska"])
def test_the_index_changes_no_frame(container, gop, codec, places, monkeypatch):
    data = make_video(480, container=container, codec=codec, places=places, gop=gop)
    choice = random.Random(0)
    for count in (2, 20):
        times = sorted(choice.uniform(0, 47) for _ in range(count))
        found = decode_frames(io.BytesIO(data), times, SIZE)
        with monkeypatch.context() as patch:
            patch.setattr(videos, "_INDEXED", ())
            expected = decode_frames(io.BytesIO(data), times, SIZE)
        assert [frame.tobytes() for frame in found] == [frame.tobytes() for frame in expected]


def test_few_frames_are_read_for_few_that_are_needed_and_a_wrong_index_is_refused():
    with av.open(io.BytesIO(make_video(480, gop=(12, 0)))) as container:
        stream = container.streams.video[0]
        shown = [f.time for f in videos._read_frames(container, stream, lambda: 40.0)]  # noqa: SLF001
    assert shown[0] == 0.0
    assert 38.0 < shown[1] <= 40.0
    parts = iter([iter([SimpleNamespace(time=0.0)]), iter([SimpleNamespace(time=9.0)])])
    wrong: Any = SimpleNamespace(
        format=SimpleNamespace(name="matroska,webm"),
        seek=lambda *_, **__: None,
        decode=lambda _: next(parts),
    )
    stream = SimpleNamespace(average_rate=10, time_base=1)
    with pytest.raises(ValueError, match="its index is wrong"):
        list(videos._read_frames(wrong, stream, lambda: 5.0))  # noqa: SLF001


def test_a_title_need_not_be_utf_8_but_an_unknown_encoding_or_another_size_is_refused():
    data = make_video().replace(TITLE.encode(), b"\xe9" * len(TITLE))
    assert read_shape(io.BytesIO(data)) == (SIZE, 10, 20)
    with pytest.raises(ValueError, match="a frame of 64x48 pixels instead of 32x32"):
        decode_frames(io.BytesIO(data), [0.0], (32, 32))
    data = make_video(container="avi").replace(b"FMP4", b"zzzz")
    with pytest.raises(ValueError, match="its pictures are encoded in an unknown way"):
        read_shape(io.BytesIO(data))


def test_frames_are_resized_one_at_a_time_and_the_last_one_is_repeated_where_few_are_missing():
    data, times = make_video(), [0.0, 1.0, 2.8]
    frames = decode_frames(io.BytesIO(data), times, SIZE, lambda frame: frame.resize((8, 6)))
    assert [(frame.size, level(frame)) for frame in frames] == [((8, 6), n) for n in (0, 10, 19)]
    with pytest.raises(ValueError, match=r"ends before 3\.1 seconds: it is incomplete or corrupt"):
        decode_frames(io.BytesIO(data), [1.0, 3.1], SIZE)


def make_sound() -> bytes:
    with wave.open(buffer := io.BytesIO(), "wb") as file:
        file.setparams((1, 2, 8000, 0, "NONE", ""))
        file.writeframes(b"\x00" * 8000)
    return buffer.getvalue()


OTHERS = {
    **{"empty": b"", "zeros": b"\x00" * 4096, "cut off": make_video()[:300]},
    "playlist": b"#EXTM3U\n#EXT-X-VERSION:3\n#EXTINF:1,\nfile:///etc/passwd\n",
    **{"list of files": b"ffconcat version 1.0\nfile /etc/passwd\n", "sound": make_sound()},
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_files_are_refused(name):
    for read in (read_shape, lambda file: decode_frames(file, [0.0], SIZE)):
        with pytest.raises(ValueError, match="it is corrupt or no video"):
            read(io.BytesIO(OTHERS[name]))


def test_damaged_frames_are_refused_or_decoded_but_never_crash():
    data = bytearray(make_video(count=8))
    for start in range(40, len(data) - 16, len(data) // 25):
        damaged = bytearray(data)
        damaged[start : start + 16] = b"\xff" * 16
        try:
            frames = decode_frames(io.BytesIO(damaged), [0.0, 0.5], SIZE)
        except ValueError:
            continue
        assert len(frames) == 2
