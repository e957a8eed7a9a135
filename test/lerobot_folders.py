"""Writes a policy's folder as LeRobot saves it, of any family."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

# Name and settings of each step of a processor.
Steps = Sequence[tuple[str, Mapping[str, Any]]]
DEVICE = ('device_processor', {'device': 'cpu'})
RECEIVE: Steps = (
    ('rename_observations_processor', {'rename_map': {}}),
    ('to_batch_processor', {}),
)


def write_lerobot(
    folder: Path,
    tensors: Mapping[str, Tensor],
    config: Mapping[str, Any],
    before: Steps,
    after: Steps,
    statistics: Mapping[str, Tensor],
) -> Path:
    """Write weights, config.json and both processors.

    Args:
        folder: folder that appears.
        tensors: weights, by their names in the file.
        config: config.json.
        before, after: steps behind `RECEIVE`, and in front of `DEVICE`, of the two processors.
        statistics: what each step that normalises has in a file of its own.
    """
    folder.mkdir(parents=True)
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / 'model.safetensors')
    _write(folder / 'config.json', config)
    pipelines = {'preprocessor': (*RECEIVE, *before, DEVICE), 'postprocessor': (*after, DEVICE)}
    for pipeline, steps in pipelines.items():
        written = []
        for number, (name, settings) in enumerate(steps):
            step = {'registry_name': name, 'config': settings}
            if 'normal' in name or name == 'groot_pack_inputs_v3':
                step['state_file'] = f'policy_{pipeline}_step_{number}_{name}.safetensors'
                save_file(dict(statistics), folder / step['state_file'])
            written.append(step)
        document = {'name': f'policy_{pipeline}', 'steps': written}
        _write(folder / f'policy_{pipeline}.json', document)
    return folder


def numbers_of(statistics: Mapping[str, Mapping[str, Any]]) -> dict[str, Tensor]:
    """Statistics by feature and name as a file has them, those of images by channel."""
    return {
        f'{feature}.{name}': torch.tensor(values).view(-1, 1, 1)
        if 'images' in feature
        else torch.tensor(values)
        for feature, numbers in statistics.items()
        for name, values in numbers.items()
    }


def _write(path: Path, document: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=2))
