"""What breaks a file of each format, and the part of the message that says so."""

from __future__ import annotations

import copy
import gzip
import json
import tarfile
from itertools import pairwise
from typing import Any

from dataset_files import png
from published_formats import CAPTIONS, COCO, IMAGES, SAMPLES, YAML, make_tar, voc_xml, yolo_labels

Changes = dict[str, Any]
HUGE = 16 * 2**20 + 1


def change(value: Any, path: str, new: Any) -> Any:
    """Return a copy of a JSON value with one part replaced; ``...`` removes it."""
    changed = copy.deepcopy(value)
    *keys, last = [int(key) if key.isdigit() else key for key in path.split(".")]
    inner = changed
    for key in keys:
        inner = inner[key]
    if new is ...:
        del inner[last]
    else:
        inner[last] = new
    return changed


def coco(path: str, new: Any) -> Changes:
    return {"instances.json": change(COCO, path, new)}


def captions(path: str, new: Any) -> Changes:
    return {"captions.json": change(CAPTIONS, path, new)}


def voc(old: str, new: str) -> Changes:
    text = voc_xml("a")
    assert old in text
    return {"Annotations/a.xml": text.replace(old, new, 1)}


def yolo(line: str | bytes) -> Changes:
    good = yolo_labels("a")
    return {"labels/a.txt": line if isinstance(line, bytes) else f"{good}{line}\n"}


def tar(**members: Any) -> Changes:
    """Return a shard with members added before the samples; ``_`` in a name is a dot."""
    added = {name.replace("_", "."): content for name, content in members.items()}
    return {"shard-0.tar": make_tar({**added, **SAMPLES})}


def link(kind: bytes, target: str = "a.png") -> tarfile.TarInfo:
    info = tarfile.TarInfo("x.png")
    info.type, info.linkname = kind, target
    return info


def named(name: str) -> Changes:
    return {"shard-0.tar": make_tar({name: IMAGES["a"], **SAMPLES})}


def metadata(**changes: Any) -> Changes:
    row = {"file_name": "a.png", "question": "How many?", "answer": 1, **changes}
    return {"metadata.jsonl": [{k: v for k, v in row.items() if v is not ...}]}


def raw(name: str, data: bytes) -> Changes:
    return {name: data}


def json_cases(name: str, content: Any) -> dict[str, tuple[Changes, str]]:
    """Return what breaks any JSON file."""
    text = json.dumps(content).encode()
    return {
        "empty": (raw(name, b""), "it is not JSON"),
        "truncated": (raw(name, text[:-40]), "it is not JSON"),
        "UTF-16": (raw(name, text.decode().encode("utf-16")), "it is not UTF-8"),
        "NaN": (raw(name, text.replace(b"64", b"NaN", 1)), "it contains NaN"),
        "deep": (raw(name, b"[" * 99 + b"]" * 99), "nested deeper than"),
        "endless number": (raw(name, text.replace(b"64", b"9" * 5000, 1)), "it is not JSON"),
        "a number": (raw(name, b"3"), "must be a JSON array of objects or have COCO's"),
        "no images": ({name: change(content, "images", ...)}, "not a dict with annotations"),
        "images is an object": ({name: change(content, "images", {})}, "images must be a list"),
        "annotations is text": ({name: change(content, "annotations", "x")}, "must be a list"),
        "no image": ({name: change(content, "images", [])}, "no image with its image_id 7"),
        "an image is text": ({name: change(content, "images.1", "b")}, "entry 2 must be an object"),
        "image id is missing": (
            {name: change(content, "images.0.id", ...)},
            "entry 1: its id must",
        ),
        "image id is a list": ({name: change(content, "images.0.id", [7])}, "entry 1: its id must"),
        "same image id": (
            {name: change(content, "images.1.id", 7)},
            "images, entry 2: its id 7 is a duplicate of entry 1",
        ),
        "no file name": (
            {name: change(content, "images.1.file_name", ...)},
            "images, entry 2: its file_name must be text, not None",
        ),
        "file name is a number": (
            {name: change(content, "images.1.file_name", 5)},
            "images, entry 2: its file_name must be text, not 5",
        ),
        "annotation is a number": (
            {name: change(content, "annotations.1", 5)},
            "annotation 2: it must be an object, not a int",
        ),
        "unknown image id": (
            {name: change(content, "annotations.1.image_id", 99)},
            "annotation 2",
        ),
        "image id is true": (
            {name: change(content, "annotations.1.image_id", True)},
            "annotation 2",
        ),
        "image elsewhere": (
            {name: change(content, "images.1.file_name", "../b.png")},
            "image 2: image ../b.png is outside the image folder",
        ),
        "missing image": ({"b.png": None}, "image 2: image b.png is missing in"),
    }


