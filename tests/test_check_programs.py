"""``rasura check-dp``: what else a program does with a mechanism. Only what is understood has a figure."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rasura.accounting.configurations import Checked, Facts, Stated, checked_files
from rasura.cli import app

pytest.importorskip("dp_accounting")

CALL = "engine.make_private(module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0)"
BEGINNING = """from opacus import PrivacyEngine
from transformers import AutoModelForSequenceClassification
engine = PrivacyEngine()
model = AutoModelForSequenceClassification.from_pretrained("m")
"""
MADE = f"model, optimizer, loader = {CALL}\n"
LOOP = """for epoch in range(10):
    for batch in loader:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
"""
PROGRAM = BEGINNING + MADE + LOOP
TRAINER = """from transformers import TrainingArguments
from rasura import PrivateTrainer
args = TrainingArguments("out", per_device_train_batch_size=100, num_train_epochs=10)
trainer = PrivateTrainer(model, args, train_dataset=data, defense="dp-sgd:1.0")
trainer.train()
trainer.save_model("out")
"""
MOD = """from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod
mod = LocalDpMod(1.0, 2.0, 0.5, 1e-5)
app = ClientApp(mods=[mod])
"""
CLIP = """from flwr.clientapp import ClientApp
from flwr.clientapp.mod import fixedclipping_mod
from flwr.serverapp.strategy import DifferentialPrivacyClientSideFixedClipping, FedAvg
plain = FedAvg()
strategy = DifferentialPrivacyClientSideFixedClipping(plain, 1.0, 1.0, 100)
app = ClientApp(mods=[fixedclipping_mod])
"""


def read(folder: Path, text: str, *, epochs: int | None = 10, rounds: int | None = None) -> Checked:
    path = folder / "training.py"
    path.write_text(text, encoding="utf-8")
    facts = Facts(examples=10_000, batch_size=100, epochs=epochs, delta=1e-5, clients=10_000, weights="equal", rounds=rounds)
    return checked_files([path], facts, Stated(30.0, 1e-5))


def inside(block: str) -> str:
    """The call under a block."""
    return BEGINNING + block + "\n    " + MADE + LOOP


def after(line: str) -> str:
    return BEGINNING + MADE + line + "\n" + LOOP


UNDERSTOOD = {
    "a loop": PROGRAM,
    "a schedule of rates": after("from torch.optim.lr_scheduler import StepLR\nrates = StepLR(optimizer, 1)\nrates.step()"),
    "a rate that is set": after('optimizer.param_groups[0]["lr"] = 0.1'),
    "a seed of other things": "torch.manual_seed(0)\n" + PROGRAM.replace("Engine()", "Engine(secure_mode=True)"),
    "a main function": BEGINNING + "def main():\n    " + CALL.join(("model, optimizer, loader = ", "\n")) + "main()\n",
    "a check before": BEGINNING + "if not data:\n    raise ValueError('no data')\n" + MADE + LOOP,
    "new names": BEGINNING + f"private, private_optimizer, private_loader = {CALL}\n"
    + LOOP.replace("model", "private").replace("optimizer", "private_optimizer").replace("loader", "private_loader"),
    "a trainer": TRAINER,
    "our loop": 'model, optimizer, loader, ledger = rasura.protect_training(model, optimizer, loader, "dp-sgd:1.0")\n'
    + LOOP + "print(ledger.spent().statement)\n",
    "a mod": MOD,
    "a mod that clips": CLIP,
}  # fmt: skip


@pytest.mark.parametrize("name", UNDERSTOOD)
def test_what_is_understood_has_a_figure_and_says_what_it_assumes(tmp_path: Path, name: str) -> None:
    found = read(tmp_path, UNDERSTOOD[name], rounds=None if "loader" in UNDERSTOOD[name] else 1)
    assert found.outcome == "holds" and found.exit_code == 0, found
    assert all(one.assumptions for one in found.findings)


PAGES = sorted((Path(__file__).parents[1] / "docs").rglob("*.md"))
DOCUMENTED = [
    block for page in PAGES for block in re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.S)
    if re.search(r"protect_training\(\n? *model|PrivateTrainer\(model", block)
]  # fmt: skip
"""The programs of the pages that train under a protection of this package."""


def test_the_programs_of_the_pages_are_understood(tmp_path: Path) -> None:
    assert len(DOCUMENTED) >= 5
    for text in DOCUMENTED:
        found = read(tmp_path, text)
        if "ledger.load" in text:  # what was spent before is not in the program
            assert found.exit_code == 4 and any("load_state_dict" in one for one in found.unknown)
            continue
        assert found.unknown == () and len(found.findings) == 1, (text, found.unknown)


NOT_UNDERSTOOD = {
    "noise that is taken off": after("optimizer.noise_multiplier = 0.0"),
    "noise that is taken off by another name": after("other = optimizer\nother.noise_multiplier = 0.0"),
    "noise that is taken off in a list": after("for one in [optimizer]:\n    one.noise_multiplier = 0.0"),
    "noise that is taken off in a function": after("def off(one):\n    one.noise_multiplier = 0.0\noff(optimizer)"),
    "noise that is taken off elsewhere": after("import mine\nmine.off(optimizer)"),
    "noise from a known seed": "torch.manual_seed(0)\n" + PROGRAM,
    "Flower's noise from a known seed": "import numpy as np\nnp.random.seed(0)\n" + MOD,
    "training before, in a function": BEGINNING + "def train():\n    " + LOOP.replace("\n", "\n    ").replace("10", "N")
    + "\ntrain()\n" + MADE + "train()\n",
    "a global": BEGINNING + "def make():\n    global model, optimizer, loader\n    " + MADE + "make()\n" + LOOP,
    "an assignment inside": TRAINER.replace("trainer = PrivateTrainer(", "print(trainer := PrivateTrainer(").replace(
        '"dp-sgd:1.0")', '"dp-sgd:1.0"))'
    ),
    "a trainer in a list": TRAINER.replace("trainer.train()", "for t in [trainer]:\n    t.args.max_steps = 3\n"),
    "a trainer that is passed": TRAINER.replace("trainer.train()", "import mine\nmine.tweak(trainer)"),
    "training before, in a lambda": BEGINNING + "go = lambda: optimizer.step()\ngo()\n" + MADE + LOOP,
    "a loop over another loader": PROGRAM.replace("in loader", "in DataLoader(train, 5)"),
    "a loop over another loader, in a function": BEGINNING + MADE
    + "def step(b):\n    optimizer.step()\nfor batch in others:\n    step(batch)\n",
    "another range": "def range(n):\n    return forever\n" + PROGRAM,
    "a loader in the place of itself": "from opacus.utils.batch_memory_manager import BatchMemoryManager\n"
    + after("with BatchMemoryManager(data_loader=loader, optimizer=optimizer) as loader:\n    pass"),
    "any attribute": after("optimizer.anything = 1"),
    "setattr": after("setattr(optimizer, name, 0.0)"),
    "a dictionary of attributes": after("optimizer.__dict__.update(settings)"),
    "exec": after("exec(text)"),
    "getattr": after('getattr(optimizer, "original_optimizer").step()'),
    "a class that is changed": after("from opacus.optimizers import DPOptimizer\nDPOptimizer.add_noise = lambda self: None"),
    "a method that is replaced": "import opacus\nopacus.PrivacyEngine.make_private = mine\n" + PROGRAM,
    "a noise scheduler": after("from opacus.schedulers import ExponentialNoise\nnoise = ExponentialNoise(optimizer, 0.5)"),
    "a scheduler by its module": after("import opacus.schedulers as s\nnoise = s.ExponentialNoise(optimizer, gamma=0.5)"),
    "a scheduler by another name": after("from mine import Decay\ndecay = Decay(optimizer)"),
    "a scheduler under the name of a rate": after("from mine import StepLR\ndecay = StepLR(optimizer)"),
    "the optimizer inside": after("optimizer.original_optimizer.step()"),
    "the model inside": after("inner = model._module"),
    "a hook": after("optimizer.attach_step_hook(mine)"),
    "a new optimizer": after("optimizer = SGD(model.parameters())"),
    "a second optimizer": after("plain = SGD(model.parameters())\nplain.step()"),
    "steps by hand": after("for p in model.parameters():\n    p.data -= 0.1 * p.grad"),
    "the result is discarded": BEGINNING + CALL + "\n" + LOOP,
    "one result is discarded": BEGINNING + f"model, optimizer, _ = {CALL}\n" + LOOP,
    "the plain model is trained": BEGINNING + f"a, b, c = {CALL}\n" + LOOP,
    "the plain loader is used": BEGINNING + f"model, optimizer, private = {CALL}\n" + LOOP,
    "the plain optimizer is kept": BEGINNING + "plain = optimizer\n" + MADE + LOOP.replace("optimizer", "plain"),
    "training before": BEGINNING + LOOP + MADE + LOOP,
    "if": inside("if args.private:"),
    "a condition": BEGINNING + f"model, optimizer, loader = {CALL} if private else (model, optimizer, loader)\n" + LOOP,
    "try": BEGINNING + "try:\n    " + MADE + "except ValueError:\n    pass\n" + LOOP,
    "while": inside("while again():"),
    "for": inside("for one in models:"),
    "with": inside("with suppress(ValueError):"),
    "a function that is not called": inside("def make():"),
    "a function that is called twice": BEGINNING + "def main():\n    " + MADE + "main()\nmain()\n",
    "a function that is decorated": BEGINNING + "@maybe\ndef main():\n    " + MADE + "main()\n",
    "a function that ends before": BEGINNING + "def main():\n    if plain:\n        return t()\n    " + MADE + "main()\n",
    "a program that ends before": BEGINNING + "if plain:\n    train()\n    sys.exit()\n" + MADE + LOOP,
    "a method": BEGINNING + "class A:\n    def make(self):\n        " + MADE + "A().make()\n",
    "several calls": PROGRAM + PROGRAM,
    "a call that is not read": after("import functools\nmake = functools.partial(engine.make_private, noise_multiplier=0)"),
    "an engine made elsewhere": "from mine import engine\n" + MADE + LOOP,
    "an engine of another library": PROGRAM.replace("opacus", "mine"),
    "an engine of one's own": "class PrivacyEngine:\n    pass\n" + PROGRAM.replace("from opacus import PrivacyEngine\n", ""),
    "a state that is loaded": after("engine.load_checkpoint(path='a', module=model)"),
    "names from anywhere": "from mine import *\n" + PROGRAM,
    "a list that changes": PROGRAM.replace("norm=1.0", "norm=norms, clipping='per_layer'").replace(
        "engine =", "norms = [1.0]\nnorms.append(9.0)\nengine ="
    ),
    "arguments that are changed": TRAINER.replace("trainer =", "args.num_train_epochs = 300\ntrainer ="),
    "arguments of the trainer": TRAINER.replace("trainer.train", "trainer.args.max_steps = 300\ntrainer.train"),
    "a trainer that is not used": TRAINER.replace("trainer = ", "").replace("trainer.", "other."),
    "a plain trainer": TRAINER + "from transformers import Trainer\nTrainer(model, args).train()\n",
    "a trainer if": TRAINER.replace("trainer = ", "if private:\n    trainer = "),
    "a trainer that keeps the best": TRAINER.replace("epochs=10)", "epochs=10, load_best_model_at_end=True)"),
    "a trainer that may keep the best": TRAINER.replace("epochs=10)", "epochs=10, load_best_model_at_end=best)"),
    "a trainer that stops early": "from transformers import EarlyStoppingCallback\n"
    + TRAINER.replace("data,", "data, callbacks=[EarlyStoppingCallback()],"),
    "a callback of one's own": TRAINER.replace("data,", "data, callbacks=[Mine()],"),
    "callbacks that are not written": TRAINER.replace("data,", "data, callbacks=mine,"),
    "a callback that is added": TRAINER.replace("trainer.train()", "trainer.add_callback(Mine())\ntrainer.train()"),
    "a trainer that goes on": TRAINER.replace("train()", "train(resume_from_checkpoint=True)"),
    "a trainer that goes on from a folder": TRAINER.replace("train()", 'train("out/checkpoint-500")'),
    "a trainer that trains twice": TRAINER.replace("trainer.train()", "trainer.train()\ntrainer.train()"),
    "a trainer in a loop": TRAINER.replace("trainer.train()", "for _ in range(3):\n    trainer.train()"),
    "a trainer whose model is kept by its loss": TRAINER.replace(
        "trainer.save_model", 'if trainer.evaluate()["eval_loss"] < 1:\n    trainer.save_model'
    ),
    "a trainer after another training": "from mine import polish\n"
    + TRAINER.replace("trainer =", "polish(model, data)\ntrainer ="),
    "a trainer and training by hand": TRAINER + "for p in model.parameters():\n    p.data.add_(1)\n",
    "a trainer on copies": TRAINER.replace("dataset=data", "dataset=data + data"),
    "a mod that no app has": MOD.replace("mods=[mod]", ""),
    "a mod that is replaced": MOD.replace("app =", "mod = identity\napp ="),
    "a list of mods that is not written": MOD.replace("[mod]", "mods"),
    "a mod beside it": MOD.replace("[mod]", "[mod, mine]"),
    "a mod that one app has": MOD + "other = ClientApp()\n",
    "a clip that is not in an app": CLIP.replace("mods=[fixedclipping_mod]", "") + "mods = [fixedclipping_mod]\n",
    "a clip that may be left out": CLIP.replace("[fixedclipping_mod]", "[fixedclipping_mod] if clip else []"),
    "a strategy that adapts": CLIP.replace("FedAvg", "FedAdam"),
    "a strategy with momentum": CLIP.replace("FedAvg()", "FedAvg(server_momentum=0.9)").replace("FedAvg", "FedAvgM"),
    "a median": CLIP.replace("FedAvg", "FedMedian"),
    "a selection": CLIP.replace("FedAvg", "Krum"),
    "a trimmed mean": CLIP.replace("FedAvg", "FedTrimmedAvg"),
    "a strategy of one's own": CLIP.replace("plain = FedAvg()", "class Mine(FedAvg):\n    pass\nplain = Mine()"),
    "a strategy of another library": CLIP.replace(", FedAvg", "\nfrom mine import FedAvg"),
    "a strategy that is chosen": CLIP.replace("FedAvg()", "FedAvg() if mean else FedAdam()"),
    "a strategy that is made elsewhere": CLIP.replace("plain = FedAvg()", "from mine import plain"),
    "a strategy that is bound twice": CLIP.replace("plain = FedAvg()", "plain = FedAvg()\nplain = other(plain)"),
    "a strategy with other arguments": CLIP.replace("FedAvg()", "FedAvg(aggregate=median)"),
    "a strategy whose aggregation is replaced": CLIP.replace("strategy =", "plain.aggregate_train = median\nstrategy ="),
    "a strategy on the server that adapts": CLIP.replace("ClientSide", "ServerSide").replace("FedAvg", "FedYogi"),
    "a strategy under adaptive clipping": CLIP.replace("ClientSideFixed", "ServerSideAdaptive").replace("FedAvg", "FedAdam")
    .replace("plain, 1.0, 1.0, 100", "plain, 1.0, 100"),
    "a strategy under adaptive clipping of clients": CLIP.replace("ClientSideFixed", "ClientSideAdaptive")
    .replace("FedAvg", "FedAdam").replace("plain, 1.0, 1.0, 100", "plain, 1.0, 100").replace("fixedc", "adaptivec"),
    "the plain strategy": CLIP + "plain.start(grid=grid)\n",
    "a strategy that is changed": CLIP + "strategy.noise_multiplier = 0.0\n",
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_UNDERSTOOD)
def test_what_is_not_understood_has_no_figure(tmp_path: Path, name: str) -> None:
    text = NOT_UNDERSTOOD[name]
    found = read(tmp_path, text, rounds=1 if "flwr" in text else None)
    hazards = {one.code for finding in found.findings for one in finding.hazards}
    assert hazards <= {"no-clip", "steps"} and found.exit_code == (3 if hazards else 4), found
    assert not any(one.bounds or one.equal_noise for one in found.findings)
    assert found.unknown or any(one.unknown for one in found.findings)


@pytest.mark.parametrize(
    ("loop", "made"),
    [
        (LOOP.replace("10", "100"), 100),
        ("for again in range(2):\n    " + LOOP.replace("\n", "\n    ") + "\n", 20),
        (LOOP + LOOP, 20),
        ("N = 40\ndef go(o, l):\n    for b in l:\n        o.step()\nfor e in range(0, N):\n    go(optimizer, loader)\n", 40),
    ],
)  # fmt: skip
def test_loops_that_make_more_passes_than_stated_are_a_contradiction(tmp_path: Path, loop: str, made: int) -> None:
    found = read(tmp_path, BEGINNING + MADE + loop)
    (finding,) = found.findings
    assert found.exit_code == 3 and f"10 passes are stated, but the loops of the program make {made}" in str(finding.hazards)
    (more,) = read(tmp_path, BEGINNING + MADE + loop, epochs=made).findings
    assert finding.bounds == more.bounds and more.outcome == "holds"


def test_loops_that_make_fewer_passes_are_said(tmp_path: Path) -> None:
    (finding,) = read(tmp_path, PROGRAM.replace("10", "3")).findings
    assert finding.outcome == "holds" and "the loops of the program make 3" in str(finding.notes)


@pytest.mark.parametrize(
    "loop", ["while more():\n    " + LOOP.replace("\n", "\n    "), LOOP.replace("10", "args.epochs"), ""]
)
def test_passes_that_no_loop_shows_are_assumed(tmp_path: Path, loop: str) -> None:
    (finding,) = read(tmp_path, BEGINNING + MADE + loop).findings
    assert finding.outcome == "holds" and "10 passes over the loader" in str(finding.assumptions)


def test_assumptions_are_printed_beside_the_figure(tmp_path: Path) -> None:
    path = tmp_path / "training.py"
    path.write_text(PROGRAM, encoding="utf-8")
    options = ["--examples", "10000", "--batch-size", "100", "--epochs", "10", "--delta", "1e-5", "--epsilon", "3"]
    done = CliRunner().invoke(app, ["check-dp", str(path), *options])
    assert done.exit_code == 0 and "assumed: the model, optimizer and loader that make_private returned" in done.stdout
