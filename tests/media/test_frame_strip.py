"""The picture of a video has its frames side by side."""

from PIL import Image

from vlm_grpo.media.frame_strip import build_strip, fit_strip


def test_a_strip_shows_at_most_eight_frames_evenly():
    frames = [Image.new("RGB", (640, 100), (n, n, n)) for n in range(20)]
    strip = build_strip(frames)
    assert strip.size == fit_strip((640, 100), 20)[0] == (8 * 320, 50)
    # the middle frame of each eighth of 20 frames
    shown = [strip.getpixel((320 * place, 0)) for place in range(8)]
    assert shown == [(n, n, n) for n in (1, 3, 6, 8, 11, 13, 16, 18)]
    assert build_strip(frames[:1]).size == (320, 50)
