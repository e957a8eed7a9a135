"""SmolVLA."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from reference_cases import find
from safetensors.torch import load_file
from smolvla_cases import load_smolvla_case
from torch import Tensor

from family_contracts.declaration import (
    Case,
    FamilyContract,
    Fault,
    Folder,
    InGraph,
    Patched,
    Recorded,
    Tied,
    Training,
)
from family_contracts.robot import CAMERAS, numbered
from vla_convert.checkpoints.options import ExportOptions
from vla_runtime.bundle.schema import BundleSpec
from vla_runtime.declarations.smolvla import SmolVlaDims
from vla_runtime.family.dimensions import DecoderDims, VisionDims
from vla_runtime.models import smolvla as networks
from vla_runtime.models.base import expert_network
from vla_runtime.models.blocks.attention import Rotary, rotary
from vla_runtime.models.blocks.expert import Expert
from vla_runtime.models.smolvla import SmolVlmVision, position_rows
from vla_runtime.types import Observation


def tiny(horizon: int) -> SmolVlaDims:
    language = DecoderDims(width=40, depth=3, mlp_dim=48, num_heads=6, num_kv_heads=2, head_dim=8)
    return SmolVlaDims(
        vision=VisionDims(width=24, depth=1, num_heads=2, mlp_dim=32, patch_size=7, image_size=28),
        pixel_shuffle=2,
        language=language,
        expert=replace(language, width=28, mlp_dim=36),
        self_attention_every=2,
        vocabulary=360,
        cameras=len(CAMERAS),
        prompt_length=64,
        horizon=horizon,
        action_dim=6,
        state_dim=5,
    )


def case(path: Path, b: int) -> Case:
    found = load_smolvla_case(path)
    of, network = found.tensors, found.network
    pixels, image_mask = found.images(b)
    valid, own = of['prefix_valid'][b], list(network.dims.self_layers)
    # What cross layers read is projected from these by the expert, and not recorded.
    past = {
        ours: of[theirs][own][:, b : b + 1][..., valid, :]
        for ours, theirs in (('self_key', 'prefix_keys'), ('self_value', 'prefix_values'))
        if own
    }
    return Case(
        network=network,
        steps=found.steps,
        pixels=pixels,
        image_mask=image_mask,
        rows=found.rows(b),
        noise=of['noise'][b],
        actions=of['actions'][b],
        velocities=of['v_t'][:, b],
        image_tokens=[of[f'image_features_{i}'][b] for i in range(len(pixels))],
        past=past,
        tied={
            schedule: Tied(of['rtc_previous_chunk'][b], of[f'rtc_actions_{schedule}'][b])
            for schedule in ('linear', 'exp')
            if f'rtc_actions_{schedule}' in of
        },
        training=Training(
            x=of['joint_x_t'][b : b + 1],
            conditioning=network.time_conditioning(of['joint_t'][b : b + 1]),
            target=of['joint_u_t'][b],
            squared_error=of['joint_sq_err'][b],
        ),
    )


def past(dims: SmolVlaDims) -> Mapping[str, tuple[int, ...]]:
    shape = (1, dims.language.num_kv_heads, dims.prefix_length, dims.language.head_dim)
    layers = {'self': len(dims.self_layers), 'cross': len(dims.cross_layers)}
    return {'prefix_mask': (1, dims.prefix_length)} | {
        f'{kind}_{part}': (count, *shape)
        for kind, count in layers.items()
        for part in ('key', 'value')
        if count
    }


# Patches a side, with which the bucket rule of patch positions uses a row twice.
SIDE = 25


def of_side(spec: BundleSpec) -> BundleSpec:
    eyes = replace(spec.dims.vision, patch_size=2, image_size=2 * SIDE)
    return replace(spec, dims=replace(spec.dims, vision=eyes, pixel_shuffle=5))


def in_half(side: int) -> list[int]:
    step = np.float16(1) / np.float16(side)
    bounds = np.arange(1, side, dtype=np.float16) * step
    places = np.arange(side, dtype=np.float16) * step
    return [int(row) for row in np.searchsorted(bounds, places, side='right')]


def rounded_up(side: int) -> list[int]:
    """A place on a bound counted to the bucket before it."""
    bounds = torch.arange(1 / side, 1.0, 1 / side, device='cpu').numpy()
    places = np.arange(side, dtype=np.float32) * (np.float32(1) / np.float32(side))
    return [int(row) for row in np.searchsorted(bounds, places, side='left')]


def bounds_rounded_once(side: int) -> list[int]:
    """Bounds as numpy's arange gives them, not as torch's."""
    step = np.float32(1) / np.float32(side)
    bounds = np.arange(step, 1, step, dtype=np.float32)
    places = np.arange(side, dtype=np.float32) * step
    found = np.searchsorted(bounds, places, side='right')
    return [int(row) for row in np.minimum(found, side - 1)]


def off_by_one(side: int) -> list[int]:
    return [min(row + 1, side - 1) for row in position_rows(side)]


def shuffled(*order: int) -> Callable[[SmolVlmVision, Tensor], Tensor]:
    def wrong(self: SmolVlmVision, patches: Tensor) -> Tensor:
        n, _, width = patches.shape
        edge, few = self.edge, self.side // self.edge
        cut = patches.view(n, few, edge, few, edge, width).permute(0, *order)
        return self.projector(cut.reshape(n, few * few, edge * edge * width)).float()

    return wrong


def in_the_prefix(change: Callable[[Tensor], Tensor]) -> Callable[..., Rotary]:
    """Rotary from changed positions, in the prefix alone."""

    def wrong(positions: Tensor, head_dim: int) -> Rotary:
        long = positions.shape[1] > tiny(8).horizon
        return rotary(change(positions) if long else positions, head_dim)

    return wrong


def rotations(start: Callable[[Tensor], Tensor], cross: Callable[[Tensor], Tensor]) -> object:
    """Rotary of the actions: where self layers start, and where cross layers do; (R, 1) each."""

    def wrong(self: Expert, positions: Tensor, *, is_cross: bool = False) -> Rotary:
        mask, first = self._mask, cross if is_cross else start
        steps = torch.arange(positions.shape[1], device=mask.device)
        return rotary(first(mask) + steps, self._blocks[0].attention.head_dim)

    return wrong


def valid(mask: Tensor) -> Tensor:
    return mask.long().sum(dim=1, keepdim=True)


def zero(mask: Tensor) -> Tensor:
    return valid(mask) * 0


def faults() -> Mapping[str, Fault]:
    rows: dict[str, Callable[[int], list[int]]] = {
        'rows of the position table without rounding': lambda side: list(range(side)),
        'rows in half': in_half,
        'rows rounded up': rounded_up,
        'bounds of rows rounded once': bounds_rounded_once,
        'rows off by one': off_by_one,
    }
    orders = {
        'squares column by column': (3, 1, 2, 4, 5),
        'patches of a square column by column': (1, 3, 4, 2, 5),
        'channels first': (1, 3, 5, 2, 4),
        'patches row by row': (1, 2, 3, 4, 5),
    }
    positions: dict[str, Callable[[Tensor], Tensor]] = {
        'positions cumsum without -1': lambda p: p + 1,
        'positions that count hidden tokens': lambda p: torch.ones_like(p).cumsum(dim=1) - 1,
        'positions backwards': lambda p: -p,
        'positions in half': lambda p: (p * 5).bfloat16() / 5,
    }
    actions: dict[str, Any] = {
        'self layers on the last position of the prefix': (lambda mask: valid(mask) - 1, zero),
        'self layers behind hidden tokens': (lambda mask: zero(mask) + mask.shape[1], zero),
        'self layers from 0': (zero, zero),
        'cross layers from 1': (valid, lambda mask: zero(mask) + 1),
        'cross layers from the prefix on': (valid, valid),
    }
    quick = {
        *('rows of the position table without rounding', 'rows in half', 'channels first'),
        *('positions cumsum without -1', 'positions that count hidden tokens'),
        *('self layers on the last position of the prefix', 'self layers behind hidden tokens'),
    }

    def patched(name: str, owner: Any, attribute: str, wrong: Any, file: Any) -> dict[str, Fault]:
        return {name: Patched(owner, attribute, wrong, file, quick=name in quick)}

    found: dict[str, Fault] = {}
    for name, rule in rows.items():
        found |= patched(name, networks, 'position_rows', rule, 'vision.onnx')
    for name, order in orders.items():
        found |= patched(name, SmolVlmVision, 'project', shuffled(*order), 'vision.onnx')
    for name, change in positions.items():
        found |= patched(name, expert_network, 'rotary', in_the_prefix(change), 'prefix.onnx')
    for name, (start, cross) in actions.items():
        found |= patched(name, Expert, 'rotary', rotations(start, cross), 'expert.onnx')
    tables = ('rotary_angles_rounded', 'rotary_cosines_rounded', 'positions_to_half')
    for graph, plants in (('prefix', (*tables, 'position_in_half')), ('expert', tables)):
        found |= {f'{plant} in {graph}': InGraph(f'{graph}.onnx', plant) for plant in plants}
    return found


def folders() -> Mapping[str, Callable[[Path], Folder]]:
    return {
        path.name.removesuffix('.end_to_end.json'): partial(folder, path)
        for path in find('smolvla_*.end_to_end.json')
    }


def folder(path: Path, target: Path) -> Folder:
    description, of = json.loads(path.read_text()), load_file(path.with_suffix('.safetensors'))
    return Folder(
        path=path.with_name(path.name.removesuffix('.end_to_end.json')),
        options=ExportOptions(
            state_names=numbered('state', len(of['state_0'])),
            action_names=numbered('action', of['chunk_0'].shape[1]),
            units=('deg',),
            rate_hz=30.0,
            vision_heads=description['dims']['v_heads'],
            kv_heads=description['dims']['num_kv_heads'],
        ),
        recorded=[
            Recorded(
                seen=Observation(
                    {name: of[f'{name}_{i}'].numpy() for name in description['cameras']},
                    of[f'state_{i}'].numpy(),
                    entry['task'],
                ),
                noise=of['noise'][0].numpy(),
                normalised=of[f'chunk_normalised_{i}'],
                actions=of[f'chunk_{i}'],
                tokens=of[f'tokens_{i}'][of[f'token_mask_{i}']],
                state=of[f'state_normalised_{i}'],
            )
            for i, entry in enumerate(description['observations'])
        ],
    )


CONTRACTS = (
    FamilyContract(
        family='smolvla',
        tiny=tiny,
        case=case,
        template='task_line',
        tokenizer='smolvla_folder/tokenizer.json',
        parameters={'smolvla': 402_737_376},
        past=past,
        variants={
            f'{every} layers to one that attends to itself': replace(
                tiny(8), self_attention_every=every
            )
            for every in (0, 1, 2, 3)
        },
        refused={
            'pixel_shuffle': lambda dims: replace(dims, pixel_shuffle=3),
            r'expert\.depth': lambda dims: replace(dims, expert=replace(dims.expert, depth=2)),
        },
        faults=faults,
        fault_spec=of_side,
        folders=folders,
    ),
)
