"""LeRobot's folders from before 0.4: no processors, statistics among the policy's tensors.

LeRobot 0.1 to 0.3 name the policy's type in config.json. Folders of 2024 have the shapes and the
normaliser of each feature instead.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from vla_convert.checkpoints.folder_facts import CONFIG_FILE, ExportError
from vla_convert.checkpoints.lerobot_processors import (
    ACTION,
    ENVIRONMENT,
    POSTPROCESSOR_FILE,
    PREPROCESSOR_FILE,
    STATE,
    Features,
    Pipeline,
    StoredStatistics,
)
from vla_convert.checkpoints.tensors import prefixes, read_stored
from vla_runtime.bundle.tensors import StoredTensor, TensorsError, read_array
from vla_runtime.files.json_file import JsonMapping, read_json

_INPUTS, _OUTPUTS = 'normalize_inputs.buffer_', 'unnormalize_outputs.buffer_'
_TYPES = {STATE: 'STATE', ENVIRONMENT: 'ENV', ACTION: 'ACTION'}


def read_config(folder: Path) -> JsonMapping:
    """Read config.json; one of 2024 is returned in the later form.

    Raises JsonError or ExportError: a damaged file, or normalisers that the later form lacks.
    """
    config = read_json(folder / CONFIG_FILE)
    return _later_form(config) if is_of_2024(config) else config


def is_of_2024(config: JsonMapping) -> bool:
    """Return whether config.json is one of LeRobot's of 2024."""
    return 'type' not in config and 'input_shapes' in config and 'output_shapes' in config


def _later_form(config: JsonMapping) -> JsonMapping:
    features: dict[str, dict[str, dict[str, Any]]] = {}
    modes: dict[str, str] = {}
    for group in ('input', 'output'):
        shapes = config.mapping(f'{group}_shapes')
        written = config.mapping(f'{group}_normalization_modes', optional=True)
        features[group] = {}
        for key in shapes.values:
            kind = _TYPES.get(key, 'VISUAL')
            features[group][key] = {'type': kind, 'shape': shapes.get(key, list)}
            mode = written.get(key, str, 'identity').upper()
            if modes.setdefault(kind, mode) != mode:
                raise written.error(
                    key, f"'{mode.lower()}' where other cameras have '{modes[kind].lower()}'"
                )
    values = {
        **config.values,
        'input_features': features['input'],
        'output_features': features['output'],
        'normalization_mapping': modes,
    }
    return JsonMapping(config.path, values)


def has_processors(folder: Path) -> bool:
    """Return whether there is a processor's file, as LeRobot writes them since 0.4."""
    return any(os.path.lexists(folder / file) for file in (PREPROCESSOR_FILE, POSTPROCESSOR_FILE))


def early_pipelines(config: JsonMapping) -> tuple[Pipeline, Pipeline]:
    """Return the processors that do what the policy itself did."""
    normaliser = JsonMapping(
        config.path, {'norm_map': dict(config.mapping('normalization_mapping').values)}
    )
    return (
        Pipeline(config.path, {'normalizer_processor': normaliser}, {}),
        Pipeline(config.path, {'unnormalizer_processor': normaliser}, {}),
    )


def early_statistics(folder: Path, features: Features) -> StoredStatistics:
    """Read the statistics among the policy's tensors; ExportError: none, or untrained ones."""
    tensors = _without_prefix({tensor.name: tensor for tensor in read_stored(folder)})
    file = next(iter(tensors.values())).path if tensors else folder
    before = _of_features(tensors, _INPUTS, [*features.state, *features.cameras])
    after = _of_features(tensors, _OUTPUTS, [ACTION])
    if not before and not after:
        raise ExportError(
            f'{folder}: has no {PREPROCESSOR_FILE}, and its tensors no statistics '
            f"('{_OUTPUTS}action…', as LeRobot before 0.4 kept them): a policy that was never "
            'trained on a data set (a base model) has none; otherwise copy the whole folder'
        )
    # A feature without statistics was not normalised; `read_statistics` knows which may be.
    return StoredStatistics(file, {**before, **after}, file, after)


def _without_prefix(tensors: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Remove a prefix before every name, where statistics are behind it."""
    for prefix in prefixes(tensors):
        found = {name.removeprefix(prefix): stored for name, stored in tensors.items()}
        if any(name.startswith((_INPUTS, _OUTPUTS)) for name in found):
            return found
    return tensors


def _of_features(
    tensors: Mapping[str, StoredTensor], prefix: str, features: list[str]
) -> dict[str, np.ndarray]:
    """Return the statistics of features by their later names."""
    found: dict[str, np.ndarray] = {}
    for feature in features:
        start = f'{prefix}{feature.replace(".", "_")}.'
        for name, stored in tensors.items():
            if not name.startswith(start):
                continue
            try:
                values = read_array(stored)
            except TensorsError as error:
                raise ExportError(str(error)) from None
            if np.isinf(values).all():
                raise ExportError(
                    f"{stored.path}: tensor '{name}' is infinite: the policy was never trained on "
                    'a data set (a base model) and cannot drive a robot yet'
                )
            found[f'{feature}.{name.removeprefix(start)}'] = values
    return found
