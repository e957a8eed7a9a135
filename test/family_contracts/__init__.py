"""What the tests know of each family: one module here a family, found by listing this folder.

A new family adds one module that declares `CONTRACTS` (`declaration.FamilyContract`); the tests in
test/contract then hold it to everything that a family must satisfy.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pathlib import Path

from family_contracts.declaration import FamilyContract

# Modules that declare no family.
_SHARED = ('declaration', 'robot')


@cache
def contracts() -> dict[str, FamilyContract]:
    """The contracts of all families, by name."""
    names = sorted(path.stem for path in Path(__file__).parent.glob('[a-z]*.py'))
    modules = [import_module(f'{__name__}.{name}') for name in names if name not in _SHARED]
    return {one.family: one for module in modules for one in module.CONTRACTS}


def contract_of(family: str) -> FamilyContract:
    """The contract of one family."""
    return contracts()[family]
