"""OpenVLA-OFT policies made of OpenVLA's cases, their expected numbers, and their folders.

Towers, projector and language model are those of a case, so the reference's own features hold for
them; state projection and action head are drawn. What OFT makes of them is in a file beside the
case (test/cases/README.md).
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from openvla_cases import OpenVlaCase, load_openvla_case
from openvla_folders import write_folder
from safetensors.torch import load_file
from torch import Tensor

from vla_convert.checkpoints.options import ExportOptions
from vla_convert.readers.openvla import NAMES, without_last_blocks
from vla_runtime.bundle.schema import CameraSpec
from vla_runtime.declarations.openvla import BackboneDims, OpenVlaOftDims
from vla_runtime.models.base.flow_network import build_network
from vla_runtime.models.openvla import OpenVlaOft
from vla_runtime.types import Observation

HEADS = ('action_head', 'proprio_projector')
STATE = ('x', 'y', 'z', 'rx', 'ry', 'rz', 'left', 'right')
ACTIONS = ('dx', 'dy', 'dz', 'drx', 'dry', 'drz', 'grip')
DATA_SET = 'libero_spatial_no_noops'
CAMERAS = ('image', 'wrist_image')
CHUNK = 8


def description_of(path: Path, **changes: Any) -> dict[str, Any]:
    """Description of a case, with what OFT adds."""
    d = json.loads(path.read_text())
    return {**d, 'chunk': CHUNK, 'state_dim': len(STATE), 'cameras': len(CAMERAS), **changes}


def head_weights(d: Mapping[str, Any]) -> dict[str, Tensor]:
    """Weights of state projection and action head, as the training's files have them."""
    generator = torch.Generator().manual_seed(d['seed'])
    width, inputs = d['width'], d['action_dim'] * d['width']

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    def linear(at: str, outputs: int, inputs: int) -> dict[str, Tensor]:
        return {
            f'{at}.weight': draw(outputs, inputs) * inputs**-0.5,
            f'{at}.bias': draw(outputs) * 0.2,
        }

    def norm(at: str, width: int) -> dict[str, Tensor]:
        return {f'{at}.weight': 1 + draw(width) * 0.2, f'{at}.bias': draw(width) * 0.2}

    head = 'action_head.model'
    weights = {
        **linear('proprio_projector.fc1', width, d['state_dim']),
        **linear('proprio_projector.fc2', width, width),
        **norm(f'{head}.layer_norm1', inputs),
        **linear(f'{head}.fc1', width, inputs),
        **norm(f'{head}.layer_norm2', width),
        **linear(f'{head}.fc2', d['action_dim'], width),
    }
    for block in range(2):
        here = f'{head}.mlp_resnet_blocks.{block}.ffn'
        weights |= norm(f'{here}.0', width) | linear(f'{here}.1', width, width)
    return weights


@dataclass(frozen=True)
class OftCase:
    """A policy made of a case, with our network.

    Attributes:
        description: of `description_of`.
    """

    of: OpenVlaCase
    description: Mapping[str, Any]
    network: OpenVlaOft

    @property
    def requests(self) -> range:
        return self.of.requests

    def pixels(self, request: int) -> Tensor:
        """(V, 3, S, S) in [-1, 1]: the case's image, and those of the next requests."""
        return torch.cat([self.of.pixels(number) for number in self.numbers(request)])

    def numbers(self, request: int) -> list[int]:
        """Requests of the case whose images the cameras see."""
        count = self.description['cameras']
        return [(request + camera) % len(self.requests) for camera in range(count)]

    def state(self, request: int) -> Tensor:
        """(1, S), normalised."""
        generator = torch.Generator().manual_seed(request)
        return torch.rand(1, self.description['state_dim'], generator=generator) * 2 - 1

    def rows(self, request: int) -> dict[str, Tensor]:
        tokens, mask = self.of.prompt(request)
        return {'tokens': tokens, 'token_mask': mask, 'state': self.state(request)}


@lru_cache(maxsize=4)
def load_oft_case(path: Path) -> OftCase:
    d = description_of(path)
    of = load_openvla_case(path)
    backbone = {name: getattr(of.network.dims, name) for name in BackboneDims.__dataclass_fields__}
    dims = OpenVlaOftDims(
        **{**backbone, 'cameras': d['cameras'], 'action_dim': d['action_dim']},
        horizon=d['chunk'],
        state_dim=d['state_dim'],
        head_width=d['width'],
    )
    network = build_network('openvla_oft', dims).eval().requires_grad_(False)
    assert isinstance(network, OpenVlaOft)
    published = load_file(path.with_suffix('.weights.safetensors')) | head_weights(d)
    ours: dict[str, Tensor] = {}
    for theirs, tensor in published.items():
        if not NAMES.is_unused(theirs):
            names = NAMES.parts(theirs)
            ours |= dict(zip(names, tensor.chunk(len(names)), strict=True))
    del ours['token_head.weight']
    network.load_state_dict({name: ours[name] for name in without_last_blocks(set(ours))})
    return OftCase(of, d, network)


