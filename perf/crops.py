"""An environment as for TRL's ``environment_factory``, for ``episode_time.py``."""

from __future__ import annotations

from typing import Any


class Crops:
    """Parts of the image."""

    def reset(self, **row: Any) -> None:
        self.image = row["image"] if "image" in row else row["images"][0]

    def crop(self, x: int, y: int) -> list[dict]:
        """Look at a part of the image.

        Args:
            x: its left edge.
            y: its upper edge.
        """
        part = self.image.crop((x, y, x + 224, y + 224)).resize((448, 448))
        return [{"type": "image", "image": part}]
