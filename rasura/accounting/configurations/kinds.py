"""What the values of a training program are, as far as the mechanism is concerned, and what may be done with each kind.

The tables are lists of what is understood. What they do not name is a doubt, so that no figure stands.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

PUBLIC, MIXED = "public", "mixed"
MODEL, OPTIMIZER, LOADER, NUMBERED = "model", "optimizer", "loader", "numbered loader"
ENGINE, ACCOUNTANT, LEDGER, SCHEDULE, CRITERION = "engine", "accountant", "ledger", "schedule", "criterion"
CRITERION_ALIKE = "criterion of outputs and labels of the same shape"
INNER, WEIGHTS, GROUPS = "model inside", "weights", "groups of parameters"
PLAIN, PARAMETERS, PLAIN_OPTIMIZER = "plain model", "parameters", "plain optimizer"
TRAINER = "trainer"
BATCH, COLUMN, ITEMS, OUTPUT, LOSS = "batch", "part of a batch", "items of a batch", "output", "loss"
OWN = "loss that the model computes"
VIEW, FIGURE = "part of private values", "figure of private values"

SHARED = frozenset((BATCH, COLUMN, ITEMS, OUTPUT, LOSS, OWN, VIEW))
"""Kinds that may share their memory with a batch, an output or a loss: nothing may write to them."""

DATA = SHARED | {FIGURE}
"""Kinds that depend on private examples. A figure is anything that was computed from them: it may be told and no more."""

Kind = str | tuple["Kind", ...]
"""A kind, or those of the elements of a tuple."""

CASTS = ("to", "cuda", "cpu", "long", "float", "double", "half", "bfloat16", "int", "bool", "contiguous")

METHODS: Mapping[str, Mapping[str, str]] = {
    MODEL: {
        **dict.fromkeys(("train", "eval", "zero_grad", "save_pretrained", "push_to_hub"), PUBLIC),
        **dict.fromkeys(("to", "cuda", "cpu"), MODEL),
        **dict.fromkeys(("parameters", "named_parameters", "state_dict"), WEIGHTS),
        "generate": FIGURE,
    },
    INNER: {"state_dict": WEIGHTS, "save_pretrained": PUBLIC},
    OPTIMIZER: {"zero_grad": PUBLIC, "step": PUBLIC, "state_dict": WEIGHTS},
    SCHEDULE: dict.fromkeys(("step", "get_last_lr", "state_dict"), PUBLIC),
    ENGINE: {"get_epsilon": PUBLIC},
    ACCOUNTANT: {"get_epsilon": PUBLIC},
    LEDGER: dict.fromkeys(("spent", "epsilon", "save", "state_dict"), PUBLIC),
    LOADER: dict.fromkeys(("set_postfix", "set_postfix_str", "set_description", "update", "close", "write"), PUBLIC),
    NUMBERED: {},
    WEIGHTS: {
        **dict.fromkeys(("items", "values", "keys", "cpu", "detach", "numpy", "clone", "norm"), WEIGHTS),
        **dict.fromkeys(("numel", "size", "dim"), PUBLIC),
    },
    PARAMETERS: {
        **dict.fromkeys(("items", "values", "keys"), PARAMETERS),
        **dict.fromkeys(("numel", "size", "dim"), PUBLIC),
    },
    PLAIN: {
        **dict.fromkeys(("to", "cuda", "cpu", "float", "double"), PLAIN),
        **dict.fromkeys(
            ("parameters", "named_parameters", "modules", "named_modules", "children", "state_dict"), PARAMETERS
        ),
        **dict.fromkeys(("save_pretrained", "push_to_hub"), PUBLIC),
        **dict.fromkeys(("train", "eval", "requires_grad_", "apply", "zero_grad", "load_state_dict"), PUBLIC),
        **dict.fromkeys(("print_trainable_parameters", "gradient_checkpointing_enable", "resize_token_embeddings"), PUBLIC),
    },
    PLAIN_OPTIMIZER: {},
    TRAINER: {
        **dict.fromkeys(("train", "evaluate", "predict"), FIGURE),
        **dict.fromkeys(("save_model", "save_state", "save_metrics", "log_metrics", "log"), PUBLIC),
    },
    GROUPS: {},
    CRITERION: {"to": CRITERION, "cuda": CRITERION},
    CRITERION_ALIKE: {"to": CRITERION_ALIKE, "cuda": CRITERION_ALIKE},
    BATCH: {**dict.fromkeys(CASTS, BATCH), "items": ITEMS, "keys": PUBLIC},
    COLUMN: dict.fromkeys(CASTS, COLUMN),
    OUTPUT: {"float": OUTPUT, "squeeze": OUTPUT},
}
"""The methods of each kind that are understood, with the kind of what they return."""

ATTRIBUTES: Mapping[str, Mapping[str, str]] = {
    MODEL: {"config": PUBLIC, "device": PUBLIC, "dtype": PUBLIC, "training": PUBLIC, "_module": INNER},
    OPTIMIZER: {"param_groups": GROUPS},
    LOADER: {"dataset": PUBLIC, "batch_size": PUBLIC},
    ENGINE: {"accountant": ACCOUNTANT},
    LEDGER: {"planned": PUBLIC, "guarantee": PUBLIC, "epsilon": PUBLIC},
    TRAINER: {"guarantee": PUBLIC, "ledger": LEDGER, "model": PLAIN},
    WEIGHTS: dict.fromkeys(("requires_grad", "shape", "dtype", "device"), PUBLIC),
    PARAMETERS: dict.fromkeys(("requires_grad", "shape", "dtype", "device"), PUBLIC),
    PLAIN: {"config": PUBLIC, "device": PUBLIC},
    OUTPUT: {"loss": OWN, "logits": OUTPUT},
}
"""The attributes that may be read, with their kinds."""

COPIES = frozenset((
    "item", "tolist", "clone", "copy", "argmax", "argmin", "max", "min", "sum", "mean", "std", "median", "eq", "ne",
    "gt", "lt", "ge", "le", "size", "dim", "numel", "topk", "softmax", "log_softmax", "sigmoid", "exp", "log", "sqrt",
    "abs", "any", "all", "round", "norm", "count", "index", "argsort", "sort", "nonzero", "repeat", "flip", "format",
    "most_common",
))  # fmt: skip
READS = COPIES | frozenset((
    *CASTS, "detach", "numpy", "view", "view_as", "reshape", "flatten", "squeeze", "unsqueeze", "expand_as", "t",
    "transpose", "permute", "append", "extend", "add", "keys", "values", "items", "get", "read", "readline", "readlines",
    "read_text", "close",
))  # fmt: skip
"""Methods of private values that change nothing; of ``COPIES`` the result has a memory of its own."""

TOLD = (
    "append", "extend", "add", "update", "add_scalar", "add_scalars", "log", "info", "debug", "warning", "error",
    "write", "writerow", "set_postfix", "set_postfix_str", "set_description", "log_metric", "log_metrics", "format",
    "join", "reset", "clear",
)  # fmt: skip
KEEPS = ("append", "extend", "add", "update", "log")
TRACKERS = ("wandb", "mlflow", "neptune", "clearml", "comet_ml", "tqdm", "logging")
"""Methods that take figures to tell them, or to keep them in a list; of modules, those of ``TRACKERS`` alone."""

COMPUTED = (
    "argmax", "argmin", "mean", "sum", "max", "min", "std", "median", "exp", "log", "log2", "log10", "sqrt", "isnan",
    "isinf", "isfinite", "softmax", "log_softmax", "sigmoid", "round", "accuracy_score", "f1_score", "roc_auc_score",
    "confusion_matrix", "classification_report", "precision_score", "recall_score", "topk", "eq", "argsort", "stack",
    "cat", "concatenate", "array", "average", "where", "abs", "tensor", "fmean", "arange", "randperm", "zeros_like",
    "ones_like",
)  # fmt: skip
MATHEMATICS = ("numpy", "math", "statistics", "sklearn", "torch")
"""Functions of these libraries that return a figure and change nothing."""

BUILTINS = (
    "float", "int", "round", "len", "sum", "min", "max", "abs", "str", "repr", "list", "tuple", "dict", "set", "zip",
    "sorted", "reversed", "range", "isinstance", "type", "id", "bool", "any", "all", "print", "divmod", "format",
    "super",
)  # fmt: skip
NAMING = ("print", "isinstance", "type", "id", "repr", "str", "len")
"""What may be called on any object."""

SAVES = (
    "save", "dump", "dumps", "save_file", "save_model", "ArrayRecord", "RecordDict", "MetricRecord", "deepcopy",
    "OrderedDict",
)  # fmt: skip
"""What keeps or sends weights and figures, or copies them."""

PARSES = ("load", "loads", "safe_load", "reader", "DictReader", "literal_eval")
"""What makes values of a text or of an open file, and changes nothing."""

BESIDE = ("time", "datetime", "logging")
"""Libraries whose functions may run inside the loop over the private loader."""

CONTEXTS = (
    "no_grad", "inference_mode", "autocast", "tqdm", "open", "SummaryWriter", "BatchMemoryManager", "next_round",
    "device", "set_detect_anomaly",
)  # fmt: skip
"""Blocks of ``with`` that neither repeat nor leave out what stands in them."""

FUNCTIONAL = ("cross_entropy", "nll_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits")
LOSSES = ("CrossEntropyLoss", "NLLLoss", "BCELoss", "BCEWithLogitsLoss")
"""Losses that are the mean of one loss for each example, with the arguments ``LOSS_ARGUMENTS``."""

ALIKE = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")
LOSSES_ALIKE = ("MSELoss", "L1Loss", "SmoothL1Loss", "HuberLoss")
"""The same of outputs and labels of the same shape. Of (B, 1) and (B,) they are the mean over all pairs of a batch: torch
warns and goes on."""

LOSS_ARGUMENTS: Mapping[str, tuple[object, ...] | None] = {"reduction": ("mean",), "label_smoothing": None}

SCHEDULES = r"\w+LR|CosineAnnealingWarmRestarts|ReduceLROnPlateau|get_scheduler|get_(\w+_)?schedule\w*"
REACHES = ("parameters", "named_parameters", "weight", "bias", "modules", "named_modules", "children", "named_children")
"""Attributes that reach the weights of a module, whatever its name."""

FITTING = ("fix", "is_valid", "validate", "get_peft_model", "print", "type", "isinstance", "repr", "str")
"""Functions of libraries that take the plain model before the call."""
CHANGES = r"\w*[^_]_|register_\w*hook\w*|backward|step|minimize"
"""Names of methods that write a tensor in its place, hook into a pass, or train. On what is not known they are a doubt."""


def parts(kind: Kind) -> set[str]:
    """The kinds in a kind."""
    return {kind} if isinstance(kind, str) else {one for each in kind for one in parts(each)} or {PUBLIC}


def joined(kinds: Iterable[Kind]) -> Kind:
    """The kind of a value that has one of several kinds."""
    found = list(dict.fromkeys(kinds))
    if len(found) == 1:
        return found[0]
    if found and all(isinstance(one, tuple) for one in found) and len({len(one) for one in found}) == 1:
        return tuple(joined(each) for each in zip(*found))
    every = {one for kind in found for one in parts(kind)} or {PUBLIC}
    if len(every) == 1:
        return every.pop()
    if every <= DATA | {PUBLIC}:
        return figure(every, held=True)
    return PUBLIC if every <= {PUBLIC, CRITERION, CRITERION_ALIKE} else MIXED


def figure(kinds: set[str], *, held: bool = False) -> Kind:
    """The kind of what is computed from values of these kinds. ``held``: it may hold the values themselves."""
    if not kinds & (DATA | {WEIGHTS}):
        return PUBLIC
    return VIEW if held and kinds & SHARED else FIGURE


def stale(kind: Kind) -> Kind:
    """The kind of a value after its batch: what was a part of the batch is a figure."""
    return (FIGURE if kind in DATA else kind) if isinstance(kind, str) else tuple(stale(one) for one in kind)
