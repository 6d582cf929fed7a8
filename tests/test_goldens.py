"""Every golden tensor file: kind and configuration come from its JSON sidecar alone.

Read are tests/goldens, the folder ../shared/goldens where it is present, and each `--goldens DIR`.
A kind is a row `kind -> cases(golden)` in the KINDS of a module of tests/golden_kinds; several
modules may test one kind. cases() returns pytest.param(check, id=...) entries, and each check is
called with the golden. A module whose sidecars carry no "kind" offers
`kind_of(sidecar) -> str | None`.
"""

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from pathlib import Path

import golden_kinds
import pytest
from conftest import ROOT, shared_dir
from golden_kinds.golden import Golden

from wamlab.config import unknown_name

MODULES = [
    importlib.import_module(f"golden_kinds.{m.name}")
    for m in pkgutil.iter_modules(golden_kinds.__path__)
    if m.name != "golden"
]


def folders(extra: list[str]) -> list[Path]:
    roots = [ROOT / "tests" / "goldens", shared_dir("goldens"), *map(Path, extra)]
    roots = [root for root in roots if root is not None]
    return [f for root in roots for f in (root, *sorted(p for p in root.rglob("*") if p.is_dir()))]


def find_goldens(extra: list[str]) -> Iterator[Golden]:
    """Yield every golden once; a committed file stands for its namesake in the shared folder."""
    places = tuple(folders(extra))
    given = [Path(e).resolve() for e in extra]
    seen: set[str] = set()
    for folder in places:
        from_caller = any(folder.resolve().is_relative_to(g) for g in given)
        for path in sorted(folder.glob("*.safetensors")):
            if path.stem not in seen or from_caller:
                seen.add(path.stem)
                yield Golden(path, places)


def kind_of(golden: Golden) -> str:
    sidecar = golden.sidecar
    if "kind" in sidecar:
        return sidecar["kind"]
    guesses = (m.kind_of(sidecar) for m in MODULES if hasattr(m, "kind_of"))
    return next((kind for kind in guesses if kind), "none")


def unknown_kind(golden: Golden) -> None:
    kinds = [kind for module in MODULES for kind in module.KINDS]
    pytest.fail(f"{golden.path}: {unknown_name(kind_of(golden), kinds, 'golden kind')}")


def cases_of(golden: Golden) -> list:
    kind = kind_of(golden)
    cases = [case for m in MODULES if kind in m.KINDS for case in m.KINDS[kind](golden)]
    return cases or [pytest.param(unknown_kind, id="kind")]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "golden" not in metafunc.fixturenames:
        return
    params = []
    for golden in find_goldens(metafunc.config.getoption("--goldens")):
        for case in cases_of(golden):
            name = f"{golden.path.parent.name}/{golden.name}-{case.id}"
            params.append(pytest.param(golden, *case.values, id=name, marks=case.marks))
    metafunc.parametrize(("golden", "check"), params)


def test_golden(golden: Golden, check: Callable[[Golden], None]) -> None:
    check(golden)
