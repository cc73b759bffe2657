"""``rasura check-dp``: a ``forward`` that takes a batch apart, or computes with its size, has no figure."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from check_setting import STEP, loop, program, read

pytest.importorskip("dp_accounting")

NET = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(10, 10)
        self.emb = nn.Embedding(10, 10)
        self.lstm = nn.LSTM(10, 10, batch_first=True)
        self.cls = nn.Parameter(torch.zeros(1, 1, 10))
        self.layers, self.norms = nn.ModuleList([nn.Linear(10, 10)]), nn.ModuleList([nn.LayerNorm(10)])
        self.rows = 3

    def both(self, x):
        return self.a(x), self.a(x)

    def one(self, x):
        return self.a(x)

    def forward(self, x):
{}
        return self.a(x)
"""


def net(lines: str) -> str:
    return program(loop(), NET.format(textwrap.indent(textwrap.dedent(lines), " " * 8)), "model = Net()")


MIXES = (
    # examples that are taken out of a batch
    "first, *rest = x\nx = x - first", "[first, *rest] = x\nx = x - first", "first, second = x\nx = x - first",
    "(first, rest), third = x\nx = x - first", "h = x\nfirst, *rest = h\nx = x - first",
    "match x:\n    case [first, *_]:\n        x = x - first", "match x.shape:\n    case (n, d):\n        x = x / n",
    "first, *rest = self.a(x)\nx = x - first", "first, second = self.one(x)\nx = x - first",
    "first, *rest = self.both(x)\nx = x - first[0]", "a, (first, *rest) = x, x\nx = x - first",
    "for first, second in (x, x):\n    x = x - first", "for k, (first, second) in enumerate([x]):\n    x = x - first",
    "for layer, (first, second) in zip(self.layers, [x]):\n    x = x - first", "h = [*x]\nx = x + torch.cat(h, dim=-1)",
    "x = self.one(*x)", "x = torch.relu(*x)", "x = x * (3 in x)", "f = x.mean\nx = x - f(0)",
    "for f in (x.mean,):\n    x = x - f(0)", "x = x - x.view(-1).mean(-1)", "x = x - x.reshape(-1).softmax(-1).max(-1)",
    "h, d = x.size(1), x.size(0)\nx = x.view(h, -1)", "d = x.size(1)\nx = x.view(d, -1)", "x = x.view(self.rows, -1)",
    # the size of a batch, which each of its examples changes
    "if len(x) > 32:\n    x = 2 * x", "x = 2 * x if x.size(0) > 32 else x", "while x.shape[0] > 32:\n    x = 2 * x",
    "assert x.size(0) > 32", "x = x + torch.arange(x.size(0)).unsqueeze(1)", "x = x + torch.arange(len(x)).unsqueeze(1)",
    "x = x * len(x) ** -0.5", "x = x / x.size(0)", "x = x / x.size(dim=0)", "x = x / x.shape[0]", "x = x ** x.shape[0]",
    "x = x / x.shape[-2]", "x = x / x.size(-2)", "k = 0\nx = x / x.size(k)", "x = x / x.shape[:1][0]",
    "n = x.size(0)\nx = x / n", "n, d = x.shape\nx = x / n", "n, *rest = x.shape\nx = x / n",
    "*front, d = x.shape\nx = x / front[0]", "s = x.size()\nx = x / s[0]", "s = x.shape\nn, d = s\nx = x / n",
    "n = m = len(x)\nx = x / m", "(n := len(x))\nx = x / n", "n: int = len(x)\nx = x / n", "n = len(x)\nn += 1",
    "x = F.dropout(x, p=1 / len(x))", "h = torch.ones(len(x), len(x))\nx = x + h.sum(1, keepdim=True)",
    "x = x + torch.ones(1, x.size(0)).sum(1)", "x = x + torch.ones((10, x.size(0))).sum(1)",
    "x = x + torch.zeros(1, x.size(0), 1).softmax(1)", "h = torch.zeros(1, len(x), 1)\nx = x + h.softmax(1)",
    "x = x + torch.zeros(len(x)).softmax(-1)", "x = x.view(x.size(0) // 2, -1)", "x = x.view(-1, x.size(0))",
    "x = self.emb(x.size(0))", "x = self.both(len(x))[0]", "for k in range(len(x)):\n    x = 2 * x",
    "f = x.size\nx = x / f(0)", "x = F.adaptive_avg_pool1d(x, x.size(0))", "x = x / x.shape.numel()",
    "h = torch.zeros(1, x.size(0), 10)\nx = self.both(x, h)[0]", "x = torch.cat([x, x], dim=x.size(0))",
    "s = x.shape\ns = x\nfirst, second = s\nx = x - second", "s = x.shape\nfor s in (x,):\n    a, b = s\nx = x - b",
    "s = x.size()\ns = x\nx = x - s[1]", "x = F.interpolate(x, size=x.shape)",
    "x = x.masked_fill(x, int(f'{len(x)}'))", "x = x + len(self.a(x))",
)  # fmt: skip


