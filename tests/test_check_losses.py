"""``rasura check-dp``: the loss that a model computes itself is one for each example only of known classifiers."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from check_setting import STEP, loop, program, read

pytest.importorskip("dp_accounting")

OWN = STEP.replace("criterion(model(x), y)", "model(input_ids=x, labels=y).loss")
AUTO = "transformers.AutoModelForSequenceClassification.from_pretrained('m')"
IMPORT = "import transformers\nfrom transformers import AutoModelForSequenceClassification as A"
CAUSAL = "transformers.AutoModelForCausalLM.from_pretrained('m')"


def trained(model: str, defs: str = "", before: str = "", inner: str = OWN) -> str:
    """A training with Opacus of ``model``, an expression."""
    text = program(loop(inner), IMPORT + "\n" + textwrap.dedent(defs), before)
    assert "nn.Linear(10, 2)" in text
    return text.replace("nn.Linear(10, 2)", model)


CLASSIFIERS = {
    "the class of a library": trained(AUTO),
    "another name": trained("A.from_pretrained('m', num_labels=3)"),
    "a class that is made": trained("B(m.c)", "import m\nfrom transformers import BertForSequenceClassification as B"),
    "a class in a variable": trained("Made.from_config(config)", "from mine import config\nMade = A"),
    "images": trained("transformers.ViTForImageClassification.from_pretrained('m').to('cuda')"),
    "sounds": trained("transformers.AutoModelForAudioClassification.from_pretrained('m')"),
    "videos": trained("transformers.AutoModelForVideoClassification.from_pretrained('m')"),
    "an item of the output": trained(AUTO, inner=OWN.replace(".loss", "['loss']")),
    "a function": trained("make('m')", "def make(name):\n    made = A.from_pretrained(name)\n    return made.train()"),
    "a function of a pair": trained("0\n    model, words = make()", """
        def make():
            return A.from_pretrained('m'), transformers.AutoTokenizer.from_pretrained('m')
        """).replace("    model = 0\n", ""),
    "two classifiers": trained(f"A.from_pretrained('m') if small else {AUTO}", "from mine import small"),
    "adapters": trained("peft.get_peft_model(A.from_pretrained('m'), peft.LoraConfig(r=4))", "import peft"),
    "a parameter": trained("0", "def main(model):\n    go(model)").replace("    model = 0\n", "").replace(
        "def main():\n", "def go(model):\n").replace("\nmain()\n", f"\nmain({AUTO})\n"),
    "moved later": trained(AUTO, before="model = model.to('cuda')"),
    "a language model with a loss of the program": trained(CAUSAL, inner=STEP),
    "a language model whose own loss is only told": trained(
        CAUSAL, inner="optimizer.zero_grad()\nout = model(x, labels=y)\nloss = criterion(out.logits, y)\n"
        "loss.backward()\noptimizer.step()\nprint(out.loss.item())\n"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_the_loss_of_a_classifier_of_whole_examples_has_a_figure(tmp_path: Path, name: str) -> None:
    found = read(tmp_path, CLASSIFIERS[name])
    assert found.exit_code == 0, found


OTHERS = {
    "causal": trained(CAUSAL),
    "an item of the output": trained(CAUSAL, inner=OWN.replace(".loss", "['loss']")),
    "masked": trained("transformers.AutoModelForMaskedLM.from_pretrained('m')"),
    "tokens": trained("transformers.BertForTokenClassification.from_pretrained('m')"),
    "answers": trained("transformers.AutoModelForQuestionAnswering.from_pretrained('m')"),
    "sequences": trained("transformers.AutoModelForSeq2SeqLM.from_pretrained('m')"),
    "a head": trained("transformers.GPT2LMHeadModel.from_pretrained('m')"),
    "choices": trained("transformers.AutoModelForMultipleChoice.from_pretrained('m')"),
    "a function": trained("make()", f"def make():\n    return {CAUSAL}"),
    "a function of two": trained("make(1)", f"""
        def make(k):
            if k:
                return {CAUSAL}
            return {AUTO}
        """),
    "a class in a variable": trained("Made.from_pretrained('m')", "Made = transformers.AutoModelForCausalLM"),
    "a class that is bound twice": trained(
        "A.from_pretrained('m')", "from transformers import AutoModelForCausalLM as A"
    ),
    "one of two": trained(f"{CAUSAL} if words else {AUTO}", "from mine import words"),
    "two models": trained(AUTO, before=f"model = {CAUSAL}"),
    "a class of one's own": trained("Mine.from_pretrained('m')", "class Mine(A):\n    pass"),
    "a class of another library": trained("B.from_pretrained('m')", "from mine import BertForSequenceClassification as B"),
    "code from a hub": trained("A.from_pretrained('m', trust_remote_code=True)"),
    "unwritten settings": trained("A.from_pretrained('m', **settings)", "from mine import settings"),
    "a class that is registered": trained(AUTO, "from mine import C, M\nA.register(C, M)"),
    "another loss in it": trained(AUTO, before="model.loss_function = mine", defs="from mine import mine"),
    "a model from elsewhere": trained("make()", "from mine import make"),
    "a wrapped model": trained(f"Wrapped({AUTO})", "from mine import Wrapped"),
    "another class for it": trained(AUTO, before="model.__class__ = Mine", defs="from mine import Mine"),
    "a model that is given": trained(AUTO, before="model = other", defs="from mine import other"),
    "a parameter": trained("0", "def main(model):\n    go(model)").replace("    model = 0\n", "").replace(
        "def main():\n", "def go(model):\n").replace("\nmain()\n", f"\nmain({CAUSAL})\n"),
    "a part of it": trained(f"{AUTO}.bert"),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_the_loss_of_any_other_model_has_no_figure(tmp_path: Path, name: str) -> None:
    """Of a language model it is a mean over all tokens: one long text changes the gradients of the others."""
    found = read(tmp_path, OTHERS[name])
    assert found.exit_code == 4 and not any(one.bounds for one in found.findings), found


def test_the_reason_and_the_remedy_are_said(tmp_path: Path) -> None:
    said = str(read(tmp_path, OTHERS["causal"]).unknown)
    assert "AutoModelForCausalLM" in said and "mean over all tokens" in said and "one loss for each example" in said
    unknown = str(read(tmp_path, OTHERS["a model from elsewhere"]).unknown)
    assert "make()" in unknown and "one loss for each example" in unknown
    assert "choices" in str(read(tmp_path, OTHERS["choices"]).unknown)


@pytest.mark.parametrize("inner", [OWN, STEP])
def test_a_clip_of_choices_bounds_no_example(tmp_path: Path, inner: str) -> None:
    """Whatever the loss: Opacus has the gradient of six rows for two examples of three choices."""
    found = read(tmp_path, trained("transformers.AutoModelForMultipleChoice.from_pretrained('m')", inner=inner))
    assert found.exit_code == 4 and "choices" in str(found.unknown), found


def test_a_second_model_must_be_a_classifier_too(tmp_path: Path) -> None:
    second = f"""
        def more():
            other = {CAUSAL}
            more = torch.optim.SGD(other.parameters(), lr=0.1)
            data = DataLoader(train_set, batch_size=64)
            other, more, data = PrivacyEngine().make_private(
                module=other, optimizer=more, data_loader=data, noise_multiplier=1.0, max_grad_norm=1.0)
        """
    said = str(read(tmp_path, trained(AUTO, second)).unknown)
    assert "mean over all tokens" in said


def test_rasuras_own_training_takes_the_loss_of_each_text_by_itself(tmp_path: Path) -> None:
    text = trained(CAUSAL, "import rasura").replace("engine = PrivacyEngine()", "")
    head, rest = text.split("model, optimizer, loader = engine.make_private(", 1)
    tail = rest.split("    )\n", 1)[1]
    made = 'model, optimizer, loader, ledger = rasura.protect_training(model, optimizer, loader, "dp-sgd:1.0", epochs=3)\n'
    assert read(tmp_path, head + made + tail).exit_code == 0


def regression(loss: str, criterion: str = "nn.MSELoss()") -> str:
    inner = f"optimizer.zero_grad()\nout = model(x)\nloss = {loss}\nloss.backward()\noptimizer.step()\n"
    text = program(loop(inner)).replace("nn.Linear(10, 2)", "nn.Linear(10, 1)")
    return text.replace("nn.CrossEntropyLoss()", criterion)


OUT_OF_SHAPE = {
    "of a function": "F.mse_loss(out, y)",
    "absolute": "F.l1_loss(out, y)",
    "smooth": "F.smooth_l1_loss(out.squeeze(), y)",
    "of a class": "criterion(out, y)",
    "another shape": "criterion(out, y.view_as(x))",
    "of the batch, another shape": "F.mse_loss(out.view_as(x), y)",
    "numbers": "F.mse_loss(out, y.view(-1, 1))",
    "changed behind": "F.mse_loss(out, y.view_as(out).t())",
}


@pytest.mark.parametrize("name", OUT_OF_SHAPE)
def test_a_loss_that_may_be_of_all_pairs_of_a_batch_has_no_figure(tmp_path: Path, name: str) -> None:
    """Outputs of (B, 1) and labels of (B,): torch warns, and each example is in the loss of every other."""
    found = read(tmp_path, regression(OUT_OF_SHAPE[name]))
    assert found.exit_code == 4 and not any(one.bounds for one in found.findings), found


def test_the_shapes_and_the_remedy_are_said(tmp_path: Path) -> None:
    said = str(read(tmp_path, regression("F.mse_loss(out, y)")).unknown)
    assert "F.mse_loss(out, y)" in said and "all pairs of the batch" in said and "labels.view_as(outputs)" in said


@pytest.mark.parametrize(
    "loss",
    [
        "F.mse_loss(out, y.view_as(out))", "criterion(out, y.float().reshape(out.shape))", "F.huber_loss(out.view_as(y), y)",
        "F.l1_loss(out, y.reshape_as(out))",
    ],
)  # fmt: skip
def test_a_loss_of_values_of_the_same_shape_has_a_figure(tmp_path: Path, loss: str) -> None:
    found = read(tmp_path, regression(loss))
    assert found.exit_code == 0, found


@pytest.mark.parametrize("criterion", ["nn.CrossEntropyLoss()", "nn.BCEWithLogitsLoss()"])
def test_losses_that_refuse_other_shapes_have_a_figure(tmp_path: Path, criterion: str) -> None:
    assert read(tmp_path, regression("criterion(out, y)", criterion)).exit_code == 0
