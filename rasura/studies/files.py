"""Study files: a table of a paper as a plan, with the paper's own figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from rasura.core.interfaces import InputError
from rasura.core.options import known
from rasura.metrics.utility import HIGHER_IS_BETTER
from rasura.runs.fields import text, texts, toml, typed, whole
from rasura.runs.membership_plan import MembershipPlan
from rasura.runs.plans import Plan, plan_of
from rasura.runs.service_plan import ServicePlan, service_plan_of
from rasura.runs.train_plan import TrainPlan
from rasura.runs.trained import folder_of
from rasura.studies.papers import LISTS, Paper, load_paper
from rasura.victims.recipe import Recipe

FOLDER = Path("studies")
PLANS = ("plan", "train", "membership", "deviations", "service")
"""Tables of a study file that say what is run."""

ABOUT = ("title", "source", "covers", "differs", "metrics", "keys", "course", "command", "public_code")
"""Keys of a study file beside its tables."""

USUAL = "classification"
"""The task of a study that names none, whatever model it is run with."""

CELL = ("attack", "update", "defense", "threat", "batch_size")
"""What names a row of the results; ``protection``, ``attack`` and ``weights`` do in those of a service."""


PRINTED = ("row", "paper")
"""Where a figure of the paper's own is told: its row in the list of the paper's values, or a text."""


@dataclass(frozen=True)
class Study:
    """One study file.

    ``source``: the paper and its table. ``differs``: what is not as in the paper. ``figures``: the paper's own, each with
    those of attack, update, defense, threat and batch_size that single it out, and ``row``, the paper's row, as ``Table 3:
    DLG, BERT tiny``, or ``paper``, a text. ``covers``: tables and figures of the paper without a row. ``plan``: an audit
    (table ``plan`` of the file), a training (``train``), or the audit of a model service (``service``). With both an audit
    and a training the study sets utility against risk: ``train`` is then the training, whose defenses stand in the order of
    the audit's, each for the same protection; a service is trained on its ``reference``, judged on its ``data``.
    ``membership``: the attacks on every model of a training. ``keys``: under how many keys the uploaded weights of
    a service are attacked, on the same texts. ``course``: the losses of a search for images, step by step, in place of what
    it reads. ``command``: what makes the model and runs the study, where a script does. ``public_code``:
    what the code that the authors published gives, where it was measured. ``deviations``:
    how many texts of a training are compared with their substitutes, before every model.
    """

    name: str
    title: str
    source: str
    differs: tuple[str, ...]
    plan: Plan | TrainPlan | ServicePlan
    metrics: tuple[str, ...]
    figures: tuple[Mapping[str, Any], ...]
    train: TrainPlan | None = None
    membership: MembershipPlan | None = None
    deviations: int = 0
    paper: Paper | None = None
    covers: tuple[str, ...] = ()
    keys: int = 1
    course: bool = False
    command: str = ""
    public_code: tuple[str, ...] = ()

    @property
    def notes(self) -> tuple[str, ...]:
        """What stands above the table of its results."""
        return (*self.differs, *(f"public code: {line}" for line in self.public_code))

    def figure(self, row: Mapping[str, Any], metrics: Sequence[str]) -> str:
        """What the paper has for a row, in the order of ``metrics``, or a dash."""
        for figure in self.figures:
            if all(row[k] == v for k, v in figure.items() if k not in PRINTED):
                if self.paper is None or "row" not in figure:
                    return str(figure["paper"])
                table, name = self.paper.row(figure["row"])
                values = [table.shown(name, m) for m in metrics]
                return " / ".join(values) if any(v != "–" for v in values) else "–"
        return "–"


def names(folder: Path = FOLDER) -> list[str]:
    """The studies of ``folder``, as ``grab/table7``, by name."""
    found = (p for p in folder.rglob("*.toml") if p.parent.name != LISTS)
    return sorted(p.relative_to(folder).with_suffix("").as_posix() for p in found)


def load_study(name: str, folder: Path = FOLDER) -> Study:
    """The study ``name`` (as ``grab/table7``) of ``folder``. Raises ``InputError`` for unknown names and malformed files."""
    there = names(folder)
    if not there:
        raise InputError(f"no study found in the folder {folder}; run this in a checkout of the repository")
    known("study", name, there)
    path = folder / f"{name}.toml"
    found = toml(path, "a study")
    for key in found:
        known(f"key in {path}", key, (*ABOUT, *PLANS, "figures"))
    for name_of_table in PLANS:
        if not isinstance(found.get(name_of_table, {}), dict):
            raise InputError(f"{path}: {name_of_table} is not a table; write [{name_of_table}]")
    told, covers, paper = _printed(found, name, path, folder)
    source = text(found.get("source", ""), f"{path}: source")
    if "service" in found and found.keys() & (set(PLANS) - {"service", "train"}):
        raise InputError(f"{path}: the table service can only be combined with train")
    if "membership" in found and ("train" not in found or "plan" in found):
        raise InputError(f"{path}: the table membership attacks the models of a training; expected only train beside it")
    service = service_plan_of({"task": USUAL, **found["service"]}, str(path)) if "service" in found else None
    training = _training(found["train"], str(path), service) if "train" in found else None
    attacked = _membership(found["membership"], training, str(path)) if training and "membership" in found else None
    compared = found.get("deviations", {})
    for key in compared:
        known(f"key in {path}", key, ("texts",))
    if compared and (training is None or "plan" in found or len(training.defenses) != 2 or training.defenses[0] != "none"):
        raise InputError(f"{path}: deviations compare two trainings; expected only train, with none and one other defense")
    plan: Plan | TrainPlan | ServicePlan
    usual: tuple[str, ...]
    if service is not None:
        plan, usual = service, ("top1", "top3", "rougeL")
    elif training is not None and "plan" not in found:
        plan, usual, training = training, ("auc", "leakage") if attacked else ("accuracy", "f1"), None
    else:
        plan, usual = plan_of({"task": USUAL, **found.get("plan", {})}, str(path)), ("rouge1", "rouge2", "rougeL")
        if training is not None and len(training.defenses) != len(plan.defenses):
            raise InputError(
                f"{path}: train has {len(training.defenses)} defenses, but plan has {len(plan.defenses)}; expected pairs"
            )
    return Study(
        name,
        text(found.get("title", name), f"{path}: title"),
        paper.filled(source) if paper else source,
        texts(found.get("differs", ()), f"{path}: differs"),
        plan,
        texts(found.get("metrics", usual), f"{path}: metrics"),
        told,
        training,
        attacked,
        whole(compared.get("texts", 0), f"{path}: texts"),
        paper,
        covers,
        _keys(found, str(path)),
        _course(found, plan, str(path)),
        text(found.get("command", ""), f"{path}: command"),
        texts(found.get("public_code", ()), f"{path}: public_code"),
    )


def _keys(found: Mapping[str, Any], path: str) -> int:
    keys = whole(found.get("keys", 1), f"{path}: keys")
    if keys < 1 or ("keys" in found and "service" not in found):
        raise InputError(f"{path}: keys apply to a service; expected at least 1, beside its table")
    return keys


def _course(found: Mapping[str, Any], plan: Plan | TrainPlan | ServicePlan, path: str) -> bool:
    course = found.get("course", False)
    if not isinstance(course, bool) or (
        course and (not isinstance(plan, Plan) or plan.task != "vision" or "train" in found)
    ):
        raise InputError(f"{path}: course is {course!r}; expected true, beside an audit of images alone")
    return course


def _printed(
    found: Mapping[str, Any], name: str, path: Path, folder: Path
) -> tuple[tuple[Mapping[str, Any], ...], tuple[str, ...], Paper | None]:
    """The paper's own figures, the tables and figures that the study covers beside them, and the list of its values."""
    told = found.get("figures", [])
    if not isinstance(told, list) or not all(isinstance(figure, dict) for figure in told):
        raise InputError(f"{path}: figures are not tables; write each as [[figures]]")
    for figure in told:
        for key in figure:
            more = ("model",) * ("deviations" in found) + ("protection", "weights") * ("service" in found)
            known(f"key of a figure in {path}", key, (*CELL, *more, *PRINTED))
        if len(figure.keys() & set(PRINTED)) != 1:
            raise InputError(f"{path}: a figure needs either row (a row of studies/papers) or paper (a text)")
    covers = texts(found.get("covers", ()), f"{path}: covers")
    rows = [text(figure["row"], f"{path}: row") for figure in told if "row" in figure]
    if not rows and not covers and "{" not in text(found.get("source", ""), f"{path}: source"):
        return tuple(told), covers, None
    paper = load_paper(name.split("/")[0], folder)
    for row in rows:
        paper.row(row)
    for table in covers:
        known(f"table of {paper.title}", table, list(paper.printed))
    return tuple(told), covers, paper


