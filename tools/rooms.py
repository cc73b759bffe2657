"""The rooms of the package, read from its imports: what stands on what.

    python -m tools.rooms            print the figures and the picture (Mermaid)
    python -m tools.rooms --write    put them into docs/architecture.md

A room is a folder or a module directly in ``rasura/``. An arrow goes from a room to one that it imports, at the top of a
module or inside a function. Rooms that import nothing stand on floor 0, every other room one floor above the highest that it
imports. A circle is a set of rooms of which each reaches every other. It stands on one floor; its arrows are back arrows.
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tools.pages import put

PACKAGE = Path(__file__).resolve().parents[1] / "rasura"
PAGE = PACKAGE.parent / "docs" / "architecture.md"
BEGIN, END = "<!-- rooms: written by python -m tools.rooms --write -->", "<!-- end of rooms -->"

NO_IMPORT = {"files", "metadata", "getLogger", "PackageLoader"}
"""Functions that are given a module's name and do not import it."""

Arrows = Mapping[str, frozenset[str]]


@dataclass(frozen=True)
class Plan:
    """Rooms with their floors, and all arrows between them."""

    floors: Mapping[str, int]
    arrows: Arrows

    @property
    def circles(self) -> list[frozenset[str]]:
        """Sets of rooms of which each reaches every other."""
        reached = {room: _reached(self.arrows, room) for room in self.floors}
        found = {frozenset({r, *(o for o in reached[r] if r in reached[o])}) for r in self.floors}
        return sorted((c for c in found if len(c) > 1), key=sorted)

    @property
    def back(self) -> list[tuple[str, str]]:
        """Arrows to a room that is not on a lower floor: those of circles."""
        return sorted((a, b) for a, rooms in self.arrows.items() for b in rooms if self.floors[b] >= self.floors[a])

    @property
    def figures(self) -> dict[str, int]:
        """How many rooms, floors, arrows, circles and back arrows there are."""
        arrows = sum(map(len, self.arrows.values()))
        floors = len(set(self.floors.values()))
        return {
            "rooms": len(self.floors), "floors": floors, "arrows": arrows, "circles": len(self.circles),
            "back arrows": len(self.back),
        }  # fmt: skip


def _reached(arrows: Arrows, start: str) -> set[str]:
    seen: set[str] = set()
    ahead = list(arrows[start])
    while ahead:
        room = ahead.pop()
        if room not in seen:
            seen.add(room)
            ahead += arrows[room]
    return seen


def imports(path: Path, package: Path = PACKAGE) -> Iterator[str]:
    """Modules of the package that the file names: in imports, and in calls that import by name."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            # `from rasura import plan` names a module, `from rasura.runs.plans import Plan` a name in one.
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) not in NO_IMPORT:
            arguments = (*node.args, *(k.value for k in node.keywords))
            names = [str(a.value) for a in arguments if isinstance(a, ast.Constant)]
        for name in names:
            parts = name.split(".")
            if parts[0] == package.name and len(parts) > 1 and _room(package, parts[1]):
                yield name


def _room(package: Path, name: str) -> bool:
    return not name.startswith("__") and ((package / name).is_dir() or (package / f"{name}.py").is_file())


def plan(package: Path = PACKAGE) -> Plan:
    """The rooms of ``package`` as its files import each other."""
    arrows: dict[str, frozenset[str]] = {}
    for path in sorted(package.rglob("*.py")):
        room = path.relative_to(package).parts[0].removesuffix(".py")
        if not room.startswith("__"):  # the door of the package hands on names of all rooms, and is none
            found = {name.split(".")[1] for name in imports(path, package)} - {room}
            arrows[room] = arrows.get(room, frozenset()) | found
    reached = {room: _reached(arrows, room) for room in arrows}
    floors: dict[str, int] = {}

    def floor(room: str) -> int:
        if room not in floors:
            below = {o for r in {room, *reached[room]} if r == room or room in reached[r] for o in arrows[r]}
            floors[room] = 1 + max((floor(o) for o in below if room not in reached[o]), default=-1)
        return floors[room]

    return Plan({room: floor(room) for room in arrows}, arrows)


def drawn(found: Plan) -> str:
    """The figures and the picture in Markdown. Arrows are left out that a longer way through other rooms implies."""
    kept: list[tuple[str, str]] = []
    for room, others in sorted(found.arrows.items()):
        below = {o for o in others if found.floors[o] < found.floors[room]}
        implied = {far for near in below for far in _reached(found.arrows, near)}
        kept += [(room, other) for other in sorted(others - (implied & below))]
    lines = ["```mermaid", "flowchart TD"]
    for number in sorted(set(found.floors.values()), reverse=True):
        lines.append(f'  subgraph floor{number}["floor {number}"]')
        lines += [f"    {room}_[{room}]" for room, at in sorted(found.floors.items()) if at == number]
        lines.append("  end")
    lines += [f"  {a}_ {'-.->' if (a, b) in found.back else '-->'} {b}_" for a, b in kept]
    told = ", ".join(f"{count} {what}" for what, count in found.figures.items())
    return "\n".join([f"{told[0].upper()}{told[1:]}.", "", *lines, "```"])


def main() -> None:
    """Print the figures and the picture, or write them into docs/architecture.md."""
    parser = argparse.ArgumentParser(description="Draw the rooms of the package from its imports.")
    parser.add_argument("--write", action="store_true", help="put them into docs/architecture.md")
    text = drawn(plan())
    if parser.parse_args().write:
        put(PAGE, BEGIN, text, END)
    else:
        print(text)


if __name__ == "__main__":
    main()
