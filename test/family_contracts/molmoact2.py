"""MolmoAct2."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from molmoact2_cases import load_molmoact2_case
from reference_cases import find
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from family_contracts.declaration import (
    Case,
    FamilyContract,
    Fault,
    Folder,
    OtherDims,
    Patched,
    Recorded,
    Tied,
)
from family_contracts.robot import CAMERAS, JOINTS, numbered, places_of
from vla_convert.checkpoints.options import ExportOptions
from vla_runtime.bundle.schema import ImageSpec
from vla_runtime.declarations.molmoact2 import (
    ActionExpertDims,
    ImageIds,
    LanguageDims,
    MolmoAct2Dims,
    PoolingDims,
    TowerDims,
)
from vla_runtime.models import molmoact2 as networks
from vla_runtime.models.blocks.attention import attend, rotary
from vla_runtime.models.molmoact2 import ActionExpert, ExpertBlock, MolmoAct2, MolmoVision
from vla_runtime.types import Observation

TOKENIZER = 'molmoact2_a.tokenizer.json'


def tiny(horizon: int) -> MolmoAct2Dims:
    places = places_of('molmoact2', TOKENIZER)
    return MolmoAct2Dims(
        vision=TowerDims(
            width=24,
            depth=3,
            num_heads=3,
            num_kv_heads=3,
            head_dim=8,
            mlp_dim=40,
            patch_size=7,
            positions=4,
            image_size=21,
            layers=(3, 1),
        ),
        pooling=PoolingDims(
            width=20, num_heads=2, num_kv_heads=2, head_dim=6, mlp_dim=32, window=(2, 2)
        ),
        language=LanguageDims(
            width=40, depth=2, mlp_dim=48, num_heads=4, num_kv_heads=2, head_dim=8
        ),
        expert=ActionExpertDims(width=32, depth=2, num_heads=4, mlp_dim=40, time_width=20),
        vocabulary=380,
        cameras=len(CAMERAS),
        image_places=places,
        image_ids=ImageIds(patch=366, start=364, end=365, column=367, low_start=368),
        prompt_length=places[-1] + 320,
        horizon=horizon,
        action_dim=6,
        real_actions=len(JOINTS),
        hides_first=True,
        hidden_end=4,
    )


_TINY = tiny(8)
VARIANTS = {
    'tiles, a token behind each row': replace(
        _TINY,
        tilings=((1, 2), (2, 1)),
        most_tiles=3,
        margins=(1, 1),
        low_columns=True,
        vision=replace(_TINY.vision, image_size=28, num_kv_heads=1),
    ),
    'olmo norms behind, biases, unmasked windows': replace(
        _TINY,
        pooling=replace(_TINY.pooling, masked=False, window=(2, 3), num_kv_heads=1),
        language=replace(_TINY.language, head_norm='together', norm_after=True, bias=True),
        expert=replace(_TINY.expert, context_norm=False),
        hides_first=False,
        hidden_end=0,
    ),
    'no norms of heads': replace(
        _TINY,
        language=replace(_TINY.language, head_norm='none'),
        expert=replace(_TINY.expert, head_norm=False),
        columns=False,
    ),
}


def past(dims: MolmoAct2Dims) -> Mapping[str, tuple[int, ...]]:
    expert = dims.expert
    head = expert.width // expert.num_heads
    layers = (expert.depth, 1, expert.num_heads, dims.prefix_length, head)
    return {'cross_key': layers, 'cross_value': layers, 'prefix_mask': (1, dims.prefix_length)}


def case(path: Path, b: int) -> Case:
    found = load_molmoact2_case(path, b)
    of, network = found.tensors, found.network
    noise = found.of('noise').clone()
    noise[:, network.dims.real_actions :] = 0.0
    real = network.dims.real_actions
    alone = 'actions_normalised_rows_alone' in of
    actions = torch.zeros_like(noise)
    actions[:, :real] = found.of('actions_normalised_rows_alone' if alone else 'actions_normalised')
    # Padding in front moves the positions that the expert sees.
    unmoved = not found.first
    shown = found.first + torch.nonzero(found.of('context_mask')[found.first :])[:, 0]
    cross = {
        ours: of[theirs][:, b : b + 1, shown].transpose(2, 3)
        for ours, theirs in (('cross_key', 'cross_keys'), ('cross_value', 'cross_values'))
    }
    tied = {}
    for schedule in ('linear', 'exp'):
        if f'rtc_actions_{schedule}' in of and unmoved:
            tied_actions = torch.zeros_like(noise)
            tied_actions[:, :real] = found.of(f'rtc_actions_{schedule}')
            tied[schedule] = Tied(found.of('rtc_previous_chunk'), tied_actions, overlap=5)
    return Case(
        network=network,
        steps=found.steps,
        pixels=found.pixels(),
        image_mask=torch.ones(network.dims.cameras, dtype=torch.bool),
        rows=found.rows(),
        noise=noise,
        actions=actions,
        velocities=-of['v_t'][:, b] if unmoved else None,
        past=cross if unmoved else {},
        tied=tied,
    )


_EMBED, _MASK, _TIME = (
    MolmoAct2.embed_prefix,
    MolmoAct2.attention_mask,
    ActionExpert.time_conditioning,
)
_IMAGE, _MODULATED = MolmoAct2.image, ExpertBlock.modulated


def layers_turned(self: MolmoVision, crops: Tensor) -> Tensor:
    x, found = self.patch_embedding(crops) + self.positions(), {}
    for index, block in enumerate(self.blocks, start=1):
        found[index] = x = block(x)
    return torch.cat([found[layer] for layer in sorted(self.dims.vision.layers)], dim=2)


def nearest_positions(self: MolmoVision) -> Tensor:
    grid, edge = self.dims.vision.grid, self.dims.vision.positions
    table = self.position_embedding.view(edge, edge, -1)
    return table[:grid, :grid].flatten(0, 1)


def channels_first(self: networks.PatchLayer, pixels: Tensor) -> Tensor:
    n, channels, high, wide = pixels.shape
    rows, columns = high // self.size, wide // self.size
    patches = pixels.view(n, channels, rows, self.size, columns, self.size)
    patches = patches.permute(0, 2, 4, 1, 3, 5).reshape(n, rows * columns, -1)
    return F.linear(patches, self.weight, self.bias)


def replacing(self: MolmoAct2, camera: int, features: Tensor) -> Tensor:
    return _IMAGE(self, camera, features - self.mark(self.dims.image_ids.patch))


def causal_alone(self: MolmoAct2, mask: Tensor) -> Tensor:
    size, options = mask.shape[1], {'dtype': torch.bool, 'device': mask.device}
    causal = torch.ones(size, size, **options).tril()
    return torch.logical_and(mask[:, None], causal) | torch.eye(size, **options)


def unrotated(positions: Tensor, size: int, base: float = 1e4) -> Any:
    return rotary(positions if base == 1e4 else positions * 0, size, base)


def cameras_turned(self: MolmoAct2, images: Tensor, mask: Tensor, *text: Tensor) -> Any:
    return _EMBED(self, images.flip(0), mask.flip(0), *text)


def hidden_camera_seen(self: MolmoAct2, images: Tensor, mask: Tensor, *text: Tensor) -> Any:
    return _EMBED(self, images, torch.ones_like(mask), *text)


def scale_first(self: ExpertBlock, x: Tensor, rotation: Any, memory: Any, rows: Tensor) -> Tensor:
    parts = list(rows.chunk(9, dim=-1))
    for n in range(0, 9, 3):
        parts[n], parts[n + 1] = parts[n + 1], parts[n]
    return _MODULATED(self, x, rotation, memory, torch.cat(parts, dim=-1))


def rotated_queries(
    self: ExpertBlock, x: Tensor, rotation: Any, memory: Any, rows: Tensor
) -> Tensor:
    turned = tuple(-part if index else part for index, part in enumerate(rotation))
    return _MODULATED(self, x, turned, memory, rows)


def hidden_actions(
    self: networks.ExpertAttention, q: Tensor, k: Tensor, v: Tensor, seen: Any
) -> Any:
    if seen is None:
        seen = torch.ones(1, q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
    return attend(q * self.head_dim**-0.5, k, v, seen, scaled=True)


def faults() -> Mapping[str, Fault]:
    planted: dict[str, dict[str, Any]] = {
        'vision.onnx': {
            'layers in ascending order': (MolmoVision, 'features', layers_turned),
            'a corner of the positions': (MolmoVision, 'positions', nearest_positions),
            'channels of a patch first': (networks.PatchLayer, 'forward', channels_first),
        },
        'prefix.onnx': {
            'features in place of the token': (MolmoAct2, 'image', replacing),
            'images causal too': (MolmoAct2, 'attention_mask', causal_alone),
            'keys that are not rotated': (networks, 'rotary', unrotated),
            'cameras turned': (MolmoAct2, 'embed_prefix', cameras_turned),
            'a hidden camera seen': (MolmoAct2, 'embed_prefix', hidden_camera_seen),
        },
        'expert.onnx': {
            'scale before shift': (ExpertBlock, 'modulated', scale_first),
            'rotation the other way': (ExpertBlock, 'modulated', rotated_queries),
            'actions that hide later ones': (networks.ExpertAttention, 'scaled', hidden_actions),
        },
        'time table': {
            'time of the other direction': (
                ActionExpert,
                'time_conditioning',
                lambda self, times: _TIME(self, 1.0 - times),
            ),
            'time in thousands': (
                ActionExpert,
                'time_conditioning',
                lambda self, times: _TIME(self, 1.0 - (1.0 - times) * 1000.0),
            ),
        },
    }
    found: dict[str, Fault] = {
        name: Patched(*of, file, quick=number == 0)  # type: ignore[arg-type]
        for file, of_file in planted.items()
        for number, (name, of) in enumerate(of_file.items())
    }
    return found | {
        'the end of a sentence seen': OtherDims(
            lambda dims: replace(dims, hidden_end=0), 'prefix.onnx'
        ),
        'the first token seen': OtherDims(
            lambda dims: replace(dims, hides_first=False), 'prefix.onnx'
        ),
        'images off by one': OtherDims(
            lambda dims: replace(
                dims, image_places=tuple(place + 1 for place in dims.image_places)
            ),
            'prefix.onnx',
        ),
    }


def folders() -> Mapping[str, Callable[[Path], Folder]]:
    return {
        path.name.removesuffix('.end_to_end.json'): partial(folder, path)
        for path in find('molmoact2_*.end_to_end.json')
    }


def options_of(path: Path) -> ExportOptions:
    """What completes the folder of a case: names, units and rate."""
    of = load_file(path.with_suffix('.safetensors'))
    return ExportOptions(
        state_names=numbered('state', len(of['state_0'])),
        action_names=numbered('action', of['chunk_0'].shape[1]),
        units=('deg',),
        rate_hz=30.0,
    )


def copied(path: Path, target: Path) -> Path:
    """The folder of a case with that of its model beside it, below a path."""
    description = json.loads(path.read_text())
    own = path.name.removesuffix('.end_to_end.json')
    for name in (own, description['base']):
        shutil.copytree(path.with_name(name), target / name, copy_function=shutil.copyfile)
    return target / own


def folder(path: Path, target: Path) -> Folder:
    description, of = json.loads(path.read_text()), load_file(path.with_suffix('.safetensors'))
    recorded = [
        Recorded(
            seen=Observation(
                {name: of[f'{name}_{i}'].numpy() for name in description['cameras']},
                of[f'state_{i}'].numpy(),
                entry['task'],
            ),
            noise=of['noise'][0].numpy(),
            normalised=of[f'chunk_normalised_{i}'],
            actions=of[f'chunk_{i}'],
            tokens=of[f'tokens_{i}'][of[f'token_types_{i}'] == 0],
            state=of[f'state_normalised_{i}'],
        )
        for i, entry in enumerate(description['observations'])
    ]
    return Folder(copied(path, target), options_of(path), recorded)


CONTRACTS = (
    FamilyContract(
        family='molmoact2',
        tiny=tiny,
        case=case,
        template='setup_and_state',
        tokenizer=TOKENIZER,
        images=ImageSpec('stretch', 'bilinear_points'),
        norms_pass=True,
        parameters={'molmoact2': 5_039_474_928},
        past=past,
        variants=VARIANTS,
        refused={
            'image_places': lambda dims: replace(dims, image_places=dims.image_places[:-1]),
            'image_places begins': lambda dims: replace(
                dims, image_places=(0, *dims.image_places[1:])
            ),
            'vision.image_size': lambda dims: replace(
                dims, vision=replace(dims.vision, image_size=22)
            ),
            'vision.num_heads': lambda dims: replace(
                dims, vision=replace(dims.vision, num_kv_heads=2)
            ),
            'vision.layers': lambda dims: replace(dims, vision=replace(dims.vision, layers=(4,))),
            'pooling.window': lambda dims: replace(
                dims, pooling=replace(dims.pooling, window=(0, 2))
            ),
            'pooling.num_heads': lambda dims: replace(
                dims, pooling=replace(dims.pooling, num_kv_heads=3)
            ),
            'expert|num_heads': lambda dims: replace(
                dims, expert=replace(dims.expert, num_heads=5)
            ),
            'expert.time_width': lambda dims: replace(
                dims, expert=replace(dims.expert, time_width=7)
            ),
            'expert.depth': lambda dims: replace(dims, expert=replace(dims.expert, depth=3)),
            'real_actions': lambda dims: replace(dims, real_actions=0),
            'tilings': lambda dims: replace(dims, tilings=((1, 1),), margins=(1, 1)),
            'margins': lambda dims: replace(dims, tilings=((1, 1), (1, 1)), margins=(0, 1)),
        },
        faults=faults,
        folders=folders,
    ),
)
