"""Notebooks, run in a process that is forked and needs no kernel."""

import json
import os
from pathlib import Path

from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from traitlets.config import Config

from vlm_grpo.task import soundness


def run_notebook(path: Path, folder: Path, changes: dict[str, str]) -> None:
    """Run the code of a notebook in a folder, with changes of texts that occur once; write what it
    prints, and the number of pictures it shows, to ``shown.json``."""
    cells = json.loads(path.read_text("utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    for old, new in changes.items():
        (place,) = (number for number, text in enumerate(code) if old in text)
        code[place] = code[place].replace(old, new)
    os.chdir(folder)
    soundness._PARSE_SECONDS = 5.0  # on a busy machine  # noqa: SLF001
    config = Config(HistoryManager={"enabled": False})
    shell = InteractiveShell.instance(config=config, ipython_dir=str(folder))
    os.environ["MPLBACKEND"] = "module://matplotlib_inline.backend_inline"
    with capture_output() as shown:
        for text in code:
            shell.run_cell(text).raise_error()
    pictures = sum("image/png" in output.data for output in shown.outputs)
    Path("shown.json").write_text(json.dumps({"text": shown.stdout, "pictures": pictures}))
