"""The cookbook's hooks record what layernorm-backward needs: it finds torch's own gradients."""

import re
from pathlib import Path

import pytest
from support import read

from gradtool import layernorm_backward

COOKBOOK = Path(__file__).parents[3] / "docs" / "cookbook.md"
# Torch computes in float32; relative to the largest element, 1e-7 was seen.
FLOAT32 = 1e-6


def test_the_hooks_of_the_cookbook_record_what_gives_the_gradients_of_torch(tmp_path, monkeypatch):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    (block,) = re.findall(r"^```python\n(import torch\n.*?)^```$", COOKBOOK.read_text(), re.MULTILINE | re.DOTALL)
    torch.manual_seed(0)
    norms = [torch.nn.LayerNorm(16), torch.nn.LayerNorm(16)]
    for one in norms:
        torch.nn.init.normal_(one.weight)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), norms[0], torch.nn.GELU(), norms[1], torch.nn.Linear(16, 1))
    batch = torch.randn(4, 7, 8)
    monkeypatch.chdir(tmp_path)
    exec(block, {"model": model, "batch": batch, "loss_of": lambda output: output.square().sum()})  # noqa: S102 - ours
    names = {"scale": "weight", "scale_grad": "weight", "bias_grad": "bias"}
    layernorm_backward(["acts.safetensors", "model.safetensors"], output="grads", **names)
    found = read(tmp_path / "grads")
    for name in ("1.weight", "1.bias", "3.weight", "3.bias"):
        truth = model.get_parameter(name).grad.numpy()
        assert abs(found[name] - truth).max() <= FLOAT32 * abs(truth).max()
