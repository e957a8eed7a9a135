"""Evo-1."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from evo1_cases import load_evo1_case
from evo1_folders import options_of, write_folder
from network_cases import batch_entries
from torch import Tensor

from family_contracts.declaration import (
    Case,
    FamilyContract,
    Fault,
    Folder,
    OtherDims,
    OtherTable,
    Patched,
    Recorded,
    Tied,
    Training,
)
from family_contracts.robot import CAMERAS, JOINTS, places_of
from vla_runtime.bundle.schema import ImageSpec
from vla_runtime.declarations import evo1 as declaration
from vla_runtime.declarations.evo1 import Evo1Dims, HeadDims
from vla_runtime.family.dimensions import DecoderDims, VisionDims
from vla_runtime.models import evo1 as networks
from vla_runtime.models.blocks.attention import rotary
from vla_runtime.types import Observation

TOKENIZER = 'smolvla_folder/tokenizer.json'


def tiny(horizon: int) -> Evo1Dims:
    places = places_of('evo1', TOKENIZER)
    return Evo1Dims(
        vision=VisionDims(width=24, depth=1, num_heads=2, mlp_dim=32, patch_size=7, image_size=28),
        pixel_shuffle=2,
        language=DecoderDims(
            width=40, depth=2, mlp_dim=48, num_heads=4, num_kv_heads=2, head_dim=8
        ),
        head=HeadDims(depth=2, num_heads=5, mlp_dim=56, state_hidden=20, velocity_hidden=28),
        vocabulary=360,
        cameras=len(CAMERAS),
        image_places=places,
        prompt_length=places[-1] + 64,
        horizon=horizon,
        action_dim=6,
        real_actions=len(JOINTS),
        state_dim=5,
    )


_TINY = tiny(8)
VARIANTS = {
    'one camera, weights of several embodiments': replace(
        _TINY,
        vision=VisionDims(width=20, depth=2, num_heads=4, mlp_dim=24, patch_size=5, image_size=15),
        pixel_shuffle=3,
        cameras=1,
        image_places=(1,),
        action_dim=9,
        real_actions=9,
        state_dim=11,
        input_major=True,
    ),
    'four cameras': replace(
        _TINY,
        vision=VisionDims(width=12, depth=1, num_heads=3, mlp_dim=20, patch_size=4, image_size=16),
        pixel_shuffle=4,
        language=DecoderDims(
            width=24, depth=3, mlp_dim=36, num_heads=4, num_kv_heads=4, head_dim=6
        ),
        head=HeadDims(depth=1, num_heads=3, mlp_dim=30, state_hidden=8, velocity_hidden=12),
        cameras=4,
        image_places=(2, 3, 3, 5),
        rope_base=1e4,
    ),
}


def case(path: Path, b: int) -> Case:
    found = load_evo1_case(path, b)
    of, network = found.tensors, found.network
    noise = found.of('noise').clone()
    noise[:, network.dims.real_actions :] = 0.0
    # Places of the context that the head sees, the state last; the reference may pad in front.
    shown = found.places[found.of('context_valid')[found.places]]
    places = torch.cat([shown, torch.tensor([found.of('context').shape[0] - 1])])
    views = slice(b * found.views, (b + 1) * found.views)
    t = found.of('train_t')
    row = network.time_rows[0, found.of('train_t_index').reshape(1)]
    hides = not found.of('context_valid').all()
    return Case(
        network=network,
        steps=found.steps,
        pixels=found.pixels,
        image_mask=found.image_mask,
        rows=found.rows(),
        noise=noise,
        actions=found.of('actions'),
        # The training code's velocity points the other way.
        velocities=-of['v_t'][:, b],
        image_tokens=of['image_features'][views],
        past={
            ours: of[theirs][:, b : b + 1][..., places, :]
            for ours, theirs in (('cross_key', 'cross_keys'), ('cross_value', 'cross_values'))
        },
        tied={
            schedule: Tied(found.of('rtc_previous_chunk'), found.of(f'rtc_actions_{schedule}'))
            for schedule in ('linear', 'exp')
            if f'rtc_actions_{schedule}' in of
        },
        training=Training(
            x=((1 - t) * found.of('train_noise') + t * found.of('train_actions'))[None],
            conditioning=row,
            velocity=-found.of('train_v'),
        ),
        unlike=found.of('actions_without_context_mask') if hides else None,
    )


def past(dims: Evo1Dims) -> Mapping[str, tuple[int, ...]]:
    head = dims.language.width // dims.head.num_heads
    layers = (dims.head.depth, 1, dims.head.num_heads, dims.prefix_length, head)
    return {'cross_key': layers, 'cross_value': layers, 'prefix_mask': (1, dims.prefix_length)}


def squares(patches: Tensor, side: int, edge: int, *order: int) -> Tensor:
    n, _, width = patches.shape
    few = side // edge
    cut = patches.view(n, few, edge, few, edge, width).permute(0, *order)
    return cut.reshape(n, few * few, -1)


def rows_of_patches(patches: Tensor, side: int, edge: int) -> Tensor:
    """Patches that follow each other instead of squares."""
    return patches.reshape(patches.shape[0], (side // edge) ** 2, -1)


def angles_in_half(positions: Tensor, head_dim: int, base: float) -> Any:
    return tuple(part.bfloat16().float() for part in rotary(positions, head_dim, base))


_EMBED = networks.Evo1.embed_prefix


def cameras_turned(self: Any, image_tokens: Tensor, image_mask: Tensor, *text: Tensor) -> Any:
    turned = [torch.cat([part[:, 1:], part[:, :1]], 1) for part in (image_tokens, image_mask)]
    return _EMBED(self, *turned, *text)


def hidden_camera_seen(self: Any, image_tokens: Tensor, image_mask: Tensor, *text: Tensor) -> Any:
    return _EMBED(self, image_tokens, torch.ones_like(image_mask), *text)


def faults() -> Mapping[str, Fault]:
    shuffles: dict[str, Any] = {
        'columns of squares first': lambda *of: squares(*of, 3, 1, 2, 4, 5),
        'columns in a square first': lambda *of: squares(*of, 1, 3, 4, 2, 5),
        'channels first': lambda *of: squares(*of, 1, 3, 5, 2, 4),
        'rows of patches': rows_of_patches,
    }
    # Positions, size of a head and base, to cosines and sines.
    angles: dict[str, Any] = {
        'the usual rope base': lambda p, size, base: rotary(p, size),
        'positions off by one from the middle': lambda p, size, base: rotary(
            p + (p > p.shape[1] // 2), size, base
        ),
        'images counted as one token': lambda p, size, base: rotary(
            p.clamp(max=4) + (p - 8).clamp(min=0), size, base
        ),
        'angles in half': angles_in_half,
        'positions in half': lambda p, size, base: rotary((p * 5).bfloat16() / 5, size, base),
    }

    def passed(times: np.ndarray) -> np.ndarray:
        return 1.0 - np.asarray(times)

    # Most are right by chance with the files' own 3 steps.
    rows: dict[str, Any] = {
        'rows in float32': lambda t: (
            (np.float32(1) - np.asarray(t, np.float32)) * np.float32(999)
        ).astype(np.int64),
        'rows not snapped': lambda t: (
            (1.0 - np.asarray(t, np.float32).astype(np.float64)) * 999
        ).astype(np.int64),
        'rows of the other direction': lambda t: (np.asarray(t) * 999).astype(np.int64),
        'rows rounded': lambda t: np.rint(passed(t) * 999).astype(np.int64),
        'rows of a thousand': lambda t: np.minimum(passed(t) * 1000, 999).astype(np.int64),
        'rows in half': lambda t: (passed(t).astype(np.float16) * np.float16(999)).astype(np.int64),
    }
    found: dict[str, Fault] = {}
    for owner, attribute, wrong, file, quick in (
        (networks, 'shuffle_pixels', shuffles, 'vision.onnx', 1),
        (networks, 'rotary', angles, 'prefix.onnx', 5),
        (declaration, 'time_rows', rows, 'time table', 2),
    ):
        for number, (name, change) in enumerate(wrong.items()):
            found[name] = Patched(owner, attribute, change, file, quick=number < quick)
    return found | {
        'action positions off by one': OtherTable(
            'action_positions', lambda t: t.roll(1, 1), 'expert.onnx'
        ),
        'action positions in half': OtherTable(
            'action_positions', lambda t: t.bfloat16().float(), 'expert.onnx'
        ),
        'cameras turned': Patched(
            networks.Evo1, 'embed_prefix', cameras_turned, 'prefix.onnx', quick=True
        ),
        'a hidden camera seen': Patched(
            networks.Evo1, 'embed_prefix', hidden_camera_seen, 'prefix.onnx', quick=True
        ),
        'images off by one': OtherDims(
            lambda dims: replace(
                dims, image_places=tuple(place + 1 for place in dims.image_places)
            ),
            'prefix.onnx',
        ),
    }


def folders() -> Mapping[str, Callable[[Path], Folder]]:
    return {f'{path.stem}-{b}': partial(folder, path, b) for path, b in batch_entries('evo1')}


def folder(path: Path, b: int, target: Path) -> Folder:
    found = load_evo1_case(path, b)
    images = {
        f'camera_{i}': (found.of(f'raw_image_{i}').numpy() * np.float32(255))
        .astype(np.uint8)
        .transpose(1, 2, 0)
        if found.image_mask[i]
        else None
        for i in range(found.description['cameras'])
    }
    rows, real = found.rows(), found.network.dims.real_actions
    recorded = Recorded(
        seen=Observation(images, found.of('raw_state').numpy(), found.description['prompts'][b]),
        noise=found.of('noise').numpy(),
        normalised=found.of('actions')[:, :real],
        actions=found.of('actions')[:, :real],
        tokens=rows['tokens'][0, rows['token_mask'][0]],
        state=found.of('state'),
    )
    source = write_folder(target / 'policy', path, b)
    return Folder(source, options_of(path, b), [recorded], bound=1e-4)


CONTRACTS = (
    FamilyContract(
        family='evo1',
        tiny=tiny,
        case=case,
        template='after_images',
        tokenizer=TOKENIZER,
        images=ImageSpec('stretch', 'bicubic'),
        images_normalised=True,
        norms_pass=True,
        parameters={'evo1': 776_139_440},
        past=past,
        variants=VARIANTS,
        refused={
            'image_places': lambda dims: replace(dims, image_places=dims.image_places[:-1]),
            'image_places begins': lambda dims: replace(
                dims, image_places=(0, *dims.image_places[1:])
            ),
            'pixel_shuffle': lambda dims: replace(dims, pixel_shuffle=3),
            'horizon': lambda dims: replace(dims, horizon=1),
            'real_actions': lambda dims: replace(dims, real_actions=0),
        },
        faults=faults,
        folders=folders,
    ),
)