def _training(found: Mapping[str, Any], source: str, service: ServicePlan | None) -> TrainPlan:
    given = _of_service(service) if service else {}
    own = {f.name for f in fields(TrainPlan)} - {"recipe", "service", *given}
    recipe = {f.name for f in fields(Recipe)}
    for key in found:
        known(f"key in {source}", key, own | recipe)
    if "target_epsilon" in found:
        raise InputError(
            f"{source}: target_epsilon renames protections, which name the rows of a study; leave it out, and for each "
            "write the noise into its name, as dp-sgd:1.0"
        )
    values = typed(TrainPlan, {k: v for k, v in found.items() if k in own}, source)
    if "data" not in {**values, **given}:
        raise InputError(f"{source}: train has no data; expected a data file")
    learning = typed(Recipe, {k: v for k, v in found.items() if k in recipe}, source)
    return TrainPlan(**{"task": USUAL, **values, **given}, recipe=Recipe(**{"noise": "seeded", **learning}))


def _of_service(plan: ServicePlan) -> dict[str, Any]:
    """What the audit of a service says of its training."""
    return {
        "data": plan.reference, "test": plan.data, "model": plan.model, "task": plan.task, "defenses": plan.protections,
        "service": True,
    }  # fmt: skip


def _membership(found: Mapping[str, Any], training: TrainPlan, source: str) -> MembershipPlan:
    """The attacks on the models of ``training``; ``prepared_membership`` names each and how it was trained."""
    values = typed(MembershipPlan, found, source, ("attacks", "shadow_models", "reference", "fprs"))
    return replace(MembershipPlan("", training.data, rows="rows.json"), **values)


