"""The report on a model: equal results of both forms, and models without a shared form."""

from PIL import Image
from transformers.utils.logging import enable_progress_bar

from vlm_grpo.config.data import PILLOW_WARNS_AT
from vlm_grpo.eval.predict import read_image
from vlm_grpo.model import doctor, loading
from vlm_grpo.model.doctor import diagnose
from vlm_grpo.model.engine.shared import PrefixInputs
from vlm_grpo.model.families.family import Family


def test_both_forms_of_the_embedded_model_agree(tmp_path):
    Image.new("RGB", (90, 60), "red").save(tmp_path / "a.png")
    image = read_image(tmp_path / "a.png", PILLOW_WARNS_AT)
    lines = list(diagnose("embedded", image))
    names = [line.split()[0] for line in lines]
    assert names == [*("model", "family", "tools", "pixel", "image"), *("attention", "form")]
    # Patches of 14 pixels, merged 2 by 2: sides are rounded to multiples of 28.
    assert "90 × 60 pixels, resized to 84 × 56; " in lines[4]
    assert "8 of them for the image" in lines[4]  # 3 × 2 tokens, and the markers around them
    assert lines[-2].startswith("attention    PyTorch's flash kernels for CPUs")
    assert lines[-1].endswith("one prompt pass per group of 4 (policy.engine=auto)")


def test_a_model_of_no_known_family_without_a_shared_form(monkeypatch, capsys):
    enable_progress_bar()
    monkeypatch.setattr(loading, "load_family", lambda config: Family())
    for module in (doctor, loading):
        monkeypatch.setattr(module, "why_not_shared", lambda *_: "no reason")
    lines = list(diagnose("embedded"))
    assert lines[1].startswith("family       none of the known ones, coordinate frame")
    assert lines[-1] == "form         one prompt pass per completion: no reason"
    assert capsys.readouterr().err == ""


def test_a_shared_form_that_computes_something_else_is_not_used(monkeypatch):
    length = property(lambda self: len(self.token_ids))  # of the prompt, not of its image's grid
    monkeypatch.setattr(PrefixInputs, "next_position", length)
    *_, last = diagnose("embedded")
    start = "form         one prompt pass per completion: with a shared prompt, the log-probs of "
    assert last.startswith(start)
    assert last.endswith("nats on average from those of transformers (rounding: at most 0.001)")
