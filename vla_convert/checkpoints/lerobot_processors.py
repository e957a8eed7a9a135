"""A LeRobot folder's processors: the steps before and after the network, and their tensors."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vla_convert.checkpoints.folder_facts import ExportError
from vla_runtime.bundle.tensors import TensorsError, read_arrays
from vla_runtime.files.json_file import JsonMapping, read_json

PREPROCESSOR_FILE = 'policy_preprocessor.json'
POSTPROCESSOR_FILE = 'policy_postprocessor.json'

# Steps that a release registered under another name: 0.5.1.
_EARLIER_NAMES = {'delta_actions_processor': 'relative_actions_processor'}


@dataclass(frozen=True)
class Pipeline:
    """A processor's JSON: registry name of each step to its configuration and tensors."""

    path: Path
    steps: Mapping[str, JsonMapping]
    state_files: Mapping[str, str]

    def step(self, name: str) -> JsonMapping:
        """A step's configuration, empty where the pipeline has no such step."""
        return self.steps.get(name, JsonMapping(self.path, {}))


def read_pipeline(path: Path, known: tuple[str, ...]) -> Pipeline:
    """Read a processor's JSON; `known`: registry names of the steps that this runtime does.

    Raises ExportError: a missing file, an unknown step or a repeated one.
    """
    if not os.path.lexists(path):
        raise ExportError(f'{path}: is missing; copy the whole folder')
    steps: dict[str, JsonMapping] = {}
    files: dict[str, str] = {}
    for step in read_json(path).mappings('steps'):
        # A step that was never registered is saved under its Python class.
        name = step.get('registry_name', str, None) or step.get('class', str, 'without a name')
        name = _EARLIER_NAMES.get(name, name)
        if name not in known:
            raise ExportError(
                f"{path}: field {step.field}: the step '{name}' is not supported; known are "
                f'{", ".join(known)}'
            )
        if name in steps and name != 'device_processor':
            raise ExportError(f"{path}: field {step.field}: a second step '{name}'")
        steps[name] = step.mapping('config', optional=True)
        if 'state_file' in step:
            files[name] = step.get('state_file', str)
    return Pipeline(path, steps, files)


def state_file(folder: Path, pipeline: Pipeline, step: str) -> tuple[Path, dict[str, np.ndarray]]:
    """Read a step's file and tensors by name, if it has a file; ExportError: unreadable."""
    name = pipeline.state_files.get(step)
    if name is None:
        return pipeline.path, {}
    path = folder / name
    if Path(name).name != name or not name.endswith('.safetensors'):
        raise ExportError(
            f"{pipeline.path}: field state_file: '{name}' is not the plain name of a safetensors "
            'file'
        )
    try:
        return path, read_arrays(path)
    except TensorsError as error:
        raise ExportError(str(error)) from None
