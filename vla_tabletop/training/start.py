"""Trained bundle that training goes on from."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vla_runtime.bundle.folder import read_bundle
from vla_runtime.bundle.schema import VERIFICATION_FILE, WEIGHTS_FILE
from vla_runtime.family.declaration import language_dims
from vla_runtime.files.atomic_write import write_text
from vla_runtime.files.json_file import read_document, read_json

if TYPE_CHECKING:
    from vla_tabletop.training.recipes.recipe import Recipe
    from vla_tabletop.training.world import TrainingWorld

# --- Log of a work folder: commands, code versions, durations


class WorkLog:
    """`runs.json` of a work folder; an interrupted run is in it as far as it came.

    Earlier runs stay. Raises ValueError: the file is no list of runs.
    """

    def __init__(self, path: Path, command: str, code: str) -> None:
        self._path = path
        self.runs: list[dict[str, Any]] = []
        if path.exists():
            runs = read_document(path)
            if not isinstance(runs, list) or not all(isinstance(run, dict) for run in runs):
                raise ValueError(f'{path}: is not a list of runs; remove it')
            self.runs += runs
        self.runs.append({'command': command, 'code': code})

    @contextmanager
    def timed(self, step: str) -> Iterator[None]:
        """Note the seconds of wall time that the block takes, however it ends."""
        start_s = time.monotonic()
        try:
            yield
        finally:
            self.runs[-1][f'{step}_seconds'] = round(time.monotonic() - start_s, 1)
            write_text(self._path, json.dumps(self.runs, indent=2) + '\n')


@dataclass(frozen=True)
class Start:
    """A trained bundle that training continues from.

    `sha256`: of `weights`; `tokenizer`: None without language; `files`: its family's own;
    `statistics` (`state.q01` and so on) scale the network's numbers; `made`: training facts of its
    receipt.
    """

    weights: Path
    sha256: str
    tokenizer: Path | None
    files: tuple[Path, ...]
    statistics: dict[str, np.ndarray]
    made: dict[str, Any]

    @classmethod
    def read(cls, folder: Path, recipe: Recipe, world: TrainingWorld) -> Start:
        """Read a bundle of `train-demo`; ValueError: broken, or not the recipe's network."""
        bundle = read_bundle(folder)
        dims = bundle.spec.dims
        has_language = recipe.family.has_language
        vocabulary = language_dims(dims).vocabulary if has_language else 0
        if bundle.spec.family != recipe.name or dims != world.fit(recipe.dims(vocabulary)):
            raise ValueError(
                f'--from {folder}: family and dimensions in policy.yaml are not those of the '
                f"{recipe.name} recipe's network; name a bundle that train-demo made, and its "
                '--family'
            )
        return cls(
            bundle.weights_path,
            bundle.spec.files[WEIGHTS_FILE],
            bundle.tokenizer_path if has_language else None,
            tuple(bundle.folder / name for name in recipe.family.files),
            dict(bundle.statistics),
            _made(bundle.folder / VERIFICATION_FILE),
        )


def _made(receipt: Path) -> dict[str, Any]:
    if not receipt.exists():
        return {}
    return dict(read_json(receipt).mapping('made', optional=True).values)
