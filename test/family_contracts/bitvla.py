"""BitVLA."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from bitvla_cases import load_bitvla_case
from torch import Tensor

from family_contracts.declaration import Case, FamilyContract, Fault, OtherDims, Patched
from family_contracts.robot import CAMERAS, places_of
from vla_runtime.bundle.schema import CropSpec, ImageSpec
from vla_runtime.families import parallel_network
from vla_runtime.families.bitvla.declaration import BitVlaDims
from vla_runtime.families.bitvla.networks import BitVla
from vla_runtime.families.blocks.attention import rotary
from vla_runtime.families.blocks.dimensions import DecoderDims, VisionDims

TOKENIZER = 'bitvla_tokenizer.json'


def tiny(horizon: int) -> BitVlaDims:
    places = places_of('bitvla', TOKENIZER)
    return BitVlaDims(
        vision=VisionDims(width=24, depth=1, num_heads=2, mlp_dim=32, patch_size=7, image_size=28),
        language=DecoderDims(
            width=40, depth=2, mlp_dim=48, num_heads=4, num_kv_heads=2, head_dim=10
        ),
        vocabulary=264,
        cameras=len(CAMERAS),
        image_places=places,
        state_place=places[-1],
        prompt_length=places[-1] + 160,
        stop_token=257,
        horizon=horizon,
        action_dim=6,
        state_dim=5,
        head_width=36,
    )


def case(path: Path, b: int) -> Case:
    """Codes are rounded: in some cases one on the edge goes the other way, and moves all behind."""
    found = load_bitvla_case(path)
    of, exact = found.tensors, path.stem.endswith(('_a', '_b'))
    hidden = of[f'action_hidden_{b}'].view(1, found.network.dims.horizon, -1)
    return Case(
        network=found.network,
        steps=1,
        pixels=of[f'pixel_values_{b}'],
        image_mask=found.visible(),
        rows=found.rows(b),
        actions=of[f'normalized_actions_{b}'] if exact else None,
        image_tokens=of[f'image_features_{b}'],
        past={'action_features': hidden} if exact else {},
    )


def past(dims: BitVlaDims) -> Mapping[str, tuple[int, ...]]:
    return {'action_features': (1, dims.horizon, dims.action_dim * dims.language.width)}


_EMBED = BitVla.embed_prefix


def cameras_turned(self: Any, image_tokens: Tensor, image_mask: Tensor, *rows: Tensor) -> Any:
    turned = [torch.cat([part[1:], part[:1]]) for part in (image_tokens, image_mask)]
    return _EMBED(self, *turned, *rows)


def faults() -> Mapping[str, Fault]:
    return {
        'cameras turned': Patched(
            BitVla, 'embed_prefix', cameras_turned, 'prefix.onnx', quick=True
        ),
        'the state a place later': OtherDims(
            lambda dims: replace(dims, state_place=dims.state_place + 1), 'prefix.onnx'
        ),
        'another rope base': OtherDims(
            lambda dims: replace(dims, rope_base=1.1 * dims.rope_base), 'prefix.onnx'
        ),
        'rope positions backwards': Patched(
            parallel_network, 'rotary', lambda p, *size: rotary(-p, *size), 'prefix.onnx'
        ),
    }


CONTRACTS = (
    FamilyContract(
        family='bitvla',
        tiny=tiny,
        case=case,
        bound=1e-5,
        template='bitvla',
        tokenizer=TOKENIZER,
        images=ImageSpec('crop', 'lanczos', CropSpec(28, 0.9)),
        norms_pass=True,
        parameters={'bitvla': 405_277_205},
        past=past,
        faults=faults,
    ),
)
