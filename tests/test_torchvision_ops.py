"""PyPI's torchvision beside a CPU build of torch: transforms work, missing operators say so, in every process that imports headrace."""

import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(torch.version.cuda is not None, reason="a CUDA build of torch loads torchvision's operators itself")


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)


def test_fresh_process_resizes_and_reports_a_missing_operator() -> None:
    code = """
import headrace
import torch
from torchvision.transforms.v2 import functional
from torchvision.transforms import InterpolationMode
pixels = torch.arange(48, dtype=torch.float32).reshape(1, 1, 6, 8)
print(functional.resize(pixels, [3, 4], interpolation=InterpolationMode.BICUBIC, antialias=True).shape)
from transformers import Qwen2VLImageProcessor, Qwen3VLVideoProcessor
print(Qwen3VLVideoProcessor().merge_size)
import torchvision
if torchvision.extension._has_ops():
    print("operators loaded")
else:
    try:
        torchvision.ops.nms(torch.zeros(1, 4), torch.zeros(1), 0.5)
    except (RuntimeError, NotImplementedError) as error:
        print("nms refused:", error)
"""
    done = run(code)
    assert done.returncode == 0, done.stderr
    assert "torch.Size([1, 1, 3, 4])" in done.stdout
    assert "operators loaded" in done.stdout or "nms refused: " in done.stdout


def test_installing_imports_neither_torch_nor_torchvision() -> None:
    done = run("import sys, headrace; headrace.torchvision_ops.install(); print(sorted({'torch', 'torchvision'} & set(sys.modules)))")
    assert done.stdout.strip() == "[]", done.stderr
