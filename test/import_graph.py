"""Imports between the modules of a package, read from the source and never by importing it."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from functools import cache, cached_property
from pathlib import Path
from typing import Literal, NamedTuple

# `load`: as the module is imported. `call`: in a function. `types`: under `if TYPE_CHECKING`.
When = Literal['load', 'call', 'types']


class Import(NamedTuple):
    """One module that a file imports, by its full name, and when that happens."""

    name: str
    when: When


class ImportGraph:
    """All imports of some packages.

    Args:
        root: folder that the packages lie in.
        packages: names of the packages.

    Attributes:
        files: full name of each module to its file.
    """

    def __init__(self, root: Path, packages: Iterable[str]) -> None:
        self.files: dict[str, Path] = {}
        for package in packages:
            for path in sorted((root / package).rglob('*.py')):
                parts = path.relative_to(root).with_suffix('').parts
                self.files['.'.join(parts[:-1] if parts[-1] == '__init__' else parts)] = path

    @cached_property
    def imports(self) -> dict[str, list[Import]]:
        """Imports of each module; what is imported of a package is named as the module it is in."""
        return {
            module: [
                Import(name if name in self.files else found.name, found.when)
                for found, name in imports_with_names(path)
            ]
            for module, path in self.files.items()
        }

    def imported(self, module: str) -> set[str]:
        """Modules of the packages that a module imports, whenever that happens."""
        return {name for name, _ in self.imports[module] if name in self.files}

    def loaded_with(self, modules: Iterable[str]) -> set[str]:
        """Modules that are there once some are imported, those of other packages included."""
        loaded: set[str] = set()
        waiting = list(modules)
        while waiting:
            name = waiting.pop()
            if name in loaded:
                continue
            loaded.add(name)
            # A package's own file is loaded before its modules.
            waiting += [name.rpartition('.')[0]] if '.' in name else []
            waiting += [found for found, when in self.imports.get(name, ()) if when == 'load']
        return loaded

    def circles(self, modules: Iterable[str]) -> list[set[str]]:
        """Groups of modules that all import each other, directly or through other modules of them.

        Imports in functions and for types count.
        """
        inside = set(modules)
        reached = {module: self._reached(module, inside) for module in inside}
        circles = {
            frozenset({module, *(one for one in reached[module] if module in reached[one])})
            for module in inside
            if module in reached[module]
        }
        return [set(circle) for circle in circles]

    def _reached(self, module: str, inside: set[str]) -> set[str]:
        reached: set[str] = set()
        waiting = [module]
        while waiting:
            new = (self.imported(waiting.pop()) & inside) - reached
            reached |= new
            waiting += new
        return reached


def imports(path: Path) -> set[str]:
    """Full names of all modules that a file imports, whenever that happens.

    Of `from a import b` both `a` and `a.b` are named, for `b` may be a module.
    """
    return {name for found, whole in imports_with_names(path) for name in (found.name, whole)}


@cache
def imports_with_names(path: Path) -> tuple[tuple[Import, str], ...]:
    """Imports of a file, each with the full name of what is imported of the module."""
    return tuple(_imports(ast.parse(path.read_text(encoding='utf-8')), 'load'))


def _imports(node: ast.AST, when: When) -> Iterator[tuple[Import, str]]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield Import(alias.name, when), alias.name
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0 and node.module, f'relative import in line {node.lineno}'
        for alias in node.names:
            yield Import(node.module, when), f'{node.module}.{alias.name}'
    elif isinstance(node, ast.If) and _is_type_checking(node.test):
        yield from _of_all(node.body, 'types')
        yield from _of_all(node.orelse, when)
    else:
        in_function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        inner: When = 'call' if in_function and when == 'load' else when
        yield from _of_all(ast.iter_child_nodes(node), inner)


def _of_all(nodes: Iterable[ast.AST], when: When) -> Iterator[tuple[Import, str]]:
    for node in nodes:
        yield from _imports(node, when)


def _is_type_checking(test: ast.expr) -> bool:
    name = test.attr if isinstance(test, ast.Attribute) else getattr(test, 'id', '')
    return name == 'TYPE_CHECKING'
