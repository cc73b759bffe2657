"""The picture of the rooms is drawn from the code as it is, and counts what it says."""

from __future__ import annotations

from pathlib import Path

from tools import rooms


def house(folder: Path, **modules: str) -> rooms.Plan:
    package = folder / "house"
    for name, code in modules.items():
        path = package / (name.replace("__", "/") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(code, encoding="utf-8")
    return rooms.plan(package)


def test_the_page_shows_the_rooms_as_they_are() -> None:
    page = rooms.PAGE.read_text(encoding="utf-8")
    told = page.partition(rooms.BEGIN)[2].partition(rooms.END)[0].strip()
    assert told == rooms.drawn(rooms.plan()), "out of date; run: python -m tools.rooms --write"


def test_no_circle_and_no_arrow_back() -> None:
    found = rooms.plan()
    assert found.circles == [] and found.back == []


def test_rooms_floors_and_arrows_are_counted(tmp_path: Path) -> None:
    found = house(
        tmp_path,
        cellar="",
        hall__door="from house.cellar import x",
        hall__stairs="from house.hall.door import y\nimport logging\nlogging.getLogger('house.roof')",
        roof="from house import cellar, hall",
        wing="def go():\n    import_module('house.roof')",
    )
    assert found.floors == {"cellar": 0, "hall": 1, "roof": 2, "wing": 3}
    assert found.figures == {"rooms": 4, "floors": 4, "arrows": 4, "circles": 0, "back arrows": 0}
    told = rooms.drawn(found)
    assert "roof_ --> hall_" in told and "roof_ --> cellar_" not in told, "the way through the hall implies it"


def test_a_circle_is_found_though_one_of_its_imports_is_inside_a_function(tmp_path: Path) -> None:
    found = house(tmp_path, a="from house.b import x", b="def f():\n    from house.a import y", c="import house.b")
    assert found.circles == [frozenset("ab")] and found.back == [("a", "b"), ("b", "a")]
    assert found.floors == {"a": 0, "b": 0, "c": 1} and "a_ -.-> b_" in rooms.drawn(found)