@pytest.mark.parametrize("lines", MIXES)
def test_a_batch_that_is_taken_apart_or_counted_has_no_figure(tmp_path: Path, lines: str) -> None:
    found = read(tmp_path, net(lines))
    assert found.exit_code == 4 and "keeps examples apart is not known" in str(found.unknown), found


def test_a_batch_whose_examples_are_arguments_has_no_figure(tmp_path: Path) -> None:
    found = read(tmp_path, program(loop(STEP.replace("model(x)", "model(*x)"))))
    assert found.exit_code == 4 and "not the batch as its loader gave it" in str(found.unknown), found
    whole = loop(STEP.replace("model(x)", "model(*batch)").replace(", y)", ", batch[1])")).replace("x, y in", "batch in")
    assert read(tmp_path, program(whole)).exit_code == 0


APART = (
    "x = x.view(x.size(0), -1)", "x = x.reshape(len(x), -1)", "b = x.shape[0]\nx = x.view(b, -1)",
    "b, t, d = x.shape\nx = x.view(b, t, 2, d // 2).flatten(2)", "b, t = x.size()\nx = x + self.emb(torch.arange(t))",
    "x = x.view(len(x), *x.shape[1:])", "x = x.view(*x.shape[:2], 2, -1)", "x = x.reshape(x.shape)",
    "x = x.view(x.shape[:-1] + (2, 5))", "s = x.size()[:-1] + (2, 5)\nx = x.view(s)", "x = x.view((x.size(0), 2, 5))",
    "x = torch.cat([self.cls.expand(x.size(0), -1, -1), x], dim=1)", "x = x + self.cls.repeat(len(x), 1, 1)",
    "x = torch.cat([x, torch.zeros(x.size(0), 3)], dim=1)", "x = x + torch.zeros(x.shape)", "x = x / x.size(1) ** 0.5",
    "x = x + torch.ones(*x.shape[:1], 10)", "scale = x.shape[-1] ** -0.5\nx = x * scale",
    "h, w = x.shape[2:]\nx = x / (h * w)",
        "x = F.interpolate(x, size=x.shape[2:])", "if len(x.shape) == 2:\n    x = x.unsqueeze(1)",
    "if x.dim() == 2:\n    x = x * 2",
    "if x.size(1) != 10:\n    x = x[:, :10]", "x = x * len(self.layers)",
    "assert x.size(1) == 10, f'{x.shape}'", "x, state = self.lstm(x)", "x, (h, c) = self.lstm(x)",
    "p, q = self.both(x)\nx = p + q",
    "h = torch.zeros(1, x.size(0), 10).to(x.device)\nc = torch.zeros(1, x.size(0), 10)\nx, state = self.lstm(x, (h, c))",
    "b = x.size(0)\nx, state = self.lstm(x, (torch.zeros((1, b, 10)), torch.zeros(1, b, 10)))",
    "p, q = x, self.a(x)\nx = p + q", "for layer, norm in zip(self.layers, self.norms):\n    x = norm(layer(x))",
    "for k, (layer, norm) in enumerate(zip(self.layers, self.norms)):\n    x = norm(layer(x)) + k",
    "layer = self.layers[0]\nx = layer(x)", "if 'mean' in self.kinds:\n    x = x.mean(1)", "x = x.view(-1, 10)",
    "if x is None:\n    return x.view(-1)",
)  # fmt: skip


@pytest.mark.parametrize("lines", APART)
def test_a_size_that_stands_in_a_shape_has_its_figure(tmp_path: Path, lines: str) -> None:
    found = read(tmp_path, net(lines))
    assert found.exit_code == 0, found
