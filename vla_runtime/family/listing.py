"""Policy families, found by listing `declarations/`: each file there declares some."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from vla_runtime.family.declaration import Family, PolicyDims, TimeTable
from vla_runtime.family.performance_figures import PerformanceFigures
from vla_runtime.files.safetensors_reader import SafetensorsReader

logger = logging.getLogger(__name__)

# Packages of the declarations, and of the networks under the same names.
_DECLARATIONS, _MODELS = 'vla_runtime.declarations', 'vla_runtime.models'
# Files whose fault is in the log.
_reported: set[str] = set()


def family_files() -> list[str]:
    """Names of the files that families are in: of declaration, networks and reader alike."""
    folders = importlib.import_module(_DECLARATIONS).__path__
    found = (path.stem for folder in folders for path in Path(folder).glob('*.py'))
    return sorted(name for name in found if name != '__init__')


def networks_of(file: str) -> ModuleType:
    """Import the networks of the families of a file."""
    return importlib.import_module(f'{_MODELS}.{file}')


def _in_files() -> dict[str, tuple[str, Family]]:
    families: dict[str, tuple[str, Family]] = {}
    for file in family_files():
        for family in _declared_in(file):
            if family.name in families:
                other = families[family.name][0]
                raise ValueError(
                    f"family '{family.name}' is declared in declarations/{other}.py and in "
                    f'declarations/{file}.py; give one of them another name'
                )
            families[family.name] = file, family
    return families


def _declared_in(file: str) -> Sequence[Family]:
    """Import a declaration; one that is broken leaves the other families usable."""
    try:
        return list(importlib.import_module(f'{_DECLARATIONS}.{file}').FAMILIES)
    except Exception as error:
        # Of any kind: it is somebody's code in the making.
        if file not in _reported:
            _reported.add(file)
            logger.error(
                'declarations/%s.py cannot be imported, and its families are left out: %s: %s',
                file,
                type(error).__name__,
                error,
            )
        return []


def family_names() -> list[str]:
    return list(_in_files())


def find_family(name: str) -> Family:
    """Return a family's declaration; ValueError lists the known ones."""
    return find_in_file(name)[1]


def preset_names() -> list[str]:
    return [name for _, family in _in_files().values() for name in family.presets]


def preset(name: str) -> tuple[str, PolicyDims] | None:
    """Return family and dimensions of a published size; None for an unknown name."""
    families = (family for _, family in _in_files().values())
    return next(
        ((family.name, family.presets[name]) for family in families if name in family.presets), None
    )


def performance_figures(model: str) -> PerformanceFigures:
    """Return the figures of a published size; empty ones for a size, or a name, without any."""
    found = preset(model)
    figures = {} if found is None else find_family(found[0]).figures
    return figures.get(model, PerformanceFigures())


def read_time_table(name: str, dims: PolicyDims, weights: Path) -> TimeTable:
    """Return a family's time table over a bundle's weights.

    Raises:
        ValueError: unknown family, or no safetensors file.
    """
    return find_family(name).time_table(dims, SafetensorsReader(weights))


def find_in_file(name: str) -> tuple[str, Family]:
    """Return a family's file and declaration; errors as `find_family`."""
    families = _in_files()
    if name not in families:
        raise ValueError(f"family '{name}' is not served; known are {', '.join(families)}")
    return families[name]
