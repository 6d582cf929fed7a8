"""Source of a function or class defined in a cell, as a module that a fresh process can import.

What the definition names is followed: other definitions of the notebook are shipped with it,
imports are repeated as the cells wrote them, plain constants become assignments. A live object
(a model, a tensor, an open file) cannot travel; it is refused by name before anything starts.
"""

import ast
import builtins
import importlib.util
import inspect
import linecache
import re
import symtable
import sys
import textwrap
from typing import Any

from wamlab.config import UserError

MODULE = "wamlab_cell"  # the shipped module's name in the ranks


class ShipError(UserError):
    """A target or config that cannot be sent to another process, and what stands in the way."""


def ship(*objects: Any) -> str:
    """Return the text of a module that defines the given functions and classes of `__main__`.

    Raises:
        ShipError: a lambda, a closure, a live object among the names, or no source to be found.
    """
    shipment = _Shipment()
    for obj in objects:
        shipment.add(obj)
    for obj in objects:
        if shipment.refused:
            names = ", ".join(f"{n} ({type(v).__name__})" for n, v in shipment.refused.items())
            raise ShipError(
                f"{obj.__name__} uses live objects of this process: {names}; another process "
                "cannot see them: make them inside the function, or put numbers and paths into "
                "the config"
            )
    return shipment.text()


class _Shipment:
    def __init__(self) -> None:
        self.imports: dict[str, str] = {}  # name -> statement
        self.constants: dict[str, str] = {}
        self.definitions: dict[str, str] = {}  # in the order they are needed
        self.refused: dict[str, Any] = {}
        self.seen: set[str] = set()

    def add(self, obj: Any) -> None:
        """Add one definition and all that it needs."""
        if obj.__name__ in self.seen:
            return
        self.seen.add(obj.__name__)
        _refuse_unshippable(obj)
        source = textwrap.dedent(source_of(obj))
        names = vars(sys.modules[obj.__module__])
        for name in sorted(_global_names(source)):
            if name in names and name not in self.seen:
                self._add_name(name, names[name], _cells(obj))
        self.definitions[obj.__name__] = source

    def _add_name(self, name: str, value: Any, cells: list[str]) -> None:
        statement = _import_statement(name, value, cells)
        if statement:
            self.imports[name] = statement
        elif _is_own(value):
            self.add(value)
            if value.__name__ != name:
                self.constants[name] = value.__name__
        elif _is_literal(value):
            self.constants[name] = repr(value)
        elif not hasattr(builtins, name):
            self.refused[name] = value

    def text(self) -> str:
        assigned = [f"{n} = {v}" for n, v in self.constants.items() if v not in self.definitions]
        aliases = [f"{n} = {v}" for n, v in self.constants.items() if v in self.definitions]
        parts = [*dict.fromkeys(self.imports.values()), *assigned]
        return "\n".join(parts) + "\n\n\n" + "\n\n".join([*self.definitions.values(), *aliases])


def _refuse_unshippable(obj: Any) -> None:
    if getattr(obj, "__name__", "") == "<lambda>":
        raise ShipError("a lambda has no name to be found by; write it as a def")
    if "<locals>" in obj.__qualname__ and not getattr(obj, "__closure__", None):
        raise ShipError(f"{obj.__qualname__} is defined inside a function; define it in a cell")
    if getattr(obj, "__closure__", None):
        caught = [f"{n} ({_kind(c)})" for n, c in zip(obj.__code__.co_freevars, obj.__closure__)]
        raise ShipError(
            f"{obj.__name__} is a closure over {', '.join(caught)}; another process cannot "
            "see them: put them into the config, or make them inside the function"
        )


def _kind(cell: Any) -> str:
    try:
        return type(cell.cell_contents).__name__
    except ValueError:
        return "not yet set"


def _is_own(value: Any) -> bool:
    return (inspect.isfunction(value) or inspect.isclass(value)) and value.__module__ == "__main__"


def _is_literal(value: Any) -> bool:
    try:
        return ast.literal_eval(repr(value)) == value
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return False


