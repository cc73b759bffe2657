"""``rasura check-dp``: loops that reach a text past its one clip and one noise. None of them has a figure."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from check_setting import STEP, loop, program, read

pytest.importorskip("dp_accounting")

PLAIN = {
    "a loop": program(loop()),
    "a data set of a class": program(
        loop(),
        "class Texts:\n    pass",
        "place = folder + '/train.txt'\nrows = []\nfor line in open(place):\n    rows.append(line)\n"
        "texts = [row.strip() for row in rows]\nfound = [t for k, t in enumerate(texts) if t]\n"
        "scaled = values * 0.5 + 1\ncount = 0\ncount += 1\ntrain_set = Texts(found, scaled, count)",
    ),
    "a data set that is made ready": program(
        loop(),
        "from datasets import load_dataset\ndef ready(row):\n    return [w * 2 for w in row]",
        "rows = load_dataset('imdb')\nparts = rows.map(ready).filter(len).train_test_split(0.1)\ntrain_set = parts['train']",
    ),
    "figures that are printed": program(
        "best = 0.0\n" + loop(STEP + "best += loss.item()\nif epoch == 0:\n    print(loss.item())\n") + "print(best)\n"
    ),
    "an evaluation": program(
        loop()
        + "    model.eval()\n    right = 0\n    with torch.no_grad():\n        for x, y in test_loader:\n"
        + "            right += (model(x).argmax(1) == y).sum().item()\n    print(right / len(test_loader.dataset))\n"
    ),
    "a limit on epsilon": program(loop() + "    if engine.get_epsilon(1e-5) > 4:\n        break\n"),
    "frozen weights": program(
        loop(), before="for p in model.parameters():\n    p.requires_grad = False\nmodel.fc = nn.Linear(3, 2)"
    ),
    "a count of weights": program("print(sum(p.numel() for p in model.parameters()))\n" + loop()),
}


@pytest.mark.parametrize("name", PLAIN)
def test_the_plain_loop_has_a_figure(tmp_path: Path, name: str) -> None:
    found = read(tmp_path, PLAIN[name])
    assert found.outcome == "holds" and found.exit_code == 0, found


SAVE = "torch.save(model.state_dict(), 'best.pt')\n"
NET = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(10, 2)
        self.register_buffer("mean", torch.zeros(10))

    def forward(self, x):
        {}
        return self.lin(x)
"""
EVASIONS = {
    # several steps on one batch
    "a range of steps": program(loop("for _ in range(5):\n" + textwrap.indent(STEP, "    "))),
    "two steps": program(loop(STEP + STEP)),
    "two steps and one loss": program(loop(STEP + "optimizer.step()\n")),
    "one batch for ever": program("x, y = next(iter(loader))\nfor _ in range(10_000):\n" + textwrap.indent(STEP, "    ")),
    "one batch of an iterator": program(
        "it = iter(loader)\nfor _ in range(9):\n    x, y = next(it)\n" + textwrap.indent(STEP, "    ")
    ),
    "steps in a helper": program(
        loop("fit(model, optimizer, x, y)\nfit(model, optimizer, x, y)\n"),
        "def fit(model, optimizer, x, y):\n    F.cross_entropy(model(x), y).backward()\n    optimizer.step()\n",
    ),
    "a helper that steps twice": program(
        loop("fit(x, y, model, optimizer)\n"),
        "def fit(x, y, model, optimizer):\n    for _ in range(2):\n        F.cross_entropy(model(x), y).backward()\n"
        "        optimizer.step()\n",
    ),
    "a step after the loop": program(loop() + "optimizer.step()\n"),
    "a list of batches": program("kept = list(loader)\nfor x, y in kept:\n" + textwrap.indent(STEP, "    ")),
    "kept batches": program(
        "kept = []\n" + loop(STEP + "kept.append((x, y))\n") + "for x, y in kept:\n" + textwrap.indent(STEP, "    ")
    ),
    "the last batch again": program(loop(STEP + "last = x, y\n") + "x, y = last\n" + STEP),
    "a loop in a loop": program(loop("for a, b in loader:\n    print(a)\n" + STEP)),
    "a closure": program(
        "def closure():\n    loss = criterion(model(x), y)\n    loss.backward()\n    return loss\n"
        + loop("optimizer.step(closure)\n")
    ),
    "a step in a comprehension": program(loop("[optimizer.step() for _ in range(9)]\n")),
    "a step in a lambda": program("go = lambda: optimizer.step()\n" + loop(STEP + "go()\n")),
    "a method under another name": program("go = optimizer.step\n" + loop(STEP + "go()\n")),
    "two losses": program(loop(STEP.replace("loss.backward()", "loss.backward()\ncriterion(model(x), y).backward()"))),
    "gradients that add up": program(loop(STEP.replace("optimizer.step()", "if epoch == 1:\n    optimizer.step()"))),
    "a batch that is left out": program(loop("if epoch == 1:\n    continue\n" + STEP)),
    # one example reaches several clips, or examples mix
    "repeats": program(loop("x, y = x.repeat(8, 1), y.repeat(8)\n" + STEP)),
    "two views": program(loop(STEP.replace("model(x), y", "model(torch.cat([x, x.flip(1)])), torch.cat([y, y])"))),
    "mixup": program(loop("x = 0.7 * x + 0.3 * x[torch.randperm(len(x))]\n" + STEP)),
    "the mean of the batch": program(loop("x = (x - x.mean(0)) / x.std(0)\n" + STEP)),
    "the mean of the batch, in place": program(loop("x.sub_(x.mean(0))\n" + STEP)),
    "the mean of the batch, by an operator": program(loop("x -= x.mean(0)\n" + STEP)),
    "the mean of all examples": program("mu = train_set.x.mean(0)\n" + loop(STEP.replace("model(x)", "model(x - mu)"))),
    "a product of the batch": program(loop("z = model(x)\nloss = criterion(z @ z.T, torch.arange(len(x)))\n" + STEP)),
    "a sharper product": program(loop(STEP.replace("model(x)", "model(x) @ model(x).T"))),
    "softmax over the batch": program(
        loop(STEP.replace("criterion(model(x), y)", "F.nll_loss(F.log_softmax(model(x), dim=0), y)"))
    ),
    "rows of a text": program(loop(STEP.replace("model(x)", "model(x.view(-1, 5))"))),
    "one row as a batch": program(loop(STEP.replace("model(x)", "model(x[0])"))),
    "all examples": program(loop(STEP.replace("model(x), y", "model(train_set.x), train_set.y"))),
    "all examples beside": program(loop(STEP.replace("model(x)", "model(x, train_set.x)"))),
    "a term of all examples": program(loop(STEP.replace("y)\n", "y) + criterion(model(train_set.x), train_set.y)\n"))),
    "a second loader": program(
        "it = iter(DataLoader(train_set, batch_size=4096))\n"
        + loop("a, b = next(it)\n" + STEP.replace("model(x), y", "model(a), b"))
    ),
    "a second loader beside": program(loop().replace("x, y in loader", "(x, y), (a, b) in zip(loader, test_loader)")),
    "a weighted loss": program(loop(), before="criterion = nn.CrossEntropyLoss(weight=w)"),
    "a loss from elsewhere": program(loop(), "from mine import criterion as other", "criterion = other"),
    "a loss that is scaled by itself": program(loop(STEP.replace("loss.backward()", "(loss * loss.item()).backward()"))),
    "a model whose buffer is a mean": program(
        loop(), NET.format("self.mean = 0.9 * self.mean + x.mean(0).detach()")
    ).replace("nn.Linear(10, 2)\n    opt", "Net()\n    opt"),
    "a model that mixes": program(loop(), NET.format("x = x - x.mean(0)")).replace(
        "nn.Linear(10, 2)\n    opt", "Net()\n    opt"
    ),
    "a model that mixes by a helper": program(loop(), NET.format("x = mix(x)")).replace(
        "nn.Linear(10, 2)\n    opt", "Net()\n    opt"
    ),
    "a data set of copies": program(loop()).replace(
        "DataLoader(train_set,", "DataLoader(torch.utils.data.ConcatDataset([train_set] * 10),"
    ),
    **{
        f"a data set of copies by {name}": program(loop(), name, before).replace(
            "DataLoader(train_set,", "DataLoader(double,"
        )
        for name, before in (
            ("from datasets import concatenate_datasets", "double = concatenate_datasets([train_set, train_set])"),
            ("from datasets import concatenate_datasets as more", "both = more([train_set] * 2)\ndouble = both.map(f)"),
            ("from itertools import chain", "double = list(chain(train_set, train_set))"),
            ("import random", "rows = random.choices(train_set, k=9)\ndouble = rows"),
            ("from torch.utils.data import TensorDataset", "x = train_set.x.repeat(2, 1)\ndouble = TensorDataset(x, x)"),
            ("import torch as t", "x = t.cat([train_set.x, train_set.x])\ndouble = TensorDataset(x, x)"),
            ("class Texts: pass", "both = train_set + train_set\ndouble = Texts(both)"),
            ("class Texts(list): pass", "rows = list(train_set) * 2\ndouble = Texts(rows)"),
            ("class Rows(list): pass", "rows = list(train_set)\nrows += rows\ndouble = Rows(rows)"),
            ("class Rows: pass", "rows = list(train_set)\nrows.extend(rows)\ndouble = Rows(rows)"),
            ("class Twice: pass", "rows = [a for a in train_set for _ in range(2)]\ndouble = Twice(rows)"),
            ("class Round: pass", "rows = [train_set[k % 9] for k in range(99)]\ndouble = Round(rows)"),
            ("from torch.utils.data import Subset", "double = Subset(train_set, list(range(100)) * 3)"),
            ("import pandas as pd", "rows = pd.concat([train_set, train_set])\ndouble = rows.values"),
            ("import numpy as np", "places = np.random.choice(100, 100)\ndouble = [train_set[k] for k in places]"),
        )
    },
    "a data set of copies by a name": program(
        loop(), before="double = train_set + train_set\nloader = DataLoader(double, batch_size=64)"
    ).replace("    loader = DataLoader(train_set, batch_size=64)\n", ""),
    # training outside of the mechanism
    "a helper of another module": program(loop() + "polish(model, train_set)\n", "from helpers import polish"),
    "a helper before": program(loop(), "from helpers import polish", "polish(model, train_set)"),
    "a helper that returns the model": program(loop(), "from helpers import polish", "model = polish(model, train_set)"),
    "another optimizer": program("other = torch.optim.SGD(model.parameters(), lr=1.0)\n" + loop()),
    "another optimizer, handed on": program(
        loop() + "other = torch.optim.SGD(model.parameters(), lr=1.0)\npolish(other, train_set)\n",
        "from helpers import polish",
    ),
    "another optimizer, before": program(
        loop(STEP + "polish(other)\n"), "from helpers import polish", "other = torch.optim.SGD(model.parameters(), lr=1.0)"
    ),
    "parameters that are kept": program(
        loop() + "for p in kept:\n    p.data.add_(1)\n", before="kept = list(model.parameters())"
    ),
    "autograd": program(
        loop(STEP + "g = grad(criterion(model(x), y), list(model.parameters()))\n"), "from torch.autograd import grad"
    ),
    "autograd by its module": program(loop(STEP + "torch.autograd.grad(loss, model.parameters())\n")),
    "a jacobian": program(
        loop(STEP.replace("model(x)", "model(x) + bias") + "bias.data -= torch.autograd.functional.jacobian(f, bias)\n"),
        before="bias = torch.zeros(2)",
    ),
    "written weights": program(loop() + "with torch.no_grad():\n    for p in model.parameters():\n        p.add_(mean)\n"),
    "written weights of a layer": program(
        loop() + "head.weight.data.mul_(0)\n", before="head = nn.Linear(2, 2)\nmodel = nn.Sequential(model, head)"
    ),
    "copied weights": program(
        loop() + "head.weight[:] = mean\n", before="head = nn.Linear(2, 2)\nmodel = nn.Sequential(model, head)"
    ),
    "initial weights of the data": program(
        loop(), before="for p in model.parameters():\n    p.data.add_(train_set.x.mean())"
    ),
    "a hook": program(loop(), before="for p in model.parameters():\n    p.register_post_accumulate_grad_hook(leak)"),
    "a hook of the model": program("model.register_full_backward_hook(leak)\n" + loop()),
    "a hook of a tensor": program(loop("x.register_hook(leak)\n" + STEP)),
    "a plain copy in the place": program(loop() + "model.load_state_dict(torch.load('plain.pt'))\n"),
    "a scaler": program(
        "scaler = torch.cuda.amp.GradScaler()\n" + loop(STEP.replace("loss.backward()", "scaler.scale(loss).backward()"))
    ),
    "a backward pass by another": program(
        loop(STEP.replace("loss.backward()", "accelerator.backward(loss)")), "from mine import accelerator"
    ),
    "a plain step": program(
        loop() + "for x, y in test_loader:\n    criterion(net(x), y).backward()\n    plain.step()\n",
        "from mine import net, plain",
    ),
    "a seed under another name": program(loop(), before="f = torch.manual_seed\nf(0)"),
    "a seed that is mapped": program(loop(), before="list(map(torch.manual_seed, [0]))"),
    "weights of an earlier session": program(loop() + SAVE, before="model.load_state_dict(torch.load('best.pt'))"),
    "weights of an earlier session, read first": program(
        loop() + SAVE, before="state = torch.load('best.pt')\nmodel.load_state_dict(state)"
    ),
    "a model of an earlier session": program(
        loop() + "torch.save(model, PATH)\n", "PATH = 'a.pt'", "model = torch.load(PATH)"
    ),
    # conditions on private values
    "a batch that is left out by its loss": program(
        loop(STEP.replace("loss.backward()", "if loss.item() > 2:\n    continue\nloss.backward()"))
    ),
    "a step if the loss is small": program(
        loop(STEP.replace("optimizer.step()", "if loss.item() < 2:\n    optimizer.step()"))
    ),
    "a small batch is left out": program(loop("if len(x) < 2:\n    continue\n" + STEP)),
    "the training ends by its loss": program(loop(STEP + "if loss.item() < 0.1:\n    return\n")),
    "the passes end by their loss": program(loop() + "    if loss.item() < 0.1:\n        break\n"),
    "an error in a batch": program(
        "try:\n    "
        + loop(STEP + "if torch.isnan(loss):\n    raise ValueError\n").replace("\n", "\n    ")
        + "\nexcept ValueError:\n    pass\n"
    ),
    "an error that is caught": program(
        "import contextlib\nwith contextlib.suppress(ValueError):\n    "
        + loop(STEP + "int('a')\n").replace("\n", "\n    ")
        + "\n"
    ),
    "an assertion": program(loop(STEP + "assert loss.item() < 9\n")),
    "a rate of the loss": program(loop(STEP + "optimizer.param_groups[0]['lr'] = loss.item()\n")),
    "a rate of the loss, in a function": program(
        "rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda e: losses[-1])\n".replace("rates", "losses = []\nrates")
        + loop(STEP + "losses.append(loss.item())\nrates.step()\n")
    ),
    "a schedule of the loss": program(
        "rates = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)\n" + loop() + "    rates.step(loss.item())\n"
    ),
    "the best by the loss": program(
        "best = 9.0\n"
        + loop()
        + "    if loss.item() < best:\n        best = loss.item()\n    "
        + SAVE.replace("torch", "    torch")
    ),
    "the best by the loss, by a flag": program(
        "good = False\n" + loop() + "    if loss.item() < 1:\n        good = True\nif good:\n    " + SAVE
    ),
    "the best by the loss, by a list": program(
        "losses = []\n" + loop(STEP + "losses.append(loss.item())\n") + "    if losses[-1] <= min(losses):\n        " + SAVE
    ),
    "passes while the loss is large": program("loss = torch.ones(())\n" + loop(around="while loss.item() > 1:")),
    "as many passes as the loss says": program(
        loop() + "for _ in range(int(loss.item())):\n    for x, y in loader:\n" + textwrap.indent(STEP, "        ")
    ),
    "another model by the loss": program(loop() + "net = model if loss.item() < 1 else None\n"),
    "something unknown in the loop": program(loop(STEP + "tweak()\n"), "from mine import tweak"),
    "something unknown with the loss": program(loop(STEP + "tweak(loss)\n"), "from mine import tweak"),
    "a class of the program": program(
        loop("fit.one(x, y)\n"),
        "class Fit:\n    def __init__(self, model, optimizer):\n        self.model, self.optimizer = model, optimizer\n"
        "    def one(self, x, y):\n        F.cross_entropy(self.model(x), y).backward()\n        self.optimizer.step()\n",
    ).replace("for epoch", "fit = Fit(model, optimizer)\n    for epoch"),
}


@pytest.mark.parametrize("name", EVASIONS)
def test_what_goes_past_the_mechanism_has_no_figure(tmp_path: Path, name: str) -> None:
    found = read(tmp_path, EVASIONS[name])
    assert found.exit_code == 4 and found.outcome == "not known", found
    assert not any(one.bounds or one.equal_noise or one.hazards for one in found.findings)
    assert any("training.py:" in one for one in found.unknown)  # the reason names its line
