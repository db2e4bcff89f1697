"""Tests of the converters of screens on small files in the published layouts."""

from __future__ import annotations

from dataset_files import png, write_files, write_table


def test_screenspot_turns_widths_into_corners(convert, tmp_path):
    row = {
        "img_filename": "mobile_1.png",
        "bbox": [10, 20, 30, 8],
        "instruction": "open the settings",
        "data_type": "icon",
        "data_source": "ios",
    }
    files = {"ann/screenspot_mobile_v2.json": [row], "ann/screenspot_web_v2.json": [row]}
    write_files(tmp_path, {**files, "i/mobile_1.png": png()})
    result = convert("screenspot", tmp_path / "ann", tmp_path / "i")
    box = {"boxes": [[10, 20, 40, 28]]}
    assert result.answers == {"screenspot_mobile_v2-0": box, "screenspot_web_v2-0": box}
    assert result.rows[1]["meta"] == {"platform": "web", "ui_type": "icon", "source": "ios"}
    assert result.examples[0].question == "open the settings"
    assert "expected 1,272 (ScreenSpot and ScreenSpot-v2)" in result.output


def test_screenspot_pro_has_corners(convert, tmp_path):
    row = {
        "img_filename": "vscode/a.png",
        "bbox": [10, 20, 30, 40],
        "instruction": "run",
        "instruction_cn": "运行",
        "id": "vscode_macos_0",
        "application": "vscode",
        "platform": "macos",
        "img_size": [64, 48],
        "ui_type": "text",
        "group": "Dev",
    }
    write_files(tmp_path, {"ann/vscode_macos.json": [row], "i/vscode/a.png": png()})
    result = convert("screenspot", tmp_path / "ann", tmp_path / "i")
    assert result.answers == {"vscode_macos_0": {"boxes": [[10, 20, 30, 40]]}}
    assert result.rows[0]["meta"] == {
        "platform": "macos",
        "application": "vscode",
        "group": "Dev",
        "ui_type": "text",
    }


def test_os_atlas_scales_fractions_and_leaves_out_boxes_without_area(convert, tmp_path):
    element = {"instruction": "Home", "bbox": [0.25, 0.5, 0.5, 0.75], "data_type": "Button"}
    rows = [
        {"img_filename": "a.png", "elements": [element, {**element, "bbox": [0.5, 0.5, 0.5, 1]}]},
        {"img_filename": "a.png", "instruction": "Sitemap", "bbox": [0, 0, 1, 1]},
        {"img_filename": "gone.png", "elements": [element, element]},
    ]
    write_files(tmp_path, {"windows_splited.json": rows, "images/a.png": png(64, 48)})
    result = convert("os_atlas", tmp_path / "windows_splited.json", tmp_path / "images")
    assert result.answers == {
        "1-0": {"boxes": [[16, 24, 32, 36]]},
        "2-0": {"boxes": [[0, 0, 64, 48]]},
    }
    assert result.reasons == {"its box has no area": 1, "its image cannot be used": 2}
    assert [row["meta"] for row in result.rows] == [{"ui_type": "Button"}, {}]


def test_groundui_is_a_table_or_a_file(convert, tmp_path):
    row = {"instruction": "Click on Save", "bbox": [1, 2, 30, 40], "resolution": [64, 48]}
    row |= {"source": "omniact", "platform": "desktop"}
    image = {"bytes": png(), "path": "a.png"}
    write_table(tmp_path / "hub" / "train-00000-of-00001.parquet", [{**row, "image": image}])
    table = convert("groundui", tmp_path / "hub", tmp_path / "new")
    write_files(tmp_path, {"metadata.jsonl": [{**row, "image": "a.png"}], "images/a.png": png()})
    (tmp_path / "out" / "groundui.jsonl").unlink()
    file = convert("groundui", tmp_path / "metadata.jsonl", tmp_path / "images")
    assert table.answers == file.answers == {"groundui-1": {"boxes": [[1, 2, 30, 40]]}}
    assert file.rows[0]["meta"] == {"platform": "desktop", "source": "omniact"}
