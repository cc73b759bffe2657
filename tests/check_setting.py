"""A training with Opacus for the tests of ``rasura check-dp``, to which lines are added that go past the mechanism."""

from __future__ import annotations

import textwrap
from pathlib import Path

from rasura.accounting.configurations import Checked, Facts, Stated, checked_files

TRAIN = """\
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader
from opacus import PrivacyEngine
from data import held_out, train_set
{defs}
def main():
    model = nn.Linear(10, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(train_set, batch_size=64)
    test_loader = DataLoader(held_out, batch_size=64)
    criterion = nn.CrossEntropyLoss()
{before}
    engine = PrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0
    )
{body}
main()
"""
STEP = """\
optimizer.zero_grad()
loss = criterion(model(x), y)
loss.backward()
optimizer.step()
"""


def program(body: str, defs: str = "", before: str = "") -> str:
    """A training with Opacus, with ``body`` after the call, ``before`` ahead of it, and ``defs`` at the top."""
    return TRAIN.format(
        body=textwrap.indent(body, "    "), defs=textwrap.dedent(defs), before=textwrap.indent(before, "    ")
    )


def loop(inner: str = STEP, *, around: str = "for epoch in range(3):") -> str:
    """A loop over the private loader, in passes."""
    return f"{around}\n    for x, y in loader:\n" + textwrap.indent(inner, "        ")


def read(folder: Path, text: str) -> Checked:
    path = folder / "training.py"
    path.write_text(text, encoding="utf-8")
    return checked_files([path], Facts(examples=60_000, epochs=3, delta=1e-5), Stated(5.0, 1e-5, "example"))
