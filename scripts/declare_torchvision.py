"""Makes torchvision load with a torch for CPUs: PyPI has it only for CUDA, without which its
compiled part does not load. The script declares the two operators that the rest needs when it is
imported; preparing pictures calls neither. It changes the copy of this interpreter.

    python scripts/declare_torchvision.py
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

IMPORT = "import torch\n"
DECLARED = """import torch

_OPERATORS = torch.library.Library("torchvision", "FRAGMENT")
for _name in ("nms", "qnms"):
    _OPERATORS.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""


def main() -> None:
    """Write the declarations, once."""
    spec = find_spec("torchvision")
    if spec is None or spec.origin is None:
        raise SystemExit("torchvision is not installed here")
    file = Path(spec.origin).parent / "extension.py"
    text = file.read_text("utf-8")
    if "_OPERATORS" in text:
        return
    if IMPORT not in text:
        raise SystemExit(f"{file} does not import torch: this torchvision is not known here")
    file.write_text(text.replace(IMPORT, DECLARED, 1), "utf-8")


if __name__ == "__main__":
    main()
