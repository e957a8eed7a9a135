"""pi0 and pi0.5."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from checkpoint_folders import end_to_end_cases, folder_of
from network_cases import load_network_case
from safetensors.torch import load_file
from torch import Tensor

from family_contracts.declaration import (
    Case,
    FamilyContract,
    Fault,
    Folder,
    Patched,
    Recorded,
    Tied,
    Training,
)
from family_contracts.robot import CAMERAS
from vla_convert.checkpoints.options import ExportOptions
from vla_runtime.declarations.pi import PiDims
from vla_runtime.family.dimensions import DecoderDims, VisionDims
from vla_runtime.models.base import expert_network
from vla_runtime.models.blocks.attention import rotary
from vla_runtime.types import Observation


def tiny(family: str, horizon: int) -> PiDims:
    language = DecoderDims(width=32, depth=2, mlp_dim=48, num_heads=4, num_kv_heads=1, head_dim=8)
    return PiDims(
        vision=VisionDims(width=24, depth=1, num_heads=2, mlp_dim=32, patch_size=14, image_size=28),
        language=language,
        expert=replace(language, width=16, mlp_dim=32),
        vocabulary=400,
        cameras=len(CAMERAS),
        prompt_length=64,
        horizon=horizon,
        action_dim=6,
        state_dim=6 if family == 'pi0' else 0,
    )


def case(path: Path, b: int) -> Case:
    found = load_network_case(path)
    pixels, image_mask = found.images(b)
    tokens, token_mask = found.prompt(b)
    of = found.tensors
    rows = {'tokens': tokens[None], 'token_mask': token_mask[None]}
    _, mask = found.network.embed_prefix(
        found.network.vision(pixels)[None], image_mask[None], *rows.values()
    )
    # The reference computes something at hidden places too, which nothing reads.
    past = {
        ours: of[theirs][:, b : b + 1][..., mask[0], :]
        for ours, theirs in (('past_key', 'prefix_keys'), ('past_value', 'prefix_values'))
    }
    return Case(
        network=found.network,
        steps=found.steps,
        pixels=pixels,
        image_mask=image_mask,
        rows=rows,
        head=found.head_inputs(b),
        noise=of['noise'][b],
        actions=of['actions'][b],
        velocities=of['v_t'][:, b],
        past=past,
        tied={
            schedule: Tied(of['rtc_previous_chunk'][b], of[f'rtc_actions_{schedule}'][b])
            for schedule in ('linear', 'exp')
            if f'rtc_actions_{schedule}' in of
        },
        training=Training(
            x=of['joint_x_t'][b : b + 1],
            conditioning=found.network.time_conditioning(of['joint_t'][b : b + 1]),
            target=of['joint_u_t'][b],
            squared_error=of['joint_sq_err'][b],
        ),
    )


def past(dims: PiDims) -> Mapping[str, tuple[int, ...]]:
    language = dims.language
    keys = (language.depth, 1, language.num_kv_heads, dims.prefix_length, language.head_dim)
    return {'past_key': keys, 'past_value': keys, 'prefix_mask': (1, dims.prefix_length)}


def hidden_tokens_counted(positions: Tensor, head_dim: int) -> object:
    return rotary(torch.ones_like(positions).cumsum(dim=1) - 1, head_dim)


def faults() -> Mapping[str, Fault]:
    """Those of numbers in the files are in test/convert/export/test_onnx_precision.py."""
    return {
        'positions backwards': Patched(
            expert_network, 'rotary', lambda p, size: rotary(-p, size), 'prefix.onnx', quick=True
        ),
        'positions that count hidden tokens': Patched(
            expert_network, 'rotary', hidden_tokens_counted, 'prefix.onnx'
        ),
    }


def folders() -> Mapping[str, Callable[[Path], Folder]]:
    return {
        path.name.removesuffix('.end_to_end.json'): partial(folder, path)
        for path in end_to_end_cases()
    }


def folder(path: Path, target: Path) -> Folder:
    description, tensors = json.loads(path.read_text()), load_file(path.with_suffix('.safetensors'))
    recorded = []
    for i, entry in enumerate(description['observations']):
        mask = tensors[f'token_mask_{i}'].bool()
        names = [name.removesuffix(f'_{i}') for name in tensors if name.endswith(f'_{i}')]
        images = {
            name: tensors[f'{name}_{i}'].numpy()
            for name in names
            if tensors[f'{name}_{i}'].ndim == 3
        }
        recorded.append(
            Recorded(
                seen=Observation(images, tensors[f'state_{i}'].numpy(), entry['task']),
                noise=tensors['noise'][0].numpy(),
                normalised=tensors[f'chunk_normalised_{i}'],
                actions=tensors[f'chunk_{i}'],
                tokens=tensors[f'tokens_{i}'][mask],
            )
        )
    names = tuple(description['joints'])
    options = ExportOptions(
        state_names=names,
        action_names=names,
        units=('rad',),
        rate_hz=30.0,
        vision_heads=description['dims']['vheads'],
    )
    return Folder(folder_of(path), options, recorded)


CONTRACTS = (
    FamilyContract(
        family='pi05',
        tiny=partial(tiny, 'pi05'),
        case=case,
        bound=2e-5,
        template='pi05_state',
        parameters={'pi05': 3_353_433_872},
        past=past,
        faults=faults,
        folders=folders,
    ),
    FamilyContract(
        family='pi0',
        tiny=partial(tiny, 'pi0'),
        case=case,
        bound=2e-5,
        template='pi0',
        parameters={'pi0': 3_238_048_528},
        past=past,
        faults=faults,
    ),
)
