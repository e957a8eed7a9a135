"""ACT."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from act_cases import load_act_case
from reference_cases import find
from safetensors.torch import load_file
from torch import Tensor

from family_contracts.declaration import (
    Case,
    FamilyContract,
    Fault,
    Folder,
    OtherTable,
    Patched,
    Recorded,
)
from family_contracts.robot import CAMERAS, IMAGE_SIZE, JOINTS, numbered
from vla_convert.checkpoints.options import ExportOptions
from vla_runtime.bundle.schema import ImageSpec
from vla_runtime.declarations.act import ActDims, StackDims
from vla_runtime.family.dimensions import ResNetDims
from vla_runtime.models import act as networks
from vla_runtime.models.act import map_positions
from vla_runtime.types import Observation


def tiny(horizon: int) -> ActDims:
    stack = {'width': 24, 'num_heads': 3, 'mlp_dim': 32}
    return ActDims(
        backbone=ResNetDims(stem=6, channels=(6, 8, 10, 12), blocks=(1, 2, 1, 1)),
        encoder=StackDims(depth=2, **stack),
        decoder=StackDims(depth=2, **stack),
        cameras=len(CAMERAS),
        images=(IMAGE_SIZE,),
        horizon=horizon,
        action_dim=len(JOINTS),
        state_dim=len(JOINTS),
    )


def case(path: Path, b: int) -> Case:
    found = load_act_case(path)
    of = found.tensors
    return Case(
        network=found.network,
        steps=1,
        pixels=found.pixels(b),
        image_mask=found.visible(),
        rows={'state': found.state(b)},
        actions=of['actions'][b],
        image_tokens=[of[f'camera_features_{i}'][b].flatten(1).T for i in found.cameras],
    )


_TINY = tiny(8)
_BOTTLENECKS = ResNetDims(6, (4, 4, 6, 8), (1, 2, 1, 2), bottleneck=True)
VARIANTS = {
    'basic blocks': _TINY,
    'norms first': replace(_TINY, pre_norm=True),
    'gelu': replace(_TINY, activation='gelu'),
    'environment': replace(_TINY, state_dim=5, environment_dim=2),
    'odd images of two sizes': replace(_TINY, images=((45, 67), (33, 100))),
    'four cameras of three sizes': replace(
        _TINY, cameras=4, images=((45, 67), (33, 100), (33, 100), (64, 32)), horizon=3
    ),
    'one camera': replace(_TINY, cameras=1, images=((50, 50),)),
    'bottlenecks': replace(_TINY, backbone=_BOTTLENECKS),
    'dilated': replace(_TINY, backbone=replace(_BOTTLENECKS, blocks=(1, 1, 1, 3), dilated=True)),
}


def positions(
    height: int, width: int, channels: int, device: Any, first: int = 0, pair: int = 2
) -> Tensor:
    """Positions of a map, its places counted from `first`, with a frequency for `pair` numbers."""
    half = channels // 2
    number = torch.arange(half, device=device)
    frequency = 10000.0 ** (-(number // pair).float() * pair / half)
    codes = []
    for count in (height, width):
        places = torch.arange(first, count + first, device=device).float()
        angles = places[:, None] / (count + 1e-6) * (2 * math.pi) * frequency
        codes.append(torch.where(number % 2 == 0, angles.sin(), angles.cos()))
    rows = codes[0][:, None].expand(height, width, half)
    return torch.cat([rows, codes[1][None].expand(height, width, half)], dim=-1).flatten(0, 1)


def columns_first(*size: Any) -> Tensor:
    rows, columns = map_positions(*size).chunk(2, dim=1)
    return torch.cat([columns, rows], dim=1)


def sines_before_cosines(*size: Any) -> Tensor:
    halves = map_positions(*size).chunk(2, dim=1)
    return torch.cat([part for half in halves for part in (half[:, 0::2], half[:, 1::2])], dim=1)


def column_by_column(height: int, width: int, channels: int, device: Any) -> Tensor:
    right = map_positions(height, width, channels, device)
    return right.view(height, width, channels).transpose(0, 1).reshape(-1, channels)


_EMBED = networks.Act.embed


def cameras_turned(self: networks.Act, tokens: Tensor, mask: Tensor, state: Tensor) -> Any:
    tokens, mask = (torch.cat([part[1:], part[:1]]) for part in (tokens, mask))
    return _EMBED(self, tokens, mask, state)


def faults() -> Mapping[str, Fault]:
    of_maps: dict[str, Any] = {
        'places counted from 0': positions,
        'columns before rows': columns_first,
        'sines before cosines': sines_before_cosines,
        'a frequency for each number': partial(positions, first=1, pair=1),
        'positions in half': lambda *size: map_positions(*size).bfloat16().float(),
        'places column by column': column_by_column,
    }
    found: dict[str, Fault] = {
        name: Patched(networks, 'map_positions', wrong, 'prefix.onnx', quick=number < 2)
        for number, (name, wrong) in enumerate(of_maps.items())
    }

    def half(table: Tensor) -> Tensor:
        return table.bfloat16().float()

    def rolled(table: Tensor) -> Tensor:
        return table.roll(1, 0)

    return found | {
        'vectors off by one': OtherTable('vector_positions', rolled, 'prefix.onnx'),
        'vectors in half': OtherTable('vector_positions', half, 'prefix.onnx'),
        'actions off by one': OtherTable('action_positions', rolled, 'expert.onnx'),
        'actions in half': OtherTable('action_positions', half, 'expert.onnx'),
        'no latent': OtherTable('latent', torch.zeros_like, 'prefix.onnx'),
        'cameras turned': Patched(networks.Act, 'embed', cameras_turned, 'prefix.onnx', quick=True),
    }


def folders() -> Mapping[str, Callable[[Path], Folder]]:
    return {
        path.name.removesuffix('.end_to_end.json'): partial(folder, path)
        for path in find('act_*.end_to_end.json')
    }


def folder(path: Path, target: Path) -> Folder:
    description, of = json.loads(path.read_text()), load_file(path.with_suffix('.safetensors'))
    return Folder(
        path=path.with_name(path.name.removesuffix('.end_to_end.json')),
        options=ExportOptions(
            state_names=numbered('state', len(of['state_0'])),
            action_names=numbered('action', of['chunk_0'].shape[1]),
            units=('1',),
            rate_hz=30.0,
        ),
        recorded=[
            Recorded(
                seen=Observation(
                    {name: of[f'{name}_{i}'].numpy() for name in description['cameras']},
                    of[f'state_{i}'].numpy(),
                    '',
                ),
                noise=None,
                normalised=of[f'chunk_normalised_{i}'],
                actions=of[f'chunk_{i}'],
                state=of.get(f'state_normalised_{i}'),
            )
            for i in range(description['observations'])
        ],
    )


def refused_stack(**changes: Any) -> Callable[[ActDims], ActDims]:
    return lambda dims: replace(dims, decoder=replace(dims.decoder, **changes))


CONTRACTS = (
    FamilyContract(
        family='act',
        tiny=tiny,
        case=case,
        images=ImageSpec('none', 'none'),
        images_normalised=True,
        norms_pass=True,
        parameters={'act': 34_234_958},
        variants=VARIANTS,
        refused={
            'images': lambda dims: replace(dims, images=((8, 8), (9, 9), (10, 10))),
            r'decoder\.width': refused_stack(width=28),
            'multiple of 4': lambda dims: replace(
                dims,
                encoder=replace(dims.encoder, width=30),
                decoder=replace(dims.decoder, width=30),
            ),
            'num_heads': refused_stack(num_heads=5),
            'state_dim': lambda dims: replace(dims, environment_dim=3),
            'dilated': lambda dims: replace(dims, backbone=replace(dims.backbone, dilated=True)),
        },
        faults=faults,
        folders=folders,
    ),
)
