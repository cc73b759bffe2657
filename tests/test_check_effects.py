"""``rasura check-dp``: what a private loss decides beside the steps, such as which checkpoint is kept, has no figure."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from check_setting import STEP, loop, program, read

pytest.importorskip("dp_accounting")

IMPORTS = "import json\nimport os\nimport shutil\nimport logging\nimport subprocess\nfrom pathlib import Path\n"
IMPORTS += (
    "from shutil import copytree as update\nimport wandb\nfrom tqdm import tqdm\nimport time\nlog = logging.getLogger()\n"
)
KEEP = "shutil.copytree('ep-0', 'best')\n"
EVALUATED = "sum(criterion(model(x), y).item() for x, y in test_loader)"
STEPPED = "loss.backward()\noptimizer.step()\n"


def then(line: str) -> str:
    """A line after each pass."""
    return program("seen = []\n" + loop() + textwrap.indent(line, "    "), IMPORTS)


def further(text: str, line: str) -> str:
    """Another line at the end of each pass."""
    return text.removesuffix("main()\n") + textwrap.indent(line, " " * 8) + "main()\n"


def between(line: str) -> str:
    """A line after the gradient, ahead of the step."""
    return program(loop(STEP.replace(STEPPED, f"loss.backward()\n{line}\noptimizer.step()\n")), IMPORTS)


def high(line: str) -> str:
    return "if loss.item() > 5:\n" + textwrap.indent(line, "    ")


DECIDES = {
    "a gradient that is dropped by its loss": between(high("optimizer.zero_grad()")),
    "a gradient that the model drops by its loss": between(high("model.zero_grad()")),
    "every gradient is dropped": between("optimizer.zero_grad()"),
    "every gradient is dropped by the model": between("model.zero_grad()"),
    "a gradient that is dropped later": program(loop("optimizer.step()\noptimizer.zero_grad()\n" + STEP.replace(
        "optimizer.step()\n", "").replace("optimizer.zero_grad()\n", "") + "optimizer.zero_grad()\n")),
    "dropout that ends by the loss": program(loop(STEP + high("model.eval()\n"))),
    "dropout that begins by the loss": then("model.eval()\n" + high("model.train()\n")),
    "dropout that is set by the loss": then(high("model.config.dropout = 0.0\n")),
    "a checkpoint that is copied": then(high(KEEP)),
    "a checkpoint that is copied under another name": then(high("update('ep-0', 'best')\n")),
    "a checkpoint that is renamed": then(high("os.rename('ep-0', 'best')\n")),
    "a checkpoint that is removed": then(high("os.remove('ep-0')\n")),
    "a checkpoint that a path renames": then("place = Path('ep-0')\n" + high("place.rename('best')\n")),
    "a checkpoint that a path copies": then("place = Path('ep-0')\n" + high("place.copy('best')\n")),
    "a checkpoint that a command copies": then(high("os.system('cp -r ep-0 best')\n")),
    "a checkpoint that another program copies": then(high("subprocess.run(['cp', '-r', 'ep-0', 'best'])\n")),
    "a checkpoint that a tracker keeps": then(high("wandb.save('ep-0')\n")),
    "a file that names the best": then(high("json.dump({'best': epoch}, open('best.json', 'w'))\n")),
    "a file that marks the best": then(high("with open('best', 'w') as file:\n    file.write('ep-0')\n")),
    "a ledger that is saved by the loss": program(
        loop() + textwrap.indent(high("ledger.save('best')\n"), "    "), "from mine import ledger"
    ),
    "a checkpoint by a helper": program(
        loop() + "    if loss.item() > 5:\n        keep('ep-0')\n",
        "import shutil\ndef keep(place):\n    shutil.copytree(place, 'best')\n",
    ),
    "a checkpoint by a helper that may end": program(
        loop() + "    keep(loss.item())\n",
        "import shutil\ndef keep(value):\n    if value > 5:\n        return\n    shutil.copytree('ep', 'best')\n",
    ),
    "a checkpoint by an expression": then("shutil.copytree('ep-0', 'best') if loss.item() > 5 else None\n"),
    "a checkpoint by and": then("loss.item() > 5 and shutil.copytree('ep-0', 'best')\n"),
    "a checkpoint by a comparison": then("9 > loss.item() > len(shutil.copytree('ep-0', 'best'))\n"),
    "a checkpoint by a comprehension": then("[shutil.copytree('a', 'best') for _ in range(1) if loss.item() > 5]\n"),
    "a checkpoint by the number of items": then("[shutil.copytree('a', f'{k}') for k in range(int(loss.item()))]\n"),
    "a checkpoint by what any looks at": program(
        loop() + "    any(low(k, loss.item()) for k in range(3))\n",
        "import shutil\ndef low(k, value):\n    shutil.copytree(f'{k}', 'best')\n    return value > k\n",
    ),
    "a checkpoint by a loop": then("for _ in range(int(loss.item())):\n    shutil.copytree('ep-0', 'best')\n"),
    "a checkpoint by a mapped function": then(high("list(map(shutil.rmtree, ['ep-0']))\n")),
    "a checkpoint by a key": then(high("max(['ep-0'], key=shutil.rmtree)\n")),
    "a checkpoint unless there is an error": then(
        f"try:\n    1 / int(loss.item() > 5)\n    {KEEP}except ValueError:\n    pass\n"
    ),
    "a checkpoint after an error": then(f"try:\n    1 / int(loss.item() > 5)\nexcept ZeroDivisionError:\n    {KEEP}"),
    "a checkpoint after no error": then(
        f"try:\n    1 / int(loss.item() > 5)\nexcept ZeroDivisionError:\n    pass\nelse:\n    {KEEP}"
    ),
    "a checkpoint unless a loop ends": then(
        f"for _ in range(2):\n    if loss.item() > 5:\n        break\nelse:\n    {KEEP}"
    ),
    "a checkpoint where a loop ended": then(
        "for k in range(3):\n    if loss.item() > k:\n        break\nshutil.copytree(f'ep-{k}', 'best')\n"
    ),
    "a checkpoint by the length of a list": then(high("seen.append(epoch)\n") + f"if seen:\n    {KEEP}"),
    "a checkpoint by a list that is emptied": then("seen.append(1)\n" + high("seen.clear()\n") + f"if seen:\n    {KEEP}"),
    "a checkpoint by an entry": then("place = {}\n" + high("place['at'] = epoch\n") + "shutil.move(f'{place}', 'best')\n"),
    "a checkpoint by an entry that is deleted": then("place = {0: 1}\n" + high("del place[0]\n") + f"if place:\n    {KEEP}"),
    "a module that is imported by the loss": then(high("import promote\n")),
    "a function by the loss": then(high("def keep():\n    pass\n") + "keep()\n"),
    "a rate that a schedule sets by the loss": then(high("torch.optim.lr_scheduler.LinearLR(optimizer, 0.1)\n")),
    "the words of an assertion": then("assert loss.item() > 5, shutil.copytree('ep-0', 'best')\n"),
    "a result that is written in its place": then(high("torch.abs(seen, out=seen)\n")),
}  # fmt: skip


@pytest.mark.parametrize("name", DECIDES)
def test_what_a_private_loss_decides_has_no_figure(tmp_path: Path, name: str) -> None:
    found = read(tmp_path, DECIDES[name])
    assert found.exit_code == 4 and found.outcome == "not known", found
    assert not any(one.bounds or one.equal_noise or one.hazards for one in found.findings)
    assert any("training.py:" in one for one in found.unknown)


BACK = {
    "a file": then("open('l', 'w').write(str(loss.item()))\nlow = float(open('l').read())\n"),
    "a block": then(
        "with open('l', 'w') as f:\n    json.dump(loss.item(), f)\nwith open('l') as f:\n    low = json.load(f)\n"
    ),
    "a file that print fills": then("print(loss.item(), file=open('l', 'a'))\nlow = float(open('l').readlines()[0])\n"),
    "a file of the pass before": then(
        "low = os.path.exists('l') and float(open('l').read())\nprint(loss, file=open('l', 'w'))\n"
    ),
    "a file of the log": then("logging.info(loss.item())\nlow = float(Path('log').read_text())\n"),
    "an array": then("import numpy as np\nnp.save('l.npy', loss.item())\nlow = np.load('l.npy')\n"),
    "a tracker": then("wandb.log({'l': loss.item()})\nlow = wandb.run.summary['l']\n"),
    "a tracker by its server": then("wandb.log({'l': loss.item()})\nlow = wandb.Api().run('x').summary['l']\n"),
    "another file's function": then("print(loss.item(), file=open('l', 'w'))\nlow = last()\n").replace(
        "import json", "from mine import last\nimport json", 1
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BACK)
def test_a_figure_that_is_read_again_decides_nothing_and_may_be_told(tmp_path: Path, name: str) -> None:
    found = read(tmp_path, further(BACK[name], f"if low > 5:\n    {KEEP}"))
    assert found.exit_code == 4 and "shutil.copytree('ep-0', 'best') depends on private values" in str(found.unknown), found
    told = read(tmp_path, further(BACK[name], "print(low)\n"))
    assert "depends on private values" not in str(told.unknown)


TELLS = {
    "a log, paths and checkpoints": then(
        "logging.info(loss.item())\nos.makedirs('out', exist_ok=True)\nplace = os.path.join('out', f'{epoch}.pt')\n"
        "torch.save(model.state_dict(), place)\nwith open(os.path.join('out', 'log'), 'a') as f:\n    f.write(f'{loss}')\n"
    ),
    "a file that is printed": then("wandb.log({'l': loss.item()})\nprint(open('l').read(), wandb.run.url)\n"),
    "texts that are read later": then("logging.info(loss.item())\nheld = json.load(open('held.json'))\n"),
    "a line that is printed": then(high("print(f'{epoch}: {loss.item():.2f}', len(seen), 'x'.strip())\n")),
    "a line that is logged": then(high("log.warning('high')\nlogging.info('%s', loss.item())\n")),
    "a figure that a tracker gets": then(high("wandb.log({'high': loss.item()})\n")),
    "a list that is printed": then(high("seen.append((epoch, loss.item()))\n") + "print(seen)\n"),
    "a count that is printed": program("high = 0\n" + loop(STEP + high("high += 1\n")) + "    print(high)\n"),
    "a time": then(high("time.sleep(1)\nprint(time.time())\n")),
    "a bar": program(
        loop(STEP + high("bar.set_postfix(loss=loss.item())\n"))
        .replace("for x, y in loader", "bar = tqdm(loader)\n    for x, y in bar"), IMPORTS
    ),
    "an evaluation": then(
        f"model.eval()\nwith torch.no_grad():\n    low = {EVALUATED}\nmodel.train()\n"
        + high(f"with torch.no_grad():\n    print(low, {EVALUATED})\n")
    ),
    "the best that is told": then("best = min(seen) if seen and loss.item() > 5 else loss.item()\nseen.append(best)\n"),
    "a word for the loss": then("print('high' if loss.item() > 5 else 'low'.upper())\n"),
    "epsilon": then(high("print(engine.get_epsilon(1e-5), optimizer.param_groups[0]['lr'])\n")),
    "gradients that are dropped after each step": program(loop(STEP + "optimizer.zero_grad()\nmodel.zero_grad()\n")),
    "every checkpoint": then(KEEP + "torch.save(model.state_dict(), f'{epoch}.pt')\n"),
}  # fmt: skip


@pytest.mark.parametrize("name", TELLS)
def test_what_is_only_told_has_its_figure(tmp_path: Path, name: str) -> None:
    found = read(tmp_path, TELLS[name])
    assert found.outcome == "holds" and found.exit_code == 0, found