BROKEN: dict[str, dict[str, tuple[Changes, str]]] = {
    "coco": {
        **json_cases("instances.json", COCO),
        "no categories": (coco("categories", ...), "categories must be a list, not None"),
        "same category id": (coco("categories.1.id", 3), "entry 2: its id 3 is a duplicate of"),
        "empty category": (coco("categories.2.name", " "), "categories, entry 3: its name must"),
        "unknown category": (
            coco("annotations.2.category_id", 9),
            "annotation 3 (id 3): there is no category with its category_id 9",
        ),
        "no box": (coco("annotations.2.bbox", ...), "annotation 3 (id 3): its bbox must be four"),
        "three numbers": (coco("annotations.2.bbox", [1, 2, 3]), "its bbox must be four numbers"),
        "text box": (coco("annotations.2.bbox", ["1", 2, 3, 4]), "its bbox must be four numbers"),
        "negative width": (coco("annotations.2.bbox.2", -4), "annotation 3 (id 3): box [40, 8, 36"),
        "no height": (coco("annotations.2.bbox.3", 0), "(x1, y1, x2, y2) has no area"),
        "box outside": (
            coco("annotations.3.bbox.2", 99),
            "annotation 4 (id 4): box [0, 0, 99, 30] (x1, y1, x2, y2) is outside its image of 40",
        ),
        "infinite box": (
            {"instances.json": json.dumps(COCO).replace("12.5", "1e999")},
            "has a number that is not finite",
        ),
        "other size": (
            coco("images.1.width", 80),
            "image 2: image b.png has 40x30 pixels, but 80x30 by the annotations",
        ),
    },
    "captions": {
        "no caption": (captions("annotations.1.caption", ...), "annotation 2: its caption must be"),
        "empty caption": (captions("annotations.1.caption", " "), "its caption must be text"),
        "caption is a list": (captions("annotations.1.caption", ["x"]), "its caption must be text"),
    },
    "voc": {
        "empty": ({"Annotations/a.xml": b""}, "a.xml: no element found"),
        "truncated": ({"Annotations/a.xml": voc_xml("a")[:-60]}, "a.xml: unclosed token: line 1"),
        "no XML": ({"Annotations/a.xml": "{}"}, "a.xml: not well-formed (invalid token): line 1"),
        "huge": ({"Annotations/a.xml": b" " * HUGE}, "the file is larger than"),
        "entity bomb": (
            {
                "Annotations/a.xml": '<!DOCTYPE a [<!ENTITY b "cup"><!ENTITY c "&b;&b;&b;">]>'
                + voc_xml("a").replace("cup", "&c;")
            },
            "a.xml: it has a document type",
        ),
        "bomb in UTF-16": (
            {
                "Annotations/a.xml": ('<!DOCTYPE a [<!ENTITY b "c">]>' + voc_xml("a")).encode(
                    "utf-16"
                )
            },
            "a.xml: it has a document type",
        ),
        "external entity": (
            {
                "Annotations/a.xml": '<!DOCTYPE a [<!ENTITY b SYSTEM "file:///etc/passwd">]>'
                + voc_xml("a").replace("cup", "&b;")
            },
            "a.xml: it has a document type",
        ),
        "unknown entity": (voc("<name>cup", "<name>&cup;"), "a.xml: undefined entity"),
        "other root": ({"Annotations/a.xml": "<html></html>"}, "its root must be annotation, not"),
        "no file name": (voc("<filename>a.png</filename>", ""), "a.xml: it has no filename"),
        "no label": (voc("<name>cup</name>", ""), "a.xml: object 1: it has no name"),
        "no box": (voc("bndbox", "box"), "a.xml: "),
        "no edge": (voc("<xmin>20</xmin>", ""), "a.xml: object 2: it has no xmin"),
        "text edge": (
            voc("<xmin>20", "<xmin>left"),
            "object 2: its xmin must be a number, not 'left'",
        ),
        "NaN": (voc("<xmin>20", "<xmin>nan"), "object 2: box [nan, 8.0, 36.0, 20.0] has a number"),
        "inverted": (voc("<xmin>20", "<xmin>50"), "object 2: box [50.0, 8.0, 36.0, 20.0] (x1"),
        "no area": (voc("<xmin>20", "<xmin>36"), "(x1, y1, x2, y2) has no area"),
        "negative": (voc("<xmin>20", "<xmin>-9"), "is outside its image of 64x48"),
        "outside": (voc("<xmax>36", "<xmax>99"), "object 2: box [20.0, 8.0, 99.0, 20.0] (x1"),
        "other size": (voc("<width>64", "<width>640"), "has 64x48 pixels, but 640x48 by the"),
        "missing image": ({"JPEGImages/a.png": None}, "image a.png is missing in"),
        "image elsewhere": (voc("a.png", "../../x.png"), "is outside the image folder"),
        "listed without file": (
            {"ImageSets/Main/val.txt": "a\nc\n"},
            "Annotations/c.xml: it cannot be read: No such file",
        ),
        "list with a path": ({"ImageSets/Main/val.txt": "../../x\n"}, "x.xml: it cannot be read"),
    },
    "yolo": {
        "unknown class": (yolo("7 .5 .5 .1 .1"), "a.txt:4: class 7 has no name in the 3 names"),
        "negative class": (yolo("-1 .5 .5 .1 .1"), "a.txt:4: class -1 has no name"),
        "no box": (yolo("1"), "a.txt:4: it must be a class and x, y, width, height or"),
        "three values": (yolo("1 .5 .5 .1"), "a.txt:4: it must be a class and x, y, width"),
        "text": (yolo("1 .5 left .1 .1"), "a.txt:4: it must be a class number and numbers"),
        "pixels": (yolo("1 20 8 36 20"), "a.txt:4: '1 20 8 36 20' has a value outside 0 to 1"),
        "NaN": (yolo("1 nan .5 .1 .1"), "has a value outside 0 to 1"),
        "infinite": (yolo("1 inf .5 .1 .1"), "has a value outside 0 to 1"),
        "no width": (yolo("1 .5 .5 0 .1"), "a.txt:4: '1 .5 .5 0 .1' is a box without area"),
        "box outside": (yolo("1 .9 .5 .4 .1"), "a.txt:4: box"),
        "polygon line": (yolo("1 .1 .1 .5 .1 .9 .1"), "a.txt:4: box"),
        "not UTF-8": (yolo(b"1 .5 .5 .1 .1 \xff\n"), "a.txt: image"),
        "huge": (yolo(b" " * HUGE), "its labels are larger than"),
        "missing image": ({"images/b.png": None}, "labels/b.txt: there is no image with its name"),
        "two images": ({"images/a.jpg": png(8, 8)}, "id 'a-1' is a duplicate of"),
        "no images": ({"images/a.png": None, "images/b.png": None}, "there is no images"),
        "no data.yaml": ({"data.yaml": "train: images"}, "it has no names of the classes"),
        "YAML": ({"data.yaml": "names: [cup"}, "data.yaml is not YAML"),
        "Python in YAML": (
            {"data.yaml": "names: !!python/object/apply:os.system [ls]\ntrain: images"},
            "data.yaml is not YAML",
        ),
        "alias bomb": (
            {
                "data.yaml": "a: &a [x, x, x, x, x, x, x, x, x]\n"
                + "".join(f"{n}: &{n} [{f'*{m}, ' * 9}]\n" for m, n in pairwise("abcdefghi"))
                + "names: [*i]\nval: images"
            },
            "names must be a list of class names",
        ),
        "names are text": ({"data.yaml": "names: cup\nval: images"}, "names must be a list of"),
        "no part": (
            {"data.yaml": "names: [cup, book]\ntrain: images"},
            "data.yaml has no val or valid",
        ),
        "part elsewhere": ({"data.yaml": YAML.replace(": images", ": gone")}, "there is no gone"),
        "list of others": (
            {"data.yaml": "names: [cup]\nval: t.txt", "t.txt": "../../x.png\n"},
            "x.png",
        ),
    },
    "metadata": {
        "empty": (raw("metadata.jsonl", b""), "has no examples"),
        "no file name": (metadata(file_name=...), "metadata.jsonl:1: it has no file_name"),
        "image elsewhere": (metadata(file_name="../c.png"), ":1: image ../c.png is outside"),
        "two columns": (metadata(file_names=["a.png"]), ":1: it has file_name and file_names"),
    },
    "webdataset": {
        "empty": ({"shard-0.tar": b""}, "shard-0.tar cannot be read: empty file"),
        "no tar": ({"shard-0.tar": b"PK\3\4" * 300}, "cannot be read"),
        "compressed": ({"shard-0.tar": gzip.compress(make_tar(SAMPLES))}, "must be decompressed"),
        "truncated": ({"shard-0.tar": make_tar(SAMPLES)[:700]}, "cannot be read"),
        "damaged": (
            {"shard-0.tar": make_tar(SAMPLES).replace(b"a.json", b"a.jsom", 1)},
            "cannot be read",
        ),
        "symbolic link": (
            tar(x=link(tarfile.SYMTYPE, "/etc/passwd")),
            "x.png is not a regular file",
        ),
        "hard link": (tar(x=link(tarfile.LNKTYPE)), "sample x: member x.png is not a regular file"),
        "device": (tar(x=link(tarfile.CHRTYPE)), "member x.png is not a regular file"),
        "parent folder": (named("../../x.png"), "is named outside of the archive"),
        "inner parent": (named("a/../../x.png"), "is named outside of the archive"),
        "absolute name": (named("/etc/x.png"), "is named outside of the archive"),
        "two members": (
            {"shard-0.tar": make_tar({"./x.png": IMAGES["a"], **SAMPLES, "./y.png": IMAGES["a"]})},
            "it has no question",
        ),
        "key twice": (
            {"shard-0.tar": make_tar({**SAMPLES, "c.txt": b"1", "./a.json": SAMPLES["a.json"]})},
            "id 'shard-0/a' is a duplicate of",
        ),
        "bad JSON": (tar(x_json=b"{"), "sample x: the line is not JSON"),
        "huge JSON": (tar(x_json=b" " * HUGE), "sample x: its .json is longer than"),
        "text in Latin-1": (tar(x_txt=b"caf\xe9"), "sample x: its text is not UTF-8"),
        "no answer": (tar(x_json=b'{"question": "?"}'), "sample x: it has no answer"),
        "image elsewhere": (
            tar(x_json=b'{"question": "?", "answer": 1, "image": "../x.png"}'),
            "sample x: image ../x.png is outside the image folder",
        ),
    },
}
"""Changed files of each format and the part of the message, by name."""
