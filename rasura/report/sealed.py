"""What a report says of ``sealing`` by the setting that is written: its guarantee, what it is, who applies it. No torch."""

from __future__ import annotations

from rasura.core.options import name_of, parts_of
from rasura.report.language import tell

LEFT_OUT = "none by scheme=none, which encrypts nothing; bytes and time are without encryption"
ENCRYPTED = "security of the encryption scheme for the sealed entries; none for the others"
SUMMED = "security of secure aggregation for each single update; none for the sum, or for entries that stay clear"
SUMMED_WITH_NOISE = (
    "security of secure aggregation for each single update; differential privacy for the sum, counted by the server's ledger"
)
"""The guarantees, by scheme."""

OMITS = "leaves out the most sensitive entries, as encryption would hide them; scheme=none encrypts nothing"
SUMS = "shows the server the sum of several clients, entry by entry, in place of each update"
"""What it is, where it does not encrypt."""

POSITIONS = "mask-positions"
"""The attack that reads which single entries are hidden."""

SHARED = ("param", "random")
"""Significance by which all clients hide the same entries. Others but names of tensors depend on a client's own texts."""


def options_of(part: str) -> tuple[str, str, dict[str, str]]:
    """The significance in one ``part`` of a protection, its ratio (empty where whole tensors are named), and the rest."""
    first, *rest = part.strip().partition(":")[2].split("/")
    metric, _, ratio = first.partition("=")
    return metric or "all", ratio, dict(option.partition("=")[::2] for option in rest)


def scheme_of(part: str) -> str:
    """What hides the entries: ``bfv``, ``ckks``, ``secagg`` or ``none``."""
    given = options_of(part)[2]
    return given.get("by", given.get("scheme")) or "none"


def sealed_promise(part: str) -> str:
    """What ``sealing`` guarantees as one ``part`` of a protection is written, for ``recorded``."""
    scheme = scheme_of(part)
    if scheme in ("bfv", "ckks"):
        return ENCRYPTED
    if scheme != "secagg":
        return LEFT_OUT
    return SUMMED if float(options_of(part)[2].get("noise", 0)) == 0 else SUMMED_WITH_NOISE


def sealed_about(part: str, encrypts: str) -> str:
    """What ``sealing`` is as one ``part`` is written, for ``recorded``; ``encrypts``: what it is where it does."""
    return {"bfv": encrypts, "ckks": encrypts, "secagg": SUMS}.get(scheme_of(part), OMITS)


def unencrypted(defense: str) -> bool:
    """Whether a part of ``defense`` only leaves entries out, so that sizes and times are without encryption."""
    return any(name_of(part) == "sealing" and scheme_of(part) == "none" for part in parts_of(defense))


def never_apply(defense: str) -> frozenset[str]:
    """The attacks that can read nothing of ``defense``, whatever the texts: where whole tensors are hidden, or a sum is
    shown, the positions of hidden entries say nothing. Another part could hide single entries of what stays clear."""
    parts = parts_of(defense)
    for part in parts:
        metric, ratio, given = options_of(part)
        everything = metric == "all" and given.get("embeddings") != "clear"
        if name_of(part) == "sealing" and not ratio and (everything or len(parts) == 1):
            return frozenset({POSITIONS})
    return frozenset()


def federated(setting: str) -> list[str]:
    """The lines that apply ``setting``, one part of which is ``sealing``, in federated training: with a scheme, and sealed
    last. Where clients cannot agree on what to hide, a line that says so. Empty for what no round takes."""
    parts = parts_of(setting)
    sealing = [part for part in parts if name_of(part) == "sealing"]
    if len(sealing) != 1 or {"sign", "dp-ftrl"} & {name_of(part) for part in parts}:
        return []
    metric, ratio, _ = options_of(sealing[0])
    if ratio and metric not in SHARED:
        return [
            tell(
                "# clients cannot agree on sealing:{metric}, which depends on their own texts; calibrate "
                "sealing:param/by=bfv", metric=metric,
            )
        ]  # fmt: skip
    scheme, part = scheme_of(sealing[0]), sealing[0]
    if scheme == "none":
        kept = [option for option in part.split("/") if not option.startswith("scheme=")]
        scheme, part = "bfv", "/".join(["sealing:all" if kept[0] == "sealing" else kept[0], *kept[1:], "by=bfv"])
    defense = "+".join([*(other for other in parts if name_of(other) != "sealing"), part])
    if scheme == "ckks":
        keys = 'clients-key = "/path/to/my-keys/clients.secret", server-key = "/path/to/my-keys/server.public"'
        return [
            "rasura keys my-keys --scheme ckks",
            f'rasura new federated my-app, with {keys}, identities = "" and defense = "{defense}" in its pyproject.toml',
        ]
    app = "my-app --by bfv" if scheme == "bfv" else "my-app"
    return [f'rasura new federated {app}, with defense = "{defense}" in its pyproject.toml']
