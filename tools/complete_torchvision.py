"""Make torchvision importable beside torch's CPU build: python tools/complete_torchvision.py

The ordinary package index has torchvision for CUDA only. Beside torch's CPU build its compiled operators do not load,
and `import torchvision` fails, because it registers implementations of operators that nobody has declared. vLLM's
Qwen3.5 and Qwen3-VL and the image processors of transformers import torchvision, but call none of these operators. So
their declarations are appended to torchvision/extension.py, for the case that the operators are missing. It has to be
done in the installed package, because vLLM starts processes that import torchvision before any code of ours.

A torchvision that loads, such as the CPU build from PyTorch's own index, is left as it is. The exit status is 1 where
torchvision does not load even so; uninstall it then, because transformers imports it wherever it is installed.
"""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

DECLARATIONS = """

# Appended by hpc_es, tools/complete_torchvision.py: declarations of the operators that did not load.
if not _has_ops():
    _declared = torch.library.Library("torchvision", "DEF")
    for _operator in (
        "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
        "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
        "roi_align(Tensor input, Tensor rois, float spatial_scale, int pooled_height, int pooled_width, "
        "int sampling_ratio, bool aligned) -> Tensor",
    ):
        _declared.define(_operator)
"""


def complete(package: Path) -> None:
    """Append the declarations to the torchvision in this folder."""
    module = package / "extension.py"
    changed = module.with_suffix(".tmp")
    changed.write_text(module.read_text() + DECLARATIONS)
    os.replace(changed, module)


def why_not() -> str:
    """Why torchvision does not load in a new process; empty if it does."""
    tried = subprocess.run([sys.executable, "-c", "import torchvision"], capture_output=True, text=True)
    return (tried.stderr.strip().splitlines() or ["no reason given"])[-1] if tried.returncode else ""


def main() -> int:
    found = find_spec("torchvision")
    if found is None or found.origin is None:
        print("torchvision is not installed")
        return 1
    reason = why_not()
    if "operator torchvision::" in reason:
        complete(Path(found.origin).parent)
        reason = why_not()
    if reason:
        print(f"torchvision does not load: {reason}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
