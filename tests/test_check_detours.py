"""``rasura check-dp``: detours by which values, batches or weights reach the model. None of them has a figure."""

from __future__ import annotations

from pathlib import Path

import pytest
from check_setting import STEP, loop, program, read

pytest.importorskip("dp_accounting")

DETOURS = {
    "a view that is changed": program(loop("z = x.detach()\nz -= z.mean(0)\n" + STEP)),
    "a view of NumPy that is written": program(loop("z = x.numpy()\nz[:] = z - z.mean(0)\n" + STEP)),
    "a view in a list": program(loop("z = [x][0]\nz -= z.mean(0)\n" + STEP)),
    "the first batch again": program("first = None\n" + loop("if first is None:\n    first = x\nx = first\n" + STEP)),
    "a batch that is kept": program("held = []\n" + loop("held.append(x)\nx = held[0]\n" + STEP)),
    "another batch, by a condition": program(loop("x = x if epoch == 0 else train_set.x\n" + STEP)),
    "an output that is written": program(loop("out = model(x)\nv = out.detach()\nv *= 0\n" + STEP)),
    "a loss that is changed": program(loop(STEP.replace("loss.backward()", "l = loss\nl += penalty\nloss.backward()"))),
    "a loss in a list that is changed": program(
        loop(STEP.replace("loss.backward()", "l = [loss]\nl[0] += penalty\nloss.backward()"))
    ),
    "a sum in place of a mean": program(
        loop(STEP.replace("F", "F").replace("criterion(model(x), y)", "F.cross_entropy(model(x), y, reduction='sum')"))
    ),
    "losses that are averaged by hand": program(
        loop(STEP.replace("criterion(model(x), y)", "F.cross_entropy(model(x), y, reduction='none').mean()"))
    ),
    "an end of the program": program(loop(STEP + "if loss.item() < 1:\n    exit()\n")),
    "an error in a helper": program(
        "def check(l):\n    if l.item() > 2:\n        raise ValueError\n" + loop(STEP + "check(loss)\n")
    ),
    "a function named log": program(
        loop(STEP.replace("loss.backward()", "log(loss)\nloss.backward()")), "from mine import log"
    ),
    "a module that logs": program(loop(STEP.replace("loss.backward()", "mine.log(loss)\nloss.backward()")), "import mine"),
    "a model with its argument": program(
        "import functools\nf = functools.partial(model, train_set.x)\n" + loop(STEP.replace("model(x)", "f()"))
    ),
    "a model that is mapped": program(loop(STEP.replace("model(x)", "torch.vmap(model)(x)"))),
    "a copy of the model": program("import copy\nm = copy.deepcopy(model)\n" + loop()),
    "a compiled model": program("model = torch.compile(model)\n" + loop()),
    "a parallel model": program("model = nn.DataParallel(model)\n" + loop()),
    "an average of losses that decides": program(
        loop(STEP + "ema = 0.9 * ema + 0.1 * loss.item()\nif ema > 1:\n    optimizer.step()\n")
    ),
    "a match": program(loop("match epoch:\n    case 1:\n        optimizer.step()\n" + STEP)),
    "a while inside": program(loop("while True:\n    optimizer.step()\n    break\n" + STEP)),
    "a block that is not known": program(
        "with ctx():\n    " + loop().replace("\n", "\n    ") + "\n", "from mine import ctx"
    ),
    "starred arguments": program(
        "def fit(*args):\n    m, o, x, y = args\n    F.cross_entropy(m(x), y).backward()\n    o.step()\n"
        + loop("fit(model, optimizer, x, y)\nfit(model, optimizer, x, y)\n")
    ),
    "named arguments in a dictionary": program(
        "def fit(**kw):\n    F.cross_entropy(kw['m'](kw['x']), kw['y']).backward()\n    kw['o'].step()\n"
        + loop("fit(m=model, o=optimizer, x=x, y=y)\n")
    ),
    "a function that calls itself": program(
        "def fit(n):\n    optimizer.step()\n    if n:\n        fit(n - 1)\n" + loop(STEP + "fit(3)\n")
    ),
    "a default that holds the model": program(
        "def fit(m=model):\n    F.cross_entropy(m(train_set.x), train_set.y).backward()\n" + loop("fit()\n" + STEP)
    ),
    "a loader that is swapped": program("def swap():\n    nonlocal loader\n    loader = test_loader\nswap()\n" + loop()),
    "a thread": program(
        "import threading\nthreading.Thread(target=fit, args=(model,)).start()\n" + loop(), "from mine import fit"
    ),
    "a decorator that repeats": program(
        "@repeat(5)\ndef fit(x, y):\n    F.cross_entropy(model(x), y).backward()\n    optimizer.step()\n"
        + loop("fit(x, y)\n"),
        "from mine import repeat",
    ),
    "a loader in a class": program(
        "class L:\n    def __init__(self, l):\n        self.l = l\nloader = L(loader)\n" + loop()
    ),
    "a batch in a dictionary": program(
        loop("b = {'x': x, 'y': y}\n" + STEP.replace("model(x), y", "model(b['x']), b['y']"))
    ),
    "a model in a dictionary": program("d = {'m': model}\n" + loop(STEP.replace("model(x)", "d['m'](x)"))),
    "an optimizer in a list": program(
        "os = [optimizer]\n" + loop(STEP.replace("optimizer.step()", "for o in os:\n    o.step()"))
    ),
    "a rate of the batch": program(loop("optimizer.param_groups[0]['lr'] = 1 / len(x)\n" + STEP)),
    "weights of the optimizer": program(
        "for g in optimizer.param_groups:\n    for p in g['params']:\n        p.sub_(1)\n" + loop()
    ),
    "a data set that grows": program(loop(), before="train_set.samples.extend(train_set.samples)"),
    "a data set that is doubled": program(loop(), before="train_set.samples = train_set.samples * 2"),
    "a data set that a function doubles": program(loop(), "def build():\n    return train_set + train_set\n").replace(
        "DataLoader(train_set,", "DataLoader(build(),"
    ),
    "a sample with replacement": program(loop(), "from torch.utils.data import Subset").replace(
        "DataLoader(train_set,", "DataLoader(Subset(train_set, torch.randint(0, 9, (9,))),"
    ),
    "a sample with replacement, drawn before": program(
        loop(), "import numpy as np", "drawn = np.random.default_rng().integers(0, 9, 9)\nrows = drawn.tolist()"
    ).replace("DataLoader(train_set,", "DataLoader(train_set.select(rows),"),
    "places of a sample with replacement": program(
        loop(), before="some = train_set[torch.multinomial(weights, 9, True)]"
    ).replace("DataLoader(train_set,", "DataLoader(some,"),
    "a row that is listed twice": program(loop(), "from torch.utils.data import Subset").replace(
        "DataLoader(train_set,", "DataLoader(Subset(train_set, [0, 1, 1]),"
    ),
    "the graph of the loss": program(loop(STEP.replace("loss.backward()", "loss.grad_fn\nloss.backward()"))),
    "the model's forward": program(loop(STEP.replace("model(x)", "model.forward(x)"))),
    "a layer of the model": program(loop(STEP.replace("model(x)", "model.fc(x)"))),
    "a graph that is kept": program(loop(STEP.replace("backward()", "backward(retain_graph=True)"))),
    "another block that is not known": program("with torch.enable_grad():\n    " + loop().replace("\n", "\n    ")),
    "another range": program(loop(), "from mine import range"),
    "another criterion": program("class CrossEntropyLoss:\n    pass\n" + loop(), "", "criterion = CrossEntropyLoss()"),
    "another module F": program(
        loop(STEP.replace("criterion(model(x), y)", "F.cross_entropy(model(x), y)")), "import mine as F"
    ),
    "more steps now and then": program(
        loop()
        .replace("for x, y in loader", "for i, (x, y) in enumerate(loader)")
        .replace("optimizer.step()", "optimizer.step()\n        if i % 2:\n            optimizer.step()")
    ),
    "a batch that is deleted": program(loop("del x\nx = train_set.x\n" + STEP)),
    "a model that is returned": program(loop() + "return model\n")
    .replace("\nmain()\n", "\nm = main()\npolish(m)\n")
    .replace("from data", "from mine import polish\nfrom data"),
    "weights that are returned": program(loop() + "return list(model.parameters())\n").replace(
        "\nmain()\n", "\nm = main()\nfor p in m:\n    p.add_(1)\n"
    ),
    "an average of the model": program(
        "avg = torch.optim.swa_utils.AveragedModel(model)\n" + loop(STEP + "avg.update_parameters(model)\n")
    ),
    "a loader over its own copies": program(loop().replace("in loader", "in tqdm(list(loader))"), "from tqdm import tqdm"),
    "an end after a pass": program("import sys\n" + loop() + "    if loss.item() < 1:\n        sys.exit()\n"),
    "a generator that repeats": program(
        loop(around="for epoch in range(3):").replace("in loader", "in twice(loader)"),
        "def twice(loader):\n    for b in loader:\n        yield b\n        yield b\n",
    ),
    "a list of two names": program(
        "a = b = []\n" + loop(STEP + "a.append(loss.item())\n") + "    if b[-1] < 1:\n        break\n"
    ),
    "a list that has another name": program(
        "a = []\nb = a\n" + loop(STEP + "a.append(loss.item())\n") + "    if b[-1] < 1:\n        break\n"
    ),
    "a list in a dictionary": program(
        "s = {'a': []}\na = s['a']\n" + loop(STEP + "a.append(loss.item())\n") + "    if s['a'][-1] < 1:\n        break\n"
    ),
    "a list that a function fills": program(
        "a = []\n" + loop(STEP + "note(a, loss.item())\n") + "    if a[-1] < 1:\n        break\n",
        "def note(held, value):\n    held.append(value)\n",
    ),
    "a list that a function returns": program(
        "a = []\nb = same(a)\n" + loop(STEP + "b.append(loss.item())\n") + "    if a[-1] < 1:\n        break\n",
        "def same(held):\n    return held\n",
    ),
    "lists in a loop": program(
        "a = []\n" + loop(STEP + "for held in [a]:\n    held.append(loss.item())\n") + "    if a[-1] < 1:\n        break\n"
    ),
    "the environment": program(
        "import os\n"
        + loop(STEP + "os.environ['a'] = str(loss.item())\n")
        + "    if os.environ['a'] < '1':\n        break\n"
    ),
    "the configuration of the model": program(loop(STEP + "model.config.scale = loss.item()\n")),
    "a model that inherits": program(
        loop(),
        "class A(nn.Module):\n    pass\nclass B(A):\n    def forward(self, x):\n        return x - x.mean(0)\n",
        "model = B()",
    ),
    "a model of another base": program(
        loop(), "from mine import A\nclass B(A):\n    def forward(self, x):\n        return x - x.mean(0)\n", "model = B()"
    ),
    "a model with a helper of its base": program(
        loop(),
        "class A:\n    def mix(self, x):\n        return x - x.mean(0)\nclass B(A, nn.Module):\n"
        "    def forward(self, x):\n        return self.mix(x)\n",
        "model = B()",
    ),
    "a layer over the batch": program(loop(), before="model = nn.Sequential(nn.LSTM(10, 2))"),
    "a while without a condition": program(loop(around="while True:")),
    "a list of a module": program(
        "import mine\n" + loop(STEP + "mine.kept.append(loss.item())\n") + "    if mine.kept[-1] < 1:\n        break\n"
    ),
    "a model that is added to": program("model += 1\n" + loop()),
    "a name for the model, by the loss": program(loop() + "    if loss.item() > 1:\n        net = model\n"),
    "a starred part": program(loop("first, *x = x\n" + STEP)),
    "parts of the model": program("a, b = model\n" + loop()),
    "a table by the loss": program(
        "t = {}\n" + loop(STEP + "t[int(loss.item())] = 1\n") + "    if len(t) > 3:\n        break\n"
    ),
    "weights that are set": program(loop(), before="for p in model.parameters():\n    p.data = start"),
    "a model in an attribute": program("held.model = model\n" + loop(), "from mine import held"),
    "weights of a layer": program(loop() + "for p in head.parameters():\n    p.add_(1)\n", before="head = model.fc"),
    "the model on the optimizer": program(loop(STEP.replace("model(x)", "model(optimizer)"))),
    "a mean that is written": program(loop("x.mean(0, out=x)\n" + STEP)),
    "an item of the model": program(loop(STEP.replace("model(x)", "model[0](x)"))),
    "weights in a list": program(loop() + "kept = [p for p in model.parameters()]\nfor p in kept:\n    p.add_(1)\n"),
    "models in a list": program("several = [model for _ in range(3)]\n" + loop()),
    "parts of a pair": program(loop("for z in (x, y):\n    F.cross_entropy(model(z), y).backward()\noptimizer.step()\n")),
    "layers of the model": program("for layer in model:\n    layer.reset_parameters()\n" + loop()),
    "a loss of the model": program(loop(STEP.replace("model(x)", "model"))),
    "a bar of the loss": program(loop() + "    for x, y in tqdm(loader, total=int(loss.item())):\n        print(epoch)\n"),
    "an enumerated model": program("for i, layer in enumerate(model):\n    print(i)\n" + loop()),
    "a memory of another loader": program(
        "with BatchMemoryManager(data_loader=test_loader, max_physical_batch_size=8, optimizer=optimizer) as memory:\n"
        + "    for x, y in memory:\n"
        + "        F.cross_entropy(model(x), y).backward()\n        optimizer.step()\n",
        "from opacus.utils.batch_memory_manager import BatchMemoryManager",
    ),
    "rates by a function of the loss": program(
        "losses = []\ndef rate(e):\n    return losses[-1]\n"
        "rates = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)\n"
        + loop(STEP + "losses.append(loss.item())\nrates.step()\n")
    ),
    "a schedule made of the loss": program(
        loop() + "    rates = torch.optim.lr_scheduler.StepLR(optimizer, int(loss.item()))\n"
    ),
}


