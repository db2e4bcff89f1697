"""Charts are rendered in the colors of the page, with readable axes."""

from __future__ import annotations

import math
import re

from vlm_grpo.report.charts import Chart, Line, draw_chart, format_tick


def test_logarithmic_chart_of_zeros_is_rendered_without_a_warning() -> None:
    """Such values come from a sampler that agrees with the trainer bit for bit."""
    rendered = draw_chart(Chart("t", "h", [Line("a", [1, 2], [0.0, 0.0])], logarithmic=True))
    assert "<svg" in rendered.svg


def test_tick_labels_of_small_values_are_complete() -> None:
    rates = [1e-6 * step / 4 for step in range(5)]
    svg = draw_chart(Chart("Learning rate", "", [Line("learning_rate", range(5), rates)])).svg
    # Ticks at quarters of the peak, each with its exponent: no common factor at the axis.
    labels = re.findall(r">([\d.]+(?:e-\d+)?)</text>", svg)
    assert labels[-5:] == ["0", "2.5e-7", "5e-7", "7.5e-7", "1e-6"]
    assert format_tick(5.6e-17, 1.0) == "0"
    assert format_tick(-0.25, 1.0) == "-0.25"
    assert format_tick(12_345.0, 1e4) == "1.23e4"


def test_chart_has_the_colors_of_the_page() -> None:
    rendered = draw_chart(Chart("t", "h", [Line("a", range(1000), [math.nan, *range(999)])]))
    assert "var(--series-0)" in rendered.svg
    assert "#0" not in rendered.svg
    assert "<?xml" not in rendered.svg
    (line,) = rendered.data["lines"]  # type: ignore[misc]
    assert len(line["x"]) == len(line["y"]) <= 400


def test_equal_charts_have_equal_drawings() -> None:
    first, second = (draw_chart(Chart("t", "h", [Line("a", [1, 2], [0, 1])])) for _ in range(2))
    assert first.svg == second.svg