def expected_path(path: Path) -> Path:
    """File with the numbers of OFT that belong to a case of OpenVLA."""
    return path.with_name(f'{path.stem.replace("full", "oft")}.expected.safetensors')


@lru_cache(maxsize=4)
def expected(path: Path) -> Mapping[str, Tensor]:
    return load_file(expected_path(path))


def statistics_of(d: Mapping[str, Any]) -> dict[str, Any]:
    """One data set's statistics, as OFT's training writes them; min and max are others."""
    random, count = np.random.default_rng(d['seed']), d['state_dim']
    low, high = random.uniform(-1, -0.2, count), random.uniform(0.2, 1, count)
    # Some numbers of a state never change in a data set.
    high[-1] = low[-1]
    own = d['norm_stats']['set_one']
    action = {key: (list(values) * 2)[: d['action_dim']] for key, values in own.items()}
    groups = {'action': action, 'proprio': {'q01': low.tolist(), 'q99': high.tolist()}}
    for numbers in groups.values():
        numbers['min'] = [value - 0.1 for value in numbers['q01']]
        numbers['max'] = [value + 0.2 for value in numbers['q99']]
        numbers['mean'], numbers['std'] = numbers['q01'], numbers['q99']
    return {**groups, 'num_transitions': 1000, 'num_trajectories': 10}


def write_oft_folder(
    target: Path,
    path: Path,
    d: Mapping[str, Any] | None = None,
    data_set: str = DATA_SET,
    *,
    parallel: bool = True,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Write a folder as published: OpenVLA's shards, heads, statistics, and the merged adapter.

    Args:
        target: the folder.
        path: path of OpenVLA's case.
        d: of `description_of`.
        data_set: name of the data set.
        parallel: the heads were trained with DistributedDataParallel.
        dtype: dtype of the heads.
    """
    write_folder(target, path)
    d = description_of(path) if d is None else d
    write_heads(target, head_weights(d), parallel, dtype)
    (target / 'dataset_statistics.json').write_text(json.dumps({data_set: statistics_of(d)}))
    (target / 'lora_adapter').mkdir()
    (target / 'lora_adapter' / 'adapter_config.json').write_text('{"peft_type": "LORA"}')
    return target


def write_heads(
    folder: Path,
    weights: Mapping[str, Tensor],
    parallel: bool = True,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Write the files of the parts that were trained beside the language model."""
    wrapped = 'module.' if parallel else ''
    for head in HEADS:
        state = OrderedDict(
            (f'{wrapped}{name.removeprefix(f"{head}.")}', tensor.to(dtype))
            for name, tensor in weights.items()
            if name.startswith(f'{head}.')
        )
        torch.save(state, folder / f'{head}--150000_checkpoint.pt')


def oft_options(path: Path, d: Mapping[str, Any] | None = None, **further: Any) -> ExportOptions:
    """What the folder of a case does not say."""
    d = description_of(path) if d is None else d
    given = {
        'state_names': STATE + tuple(f's{i}' for i in range(len(STATE), d['state_dim'])),
        'action_names': ACTIONS + tuple(f'a{i}' for i in range(len(ACTIONS), d['action_dim'])),
        'units': ('1',),
        'rate_hz': 20.0,
        'deltas': (),
        'heads': {'dino': d['dino_heads'], 'siglip': d['siglip_heads']},
        'horizon': d['chunk'],
        'cameras': tuple(CameraSpec(name) for name in cameras_of(d)),
    }
    return ExportOptions(**{**given, **further})


def cameras_of(d: Mapping[str, Any]) -> list[str]:
    return [f'camera_{number}' for number in range(d['cameras'])]


def observed(path: Path, d: Mapping[str, Any], request: int, form: str = '') -> Observation:
    """A raw observation; some numbers of its state lie beyond the statistics."""
    random = np.random.default_rng(request)
    sizes = [(112, 112), (96, 128), (150, 90)]
    images = {}
    for camera, name in enumerate(cameras_of(d)):
        size = sizes[(request + camera) % len(sizes)]
        # Earlier draws have levels that hang on the last bits of float32.
        for _ in range(int(expected(path)[f'{form}draws_{request}'][camera])):
            images[name] = random.integers(40, 216, (*size, 3), dtype=np.uint8)
    return Observation(
        images=images,
        state=random.uniform(-1.5, 1.5, d['state_dim']).astype(np.float32),
        instruction=d['instructions'][request],
    )
