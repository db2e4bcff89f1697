"""What breaks a file of each format, and the part of the message that says so: broken_files.yaml,
and here the changes that take code."""

from __future__ import annotations

import copy
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml
from dataset_files import png
from published_formats import CAPTIONS, COCO, YAML, voc_xml, yolo_labels

Changes = dict[str, Any]
HUGE = 16 * 2**20 + 1
TABLE = yaml.safe_load(Path(__file__).with_name("broken_files.yaml").read_text("utf-8"))
JSON_FILES = {"coco": ("instances.json", COCO), "captions": ("captions.json", CAPTIONS)}
XML = "Annotations/a.xml"


def change(value: Any, path: str, new: Any) -> Any:
    changed = copy.deepcopy(value)
    *keys, last = [int(key) if key.isdigit() else key for key in path.split(".")]
    inner = changed
    for key in keys:
        inner = inner[key]
    if new == "REMOVE":
        del inner[last]
    else:
        inner[last] = new
    return changed


def apply(form: str, case: dict[str, Any]) -> Changes:
    """Return the files that a case of the table changes."""
    match case:
        case {"set": [path, new]}:
            name, content = JSON_FILES[form]
            return {name: change(content, path, new)}
        case {"replace": [old, new]}:
            assert old in voc_xml("a")
            return {XML: voc_xml("a").replace(old, new, 1)}
        case {"line": line}:
            return {"labels/a.txt": f"{yolo_labels('a')}{line}\n"}
        case {"row": changes}:
            row = {"file_name": "a.png", "question": "How many?", "answer": 1, **changes}
            return {"metadata.jsonl": [{k: v for k, v in row.items() if v != "REMOVE"}]}
    files: Changes = case["files"]
    return {JSON_FILES[form][0] if name == "FILE" else name: text for name, text in files.items()}


DOCUMENT_TYPES = (
    '<!ENTITY b "cup"><!ENTITY c "&b;&b;">',
    '<!ENTITY c SYSTEM "file:///etc/passwd">',
)
JSON_TEXT = json.dumps(COCO).encode()
WITH_CODE: dict[str, dict[str, tuple[Any, str]]] = {
    "coco": {
        "truncated": (JSON_TEXT[:-40], "it is not JSON"),
        "UTF-16": (JSON_TEXT.decode().encode("utf-16"), "it is not UTF-8"),
        "NaN": (JSON_TEXT.replace(b"64", b"NaN", 1), "it contains NaN"),
        "deep": (b"[" * 99 + b"]" * 99, "nested deeper than"),
        "endless number": (JSON_TEXT.replace(b"64", b"9" * 5000, 1), "it is not JSON"),
        "infinite box": (JSON_TEXT.replace(b"12.5", b"1e999"), "has a number that is not finite"),
    },
    "voc": {
        "truncated": (voc_xml("a")[:-60], "a.xml: unclosed token: line 1"),
        "huge": (b" " * HUGE, "the file is larger than"),
        "bomb in UTF-16": (
            f"<!DOCTYPE a [{DOCUMENT_TYPES[0]}]>{voc_xml('a')}".encode("utf-16"),
            "a.xml: it has a document type",
        ),
        **{
            f"entity {number}": (
                f"<!DOCTYPE a [{text}]>" + voc_xml("a").replace("cup", "&c;"),
                "a.xml: it has a document type",
            )
            for number, text in enumerate(DOCUMENT_TYPES)
        },
    },
    "yolo": {
        "not UTF-8": ({"labels/a.txt": b"1 .5 .5 .1 .1 \xff\n"}, "a.txt: image"),
        "huge": ({"labels/a.txt": b" " * HUGE}, "its labels are larger than"),
        "two images": ({"images/a.jpg": png(8, 8)}, "id 'a-1' is a duplicate of"),
        "alias bomb": (
            "a: &a [x, x, x, x, x, x, x, x, x]\n"
            + "".join(f"{n}: &{n} [{f'*{m}, ' * 9}]\n" for m, n in pairwise("abcdefghi"))
            + "names: [*i]\nval: images",
            "names must be a list of class names",
        ),
        "part elsewhere": (YAML.replace(": images", ": gone"), "there is no gone"),
    },
}
"""Changed files, or the new content of the format's first file, by format and name."""
FIRST = {"coco": "instances.json", "voc": XML, "yolo": "data.yaml"}

BROKEN: dict[str, dict[str, tuple[Changes, str]]] = {
    form: {name: (apply(form, case), case["says"]) for name, case in cases.items()}
    for form, cases in TABLE.items()
}
"""Changed files of each format and the part of the message, by name."""
for _form, _cases in WITH_CODE.items():
    BROKEN[_form] |= {
        name: (changed if isinstance(changed, dict) else {FIRST[_form]: changed}, reason)
        for name, (changed, reason) in _cases.items()
    }
