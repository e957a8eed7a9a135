"""Names of modules in docstrings and comments lead to something that is there."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest
from paths import PACKAGES, ROOT

FILES = [file for package in PACKAGES for file in (ROOT / package).rglob('*.py')]
# Folders whose names are also those of an installed package, or begin a file's name.
OTHERS = {'torch', 'onnx', 'tensorrt', 'triton', 'policy', 'base'}


def names_of(file: Path) -> set[str]:
    """Names that a module defines or stores anywhere."""
    nodes = [*ast.walk(ast.parse(file.read_text(encoding='utf-8')))]
    defined = {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    stored = {
        node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    return defined | stored


def endings(path: tuple[str, ...]) -> set[tuple[str, ...]]:
    return {path[start:] for start in range(len(path))}


def parts_of(file: Path) -> tuple[str, ...]:
    parts = file.relative_to(ROOT).with_suffix('').parts
    return parts[:-1] if parts[-1] == '__init__' else parts


# By the end of a module's path: `engines.candidates` for that of `vla_runtime`.
MODULES: dict[tuple[str, ...], list[Path]] = {}
for _file in FILES:
    for _ending in endings(parts_of(_file)):
        MODULES.setdefault(_ending, []).append(_file)
FOLDERS = {parts_of(file)[-1] for file in FILES if file.name == '__init__.py'} - OTHERS


def resolves(reference: str) -> bool:
    """Return whether a dotted name is a module, or a name in one."""
    parts = tuple(reference.split('.'))
    for length in range(len(parts), 0, -1):
        for file in MODULES.get(parts[:length], []):
            if length == len(parts) or parts[length] in names_of(file):
                return True
    return False


def texts(source: str) -> list[str]:
    """Comments of a source, and its strings, docstrings among them."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return [token.string for token in tokens if token.type in (tokenize.COMMENT, tokenize.STRING)]


def references(source: str) -> list[str]:
    """Dotted names in backticks whose first is a folder of the packages."""
    found = re.findall(r'`([a-z_]+(?:\.\w+)+)`', '\n'.join(texts(source)))
    return [name for name in found if name.split('.')[0] in FOLDERS]


@pytest.mark.parametrize('package', PACKAGES)
def test_modules_that_docstrings_name_are_there(package: str) -> None:
    dead = [
        f'{file.relative_to(ROOT)}: {name}'
        for file in (ROOT / package).rglob('*.py')
        for name in references(file.read_text(encoding='utf-8'))
        if not resolves(name)
    ]
    assert dead == []


@pytest.mark.parametrize(
    ('reference', 'is_there'),
    [
        ('engines.candidates', True),
        ('engines.choice', False),
        ('inference.settings.row_weights', True),
        ('inference.row_weights', False),
    ],
)
def test_a_reference_leads_to_a_module_or_to_a_name_in_it(reference: str, is_there: bool) -> None:
    assert references(f'# See `{reference}`.') == [reference]
    assert resolves(reference) == is_there