def _global_names(source: str) -> set[str]:
    """Return the names that a definition looks up outside itself, at any depth."""
    found: set[str] = set()
    tables = [symtable.symtable(source, "cell", "exec")]
    own = {n.name for n in ast.parse(source).body if hasattr(n, "name")}
    while tables:
        table = tables.pop()
        tables += table.get_children()
        top = table.get_type() == "module"
        for symbol in table.get_symbols():
            if symbol.is_referenced() and (top or symbol.is_global()):
                found.add(symbol.get_name())
    return found - own


def _import_statement(name: str, value: Any, cells: list[str]) -> str | None:
    """Return the import that gave `name` its value, the latest first, or None."""
    for cell in reversed(cells):
        for node in ast.walk(_parsed(cell)):
            if not isinstance(node, ast.Import | ast.ImportFrom):
                continue
            for alias in node.names:
                statement = _as_statement(node, alias, name, value)
                if statement:
                    return statement
    if inspect.ismodule(value):
        return f"import {value.__name__} as {name}"
    module = sys.modules.get(getattr(value, "__module__", None) or "")
    own_name = getattr(value, "__name__", "")
    if module and module.__name__ != "__main__" and getattr(module, own_name, None) is value:
        return f"from {module.__name__} import {own_name} as {name}"
    return None


def _as_statement(node: ast.AST, alias: ast.alias, name: str, value: Any) -> str | None:
    bound = alias.asname or alias.name.split(".")[0]
    if isinstance(node, ast.Import):
        if bound == name and inspect.ismodule(value):
            return f"import {alias.name}" + (f" as {alias.asname}" if alias.asname else "")
        return None
    wanted = name if alias.name == "*" else alias.name
    if node.level or (alias.name != "*" and bound != name):
        return None
    module = sys.modules.get(node.module)
    if module is None or getattr(module, wanted, _MISSING) is not value:
        return None
    return f"from {node.module} import {wanted} as {name}"


_MISSING = object()


def _parsed(cell: str) -> ast.Module:
    try:
        return ast.parse(cell)
    except SyntaxError:
        return ast.Module(body=[], type_ignores=[])  # a cell that did not run


def _cells(obj: Any) -> list[str]:
    """Return the texts in which the definition's imports may stand: run cells, or its script."""
    history = _cell_history()
    if history:
        return history
    file = getattr(sys.modules["__main__"], "__file__", None)
    return ["".join(linecache.getlines(file))] if file else []


def _cell_history() -> list[str]:
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return list(shell.history_manager.input_hist_parsed) if shell else []


def source_of(obj: Any) -> str:
    """Return the latest text of a function or class, a cell's included.

    Raises:
        ShipError: it was typed where no text is kept (`python -c`, a plain prompt).
    """
    if inspect.isclass(obj):
        for cell in reversed(_cell_history()):  # before Python 3.13 inspect finds no cell's class
            for node in _parsed(cell).body:
                if isinstance(node, ast.ClassDef) and node.name == obj.__name__:
                    return _segment(cell, node)
    try:
        return inspect.getsource(obj)
    except (OSError, TypeError) as error:
        raise ShipError(
            f"the source of {obj.__name__} is not kept here; put it into a file and name it "
            '"module:function"'
        ) from error


def _segment(cell: str, node: ast.ClassDef) -> str:
    first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
    return "\n".join(cell.splitlines()[first - 1 : node.end_lineno]) + "\n"


def must_ship(obj: Any) -> bool:
    """Tell whether a function or class lives in a cell, a script or another function."""
    defined = inspect.isfunction(obj) or inspect.isclass(obj)
    return defined and (obj.__module__ == "__main__" or "<l" in obj.__qualname__)


def path_of(target: Any) -> str:
    """Return the "module:name" by which a rank imports the target; nothing is run.

    Raises:
        ShipError: it is no function, class or "module:function", or there is no such module.
    """
    if must_ship(target):
        return f"{MODULE}:{target.__name__}"
    if inspect.isfunction(target) or inspect.isclass(target):
        return f"{target.__module__}:{target.__qualname__}"
    if not isinstance(target, str) or not re.fullmatch(r"[\w.]+:[\w.]+", target):
        raise ShipError(f'a target is "module:function", a function or a class, got {target!r}')
    module = target.partition(":")[0]
    try:
        found = importlib.util.find_spec(module)
    except ModuleNotFoundError:  # the package above it
        found = None
    if found is None:
        raise ShipError(f"no module {module!r} for the target {target!r} on sys.path")
    return target
