"""Collects the specs of methods from the package's own modules and from installed plug-ins.

A method is in the registry if its module holds a ``MethodSpec``; there is no list to extend. A plug-in names its specs under
entry points (``rasura.attacks = ...``, see ``GROUPS`` in ``rasura.registry``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cache, cached_property
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pkgutil import walk_packages
from typing import Any, TypeVar

from rasura.core.errors import FAULTS, InputError, in_its_words
from rasura.core.options import known
from rasura.core.specs import MethodSpec

S = TypeVar("S", bound=MethodSpec)


def ours(made: object) -> bool:
    """Whether a class or a function is Rasura's own, by the package that defines it; what names none is not."""
    return str(getattr(made, "__module__", "")).split(".")[0] == __name__.split(".")[0]


BASELINES = ("none", "blind")
"""Names that come first wherever methods are listed."""


@cache
def specs_in(package: str) -> tuple[MethodSpec, ...]:
    """Every spec in ``package`` or in a module below it; or in the module itself if it is not a package."""
    root = import_module(package)
    names = [m.name for m in walk_packages(getattr(root, "__path__", ()), f"{package}.")]
    found = [v for name in (package, *names) for v in vars(import_module(name)).values() if isinstance(v, MethodSpec)]
    return tuple({id(spec): spec for spec in found}.values())


class Registry(Mapping[str, S]):
    """The methods of one kind by name, loaded at first access.

    ``kind`` is the kind in words, ``spec`` its type, ``package`` where the package's own methods stand, ``group`` the entry
    points of plug-ins, ``also`` a second place of the package's own. ``unusable`` says why a plug-in could not be loaded: it
    is left out, and the others work.
    """

    def __init__(self, kind: str, spec: type[S], package: str, group: str, *, also: str | None = None) -> None:
        self.kind, self.spec, self.group = kind, spec, group
        self.packages = (package,) if also is None else (package, also)
        self.unusable: dict[str, str] = {}

    @cached_property
    def specs(self) -> dict[str, S]:
        """Name to spec, baselines first, then by name."""
        found: dict[str, S] = {}
        for spec in (spec for package in self.packages for spec in specs_in(package)):
            if isinstance(spec, self.spec):
                if spec.name in found:
                    raise InputError(f"two methods are called {spec.name!r} among {self.kind}s; rename one of them")
                found[spec.name] = spec
        for point in entry_points(group=self.group):
            try:
                brought = self._brought(point)
                if taken := [s.name for s in brought if s.name in found]:
                    raise InputError(f"the name {taken[0]!r} is taken")
            except FAULTS as error:  # somebody else's code: it must not take the package down with it
                self.unusable[point.name] = in_its_words(error)
            else:
                found |= {s.name: s for s in brought}
        return dict(sorted(found.items(), key=lambda item: (item[0] not in BASELINES, item[0])))

    def own(self, spec: MethodSpec) -> bool:
        """Whether ``spec`` is one of Rasura's, as it stands there: neither a plug-in's nor a changed copy."""
        return any(spec is one for package in self.packages for one in specs_in(package))

    def _brought(self, point: EntryPoint) -> list[S]:
        loaded: Any = point.load()
        specs: list[Any] = [loaded] if isinstance(loaded, MethodSpec) else list(loaded)
        if wrong := [s for s in specs if not isinstance(s, self.spec)]:
            raise InputError(f"{point.value} is a {type(wrong[0]).__name__}; expected {self.spec.__name__}")
        return specs

    def __getitem__(self, name: str) -> S:
        return self.specs[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.specs)

    def __len__(self) -> int:
        return len(self.specs)


def named(name: str, methods: Mapping[str, S], kind: str, unusable: Iterable[tuple[str, str]] = ()) -> S:
    """The spec called ``name`` among ``methods``. Raises ``InputError`` with the nearest names."""
    for plugin, why in unusable:
        if plugin == name and name not in methods:
            raise InputError(f"the plug-in {name} could not be loaded: {why}")
    return methods[known(kind, name, methods)]
