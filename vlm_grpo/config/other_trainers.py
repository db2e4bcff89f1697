"""Settings of other trainers, read from ``other_trainers.yaml``, with their equivalents here."""

import re
from dataclasses import dataclass
from functools import cache
from importlib import resources

import yaml


@dataclass(frozen=True)
class OtherSetting:
    """A setting of another trainer, the first of the table that has it."""

    trainer: str
    name: str
    equivalent: str  # our key, perhaps with a remark in parentheses, or "none: " and the reason

    @property
    def keys(self) -> list[str]:
        """Our keys; empty if there is no equivalent."""
        if self.equivalent.startswith("none: "):
            return []
        return re.findall(r"[a-z_]+(?:\.[a-z_]+)*", re.sub(r"\(.*?\)|=\S+", "", self.equivalent))

    def __str__(self) -> str:
        name = f"{self.trainer}'s {self.name}"
        if not self.keys:
            return f"{name} has no equivalent here: {self.equivalent.removeprefix('none: ')}"
        return f"{name} is {self.equivalent} here"


@cache
def list_other_settings() -> tuple[OtherSetting, ...]:
    text = (resources.files("vlm_grpo.config") / "other_trainers.yaml").read_text("utf-8")
    table = yaml.safe_load(text)
    same = [
        OtherSetting("TRL", name, f"{block}.{name}")
        for block, names in table.pop("same in TRL").items()
        for name in names.split()
    ]
    return *same, *(
        OtherSetting(trainer, name, equivalent)
        for trainer, rows in table.items()
        for names, equivalent in rows.items()
        for name in names.split()
    )


def find_other_setting(key: str) -> OtherSetting | None:
    """Return the setting of another trainer with this name, or with this last part of a name.

    >>> print(find_other_setting("optim.learning_rate"))
    TRL's learning_rate is optim.lr here
    """
    last = key.rpartition(".")[2]
    for wanted, has_block in ((key, True), (last, True), (last, False)):
        for setting in list_other_settings():
            name = setting.name
            if (name if has_block else name.rpartition(".")[2]) == wanted:
                return setting
    return None
