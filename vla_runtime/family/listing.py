"""Policy families, found by listing `families/`: each subfolder with a `declaration.py` is one."""

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

# Package whose subfolders are the families.
_PACKAGE = 'vla_runtime.families'
# Folders whose fault is in the log.
_reported: set[str] = set()


def family_folders() -> list[str]:
    declared = (path.parent for base in code_folders() for path in base.glob('*/declaration.py'))
    return sorted(folder.name for folder in declared)


def code_folders() -> list[Path]:
    return [Path(folder) for folder in importlib.import_module(_PACKAGE).__path__]


def family_module(folder: str, name: str) -> ModuleType:
    """Import a module of a family's folder: `declaration`, `networks` or `checkpoint`."""
    return importlib.import_module(f'{_PACKAGE}.{folder}.{name}')


def _in_folders() -> dict[str, tuple[str, Family]]:
    families: dict[str, tuple[str, Family]] = {}
    for folder in family_folders():
        for family in _declared_in(folder):
            if family.name in families:
                other = families[family.name][0]
                raise ValueError(
                    f"family '{family.name}' is declared in families/{other} and in "
                    f'families/{folder}; give one of them another name in its declaration.py'
                )
            families[family.name] = folder, family
    return families


def _declared_in(folder: str) -> Sequence[Family]:
    """Import a folder's declaration; one that is broken leaves the other families usable."""
    try:
        return list(family_module(folder, 'declaration').FAMILIES)
    except Exception as error:
        # Of any kind: it is somebody's code in the making.
        if folder not in _reported:
            _reported.add(folder)
            logger.error(
                'families/%s/declaration.py cannot be imported, and its families are left out: '
                '%s: %s',
                folder,
                type(error).__name__,
                error,
            )
        return []


def family_names() -> list[str]:
    return list(_in_folders())


def find_family(name: str) -> Family:
    """Return a family's declaration; ValueError lists the known ones."""
    return find_in_folder(name)[1]


def preset_names() -> list[str]:
    return [name for _, family in _in_folders().values() for name in family.presets]


def preset(name: str) -> tuple[str, PolicyDims] | None:
    """Return family and dimensions of a published size; None for an unknown name."""
    families = (family for _, family in _in_folders().values())
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


def find_in_folder(name: str) -> tuple[str, Family]:
    """Return a family's folder and declaration; errors as `find_family`."""
    families = _in_folders()
    if name not in families:
        raise ValueError(f"family '{name}' is not served; known are {', '.join(families)}")
    return families[name]
