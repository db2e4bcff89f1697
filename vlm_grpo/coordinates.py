"""Coordinate frames: between a model's numbers and pixels of the original image."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CoordinateFrame:
    """How a model family writes boxes."""

    name: str


ORIGINAL = CoordinateFrame("original")