def prepared(study: Study, **changes: Any) -> Plan | TrainPlan | ServicePlan:
    """The study's plan with the changes that are not None, checked; with the metric of the report's first line, too.

    A change of ``data`` that is a folder names the one that holds the study's own files.
    """
    given = {k: v for k, v in changes.items() if v is not None}
    plan = study.plan
    if "data" in given and Path(given["data"]).is_dir():
        given |= _files(plan, given.pop("data"))
    if isinstance(plan, ServicePlan):
        given = {{"defenses": "protections"}.get(k, k): v for k, v in given.items()}
        for key in given:
            known("option of a study of a service", key, [f.name for f in fields(ServicePlan)])
        return replace(plan, **given).checked()
    if isinstance(plan, TrainPlan):
        for key in given:
            known("option of a training study", key, [f.name for f in fields(TrainPlan)])
        return replace(plan, **given).checked()
    headline = "ssim" if plan.task == "vision" else "token_recall"
    metrics = tuple(dict.fromkeys((*(m for m in study.metrics if m not in HIGHER_IS_BETTER), headline)))
    return replace(plan, metrics=metrics, **given).checked()


def prepared_training(study: Study, plan: Plan | ServicePlan, data: str | None = None) -> TrainPlan:
    """The training beside the audit ``plan`` of a study that has both: the same model and seeds, the defenses paired."""
    assert study.train is not None
    if isinstance(plan, ServicePlan):
        recipe = replace(study.train.recipe, seed=plan.seed)
        return replace(study.train, **_of_service(plan), recipe=recipe).checked()
    assert isinstance(study.plan, Plan)
    unknown = [d for d in plan.defenses if d not in study.plan.defenses]
    if unknown:
        raise InputError(f"{study.name} trains behind its own protections alone; {unknown[0]} is none of them")
    pairs = dict(zip(study.plan.defenses, study.train.defenses))
    given: dict[str, Any] = {} if data is None else _files(study.train, data)
    given |= {"model": plan.model, "seeds": plan.seeds if plan.seeds > 1 else study.train.seeds}
    return replace(study.train, defenses=tuple(pairs[d] for d in plan.defenses), **given).checked()


def prepared_membership(study: Study, training: TrainPlan, result: Mapping[str, Any], folder: Path) -> MembershipPlan:
    """The study's attacks on the model that ``training`` left in ``folder`` with ``result``, trained likewise themselves.

    Their reference texts lie beside those of the training.
    """
    assert study.membership is not None
    place = folder / folder_of(result["defense"], result["seed"])
    given: dict[str, Any] = {"members": training.data, "model": str(place / "model"), "rows": str(folder / "rows.json")}
    given |= {n: getattr(training, n) for n in ("task", "num_labels", "truncate", "max_length")}
    if study.membership.reference:
        given["reference"] = str(Path(training.data).parent / study.membership.reference)
    recipe = replace(training.recipe, seed=result["seed"])
    return replace(study.membership, **given, base=training.model, defense=result["defense"], recipe=recipe).checked()


def _files(plan: Plan | TrainPlan | ServicePlan, folder: str) -> dict[str, Any]:
    names = ("data", "reference", "test")
    return {n: str(Path(folder) / str(value)) for n in names if (value := getattr(plan, n, None)) is not None}
