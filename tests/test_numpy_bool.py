"""Packages written for older versions of NumPy set `np.bool = bool`; NumPy itself then fails in places."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_SCRIPT = """
import numpy as np
np.bool = bool

import torch
import tensortap as tt

class Masked(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(4, 4)
        self.register_buffer("mask", torch.tensor([True, False, True, True]))

    def forward(self, x, mask):
        return self.fc(x) * mask, mask

torch.manual_seed(0)
model = Masked()
for name, scale in (("a", 1.0), ("b", 1.0), ("c", 2.0)):
    with tt.capture(model, name, keep="tensors", kinds=("input", "output", "buffer", "param_grad")) as tap:
        model(torch.ones(2, 4) * scale, model.mask)[0].sum().backward()
        tap.step()
    model.zero_grad()
print([r.dtype for r in tt.open("a").records(kind=("buffer", "input"), module="")])
print(tt.compare("a", "b").first, tt.compare("a", "c").first.key.kind)
print([copied.dtype for copied in tt.transfer(model, Masked()).copied if "mask" in copied.target])
assert np.bool is bool
"""


def test_capture_compare_and_transfer_work_with_numpys_bool_replaced(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", _SCRIPT], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["['bool', 'float32', 'bool', 'bool']", "None input", "['bool']"]