@pytest.mark.parametrize("name", DETOURS)
def test_a_detour_has_no_figure(tmp_path: Path, name: str) -> None:
    found = read(tmp_path, DETOURS[name])
    assert found.exit_code == 4 and found.outcome == "not known", found
    assert not any(one.bounds or one.equal_noise or one.hazards for one in found.findings)


NET = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(10, 10)])

    def forward(self, x):
        {}
        return self.layers[0](x)
"""


@pytest.mark.parametrize(
    "line",
    ["x = x.T", "x = x[0]", "x = x[:8]", "x = x @ x.mT", "x.relu_()", "x = x.mean(0)", "x = x.mean()",
     "x = torch.cat([x, x])", "x = torch.cat([x, x], dim=0)", "x = torch.roll(x, 1)", "x = mix(x)", "x = x.softmax(0)",
     "x = x.view(2, -1).view(-1, 10)", "self.kept = x", "x[0] = 1", "x = torch.relu(x, out=x)",
     "x = torch.einsum('ij,kj->ij', x, x)", "x = F.batch_norm(x)", "x = F.normalize(x, dim=0)", "x = F.normalize(x, 2, 0)",
     "x = F.layer_norm(x, x.shape)", "x = F.layer_norm(x, (x.size(0), 10))",
     "x = F.layer_norm(x, normalized_shape=x.size())",
     "x = x.unsqueeze(0)", "x = torch.unsqueeze(x, dim=0)", "x = x.squeeze(0)", "x = x.view(1, -1, 10)",
     "x = x.reshape((1, -1, 10))", "x = x.flatten(0, 1)", "x = torch.flatten(x, 0, 1)", "x = x - x.mean(-2, keepdim=True)",
     "x = x - x.sum((-2, -1))", "x = torch.cat([x, x], -2)", "for row in x:\n            x = x - row",
     "rows = [row for row in x]", "for row in self.layers[0](x):\n            x = x - row"],
)  # fmt: skip
def test_a_model_that_may_mix_examples_has_no_figure(tmp_path: Path, line: str) -> None:
    found = read(tmp_path, program(loop(), NET.format(line), "model = Net()"))
    assert found.exit_code == 4 and "keeps examples apart is not known" in str(found.unknown), found


@pytest.mark.parametrize(
    "line",
    ["x = x[:, 0]", "x = x.mean(dim=1)", "x = torch.cat([x, x], dim=1)", "x = F.relu(x).flatten(1)", "x = x.view(-1, 10)",
     "for layer in self.layers:\n            x = torch.relu(layer(x))", "x = F.log_softmax(self.layers[0](x), dim=-1)",
     "x = F.normalize(x)", "x = F.normalize(x, p=2.0, dim=-1)", "x = F.layer_norm(x, (10,))",
     "x = F.layer_norm(x, x.shape[1:])", "x = F.layer_norm(x, self.shape, eps=1e-6)",
     "x = x.unsqueeze(1).squeeze(1)", "x = x.view(x.size(0), -1)",
     "x = x.reshape(x.shape[0], -1)", "x = x.flatten(start_dim=1)", "x = torch.flatten(x, 1, 2)", "x = x.squeeze()",
     "x = x + self.at(torch.arange(x.size(1), device=x.device).unsqueeze(0))",
     "for k in range(3):\n            x = self.layers[0](x)",
     "for k, layer in enumerate(self.layers):\n            x = layer(x)"],
)  # fmt: skip
def test_a_model_that_keeps_examples_apart_has_a_figure(tmp_path: Path, line: str) -> None:
    found = read(tmp_path, program(loop(), NET.format(line), "model = Net()"))
    assert found.exit_code == 0, found


@pytest.mark.parametrize(
    ("layer", "apart"),
    [("nn.Softmax(dim=0)", False), ("nn.Softmax(0)", False), ("nn.Softmax()", False), ("nn.LogSoftmax(dim=given)", False),
     ("nn.Flatten(0)", False), ("nn.Flatten(start_dim=0, end_dim=1)", False), ("nn.Unflatten(0, (1, -1))", False),
     ("nn.Softmax(dim=1)", True), ("nn.LogSoftmax(-1)", True), ("nn.Flatten()", True), ("nn.Flatten(1)", True),
     ("nn.Unflatten(1, (2, 5))", True)],
)  # fmt: skip
def test_a_layer_that_runs_over_the_examples_has_no_figure(tmp_path: Path, layer: str, apart: bool) -> None:
    found = read(tmp_path, program(loop(), before=f"model = nn.Sequential(nn.Linear(10, 2), {layer})"))
    assert (found.exit_code == 0) == apart and ("over the examples of a batch" in str(found.unknown)) != apart, found


@pytest.mark.parametrize(
    "inner",
    [STEP.replace("criterion(model(x), y)", "F.nll_loss(model(x).log_softmax(1), y)"),
     STEP.replace("model(x)", "model(x.view(x.size(0), -1))"), STEP.replace("model(x)", "model(x.flatten(1))"),
     "t = (x, y)\n" + STEP.replace("model(x)", "model(t[0])"),
     STEP.replace("criterion(model(x), y)", "F.nll_loss(F.log_softmax(model(x), dim=1), y)")],
)  # fmt: skip
def test_parts_of_a_batch_and_their_losses_have_a_figure(tmp_path: Path, inner: str) -> None:
    found = read(tmp_path, program(loop(inner)))
    assert found.exit_code == 0, found


def test_rates_by_a_function_have_a_figure(tmp_path: Path) -> None:
    made = "def rate(e):\n    return 0.9**e\nrates = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)\n"
    assert read(tmp_path, program(made + loop(STEP + "rates.step()\n"))).exit_code == 0


@pytest.mark.parametrize("places", ["range(9)", "[0, 1, 2]", "torch.randperm(9)[:5]", "some"])
def test_places_that_are_taken_once_have_a_figure(tmp_path: Path, places: str) -> None:
    """Of a data set of random numbers, too: they are its values, not its places."""
    made = program(loop(), "from torch.utils.data import Subset, TensorDataset", "some = [3, 4]").replace(
        "DataLoader(train_set,", f"DataLoader(Subset(TensorDataset(torch.randint(0, 9, (9, 10))), {places}),"
    )
    assert read(tmp_path, made).exit_code == 0


FIT = "from mine import fit"
OF_DATA = {
    "a model that a function of another file makes": ("model = fit(train_set)", FIT),
    "weights that a function of another file makes": ("model.weight = fit(data=train_set)", FIT),
    "weights from a mean of the examples": ("mean = train_set.x.mean(0)\nmodel.weight = nn.Parameter(mean)", ""),
    "weights from a part of a tuple": ("xs, ys = train_set.tensors\nmodel.weight = nn.Parameter(xs)", ""),
    "a layer from examples": ("model.embed = nn.Embedding.from_pretrained(train_set.x)", ""),
    "weights from a loop": ("for x, y in train_set:\n    model.bias = nn.Parameter(x)", ""),
    "weights in a function": ("begin(model, train_set)", "def begin(m, d):\n    m.bias = nn.Parameter(d.x)\n"),
    "a model of a function": ("model = build(train_set)", f"{FIT}\ndef build(d):\n    m = fit(d)\n    return m\n"),
    "a size from labels": ("model = nn.Linear(10, int(train_set.y.max()))", ""),
}  # fmt: skip


@pytest.mark.parametrize("name", OF_DATA)
def test_a_model_that_begins_with_the_examples_has_no_figure(tmp_path: Path, name: str) -> None:
    lines, defs = OF_DATA[name]
    found = read(
        tmp_path, program(loop(), defs, "\n".join([lines, "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)"]))
    )
    assert found.outcome == "not known" and all(one.bounds == () for one in found.findings)


SGD = "optimizer = torch.optim.SGD(model.parameters(), lr={})"
STEERED = {
    "a rate from the examples": (SGD.format("train_set.x.std().item()"), "", ""),
    "a rate by a name": ("scale = train_set.x.abs().max()\nrate = 0.1 / scale\n" + SGD.format("float(rate)"), "", ""),
    "a rate by a function": (SGD.format("pick(train_set)"), "", "def pick(data):\n    return data.x.std().item()\n"),
    "a rate by a function of another file": (SGD.format("pick(train_set)"), "", "from mine import pick"),
    "a rate that is set": (SGD.format(0.1), "optimizer.param_groups[0]['lr'] = float(train_set.x.std())\n", ""),
    "a schedule": (
        SGD.format(0.1), "rates = torch.optim.lr_scheduler.StepLR(optimizer, int(train_set.x.max()))\n", ""
    ),
    "a schedule with a name": (
        SGD.format(0.1), "turn = int(train_set.x.max())\nrates = torch.optim.lr_scheduler.StepLR(optimizer, turn)\n", ""
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", STEERED)
def test_a_rate_that_the_examples_decide_has_no_figure(tmp_path: Path, name: str) -> None:
    before, after, defs = STEERED[name]
    found = read(tmp_path, program(after + loop(), defs, before))
    assert found.outcome == "not known" and all(one.bounds == () for one in found.findings)


@pytest.mark.parametrize(
    "line",
    ["model = nn.Linear(10, len(train_set.classes))", "model = nn.Linear(train_set.shape[1], 2)",
     "model.steps = len(train_set)", "model.bias = nn.Parameter(torch.zeros(2))"],
)  # fmt: skip
def test_a_model_that_knows_the_form_of_the_examples_has_its_figure(tmp_path: Path, line: str) -> None:
    assert read(tmp_path, program(loop(), before=f"{line}\n{SGD.format('1 / len(train_set)')}")).outcome == "holds"
