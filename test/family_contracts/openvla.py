"""OpenVLA."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from network_cases import batch_entries
from openvla_cases import load_openvla_case
from openvla_folders import STATE, options_of, write_folder
from torch import Tensor

from family_contracts.declaration import Case, FamilyContract, Fault, Folder, Patched, Recorded
from family_contracts.robot import CAMERAS, JOINTS
from vla_runtime.bundle.schema import ImageSpec
from vla_runtime.declarations.openvla import OPENVLA, OpenVlaDims
from vla_runtime.family.dimensions import DecoderDims, VisionDims
from vla_runtime.models import openvla as networks
from vla_runtime.models.base import token_network
from vla_runtime.models.openvla import OpenVla, Tower
from vla_runtime.types import Observation

KIND = 'openvla_full'


def tiny(horizon: int) -> OpenVlaDims:
    """A policy of one action a chunk, whatever the horizon."""
    tower = VisionDims(width=20, depth=2, num_heads=2, mlp_dim=24, patch_size=7, image_size=28)
    return OpenVlaDims(
        dino=tower,
        siglip=VisionDims(width=24, depth=1, num_heads=3, mlp_dim=32, patch_size=7, image_size=28),
        dino_registers=2,
        projector_dim=36,
        language=DecoderDims(
            width=40, depth=2, mlp_dim=48, num_heads=4, num_kv_heads=4, head_dim=10
        ),
        vocabulary=384,
        used_vocabulary=320,
        action_bins=256,
        prompt_length=112,
        action_dim=len(JOINTS),
        dino_mean=OPENVLA.dino_mean,
        dino_std=OPENVLA.dino_std,
        siglip_mean=OPENVLA.siglip_mean,
        siglip_std=OPENVLA.siglip_std,
        cameras=len(CAMERAS),
    )


def case(path: Path, b: int) -> Case:
    found = load_openvla_case(path)
    of = found.tensors
    tokens, mask = found.prompt(b)
    return Case(
        network=found.network,
        steps=1,
        pixels=found.pixels(b),
        image_mask=torch.ones(1, dtype=torch.bool),
        rows={'tokens': tokens, 'token_mask': mask},
        actions=of['normalized_actions'][b][None].float(),
        tokens=of['tokens'][b],
        logits=of['logits'][b],
        image_tokens=[of[f'image_features_{b}']],
        past={
            'prefix_key': of[f'prefill_keys_{b}'][:, None],
            'prefix_value': of[f'prefill_values_{b}'][:, None],
            'logits': of['logits'][b, :1],
        },
    )


def past(dims: OpenVlaDims) -> Mapping[str, tuple[int, ...]]:
    language = dims.language
    keys = (language.depth, 1, language.num_kv_heads, dims.prefix_length, language.head_dim)
    return {
        'prefix_key': keys,
        'prefix_value': keys,
        'prefix_mask': (1, dims.prefix_length),
        'logits': (1, dims.vocabulary),
    }


_EMBED, _READ, _VIEW = Tower.embed, OpenVla.read_token, OpenVla.view
_POSITION, _ROTARY = OpenVla.answer_position, token_network.rotary


def position_on_the_class_token(self: Tower, pixels: Tensor) -> Tensor:
    x = _EMBED(self, pixels)
    if self.registers is None:
        return x
    beside = torch.zeros_like(x)
    beside[:, 0] = self.position_embedding[:, 0]
    return x + beside


def first_logits_a_place_early(self: OpenVla, mask: Tensor) -> Any:
    right = _VIEW(self, mask)
    return right._replace(last=right.last - 1)


def one_position(at: Tensor, size: int, base: float) -> Any:
    return _ROTARY(at * 0 if at.shape[1] == 1 else at, size, base)


def padding_seen(self: OpenVla, tokens: Tensor, place: Tensor, past: Any, *answer: Tensor) -> Any:
    """Positions still count the prompt."""
    right = _POSITION(self, past['prefix_mask'])
    everything = {**past, 'prefix_mask': torch.ones_like(past['prefix_mask'])}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OpenVla, 'answer_position', lambda self, mask: right)
        return _READ(self, tokens, place, everything, *answer)


def tokens_not_kept(self: OpenVla, *inputs: Any) -> Any:
    found = _READ(self, *inputs)
    return found._replace(key=torch.zeros_like(found.key))


def blind_to_its_tokens(
    self: OpenVla, tokens: Tensor, place: Tensor, past: Any, key: Tensor, value: Tensor
) -> Any:
    return _READ(self, tokens, place, past, torch.zeros_like(key), value)


def tanh_gelu(x: Tensor) -> Tensor:
    return torch.ops.aten.gelu(x, approximate='tanh')


def faults() -> Mapping[str, Fault]:
    """Those of a whole answer are in test/runtime/models/openvla."""
    vision: dict[str, tuple[Any, str, Any]] = {
        'tanh in the towers': (networks.F, 'gelu', tanh_gelu),
        'a position on the class token': (Tower, 'embed', position_on_the_class_token),
        'colours not normalised': (networks, '_normalised', lambda pixels, mean, std: pixels),
    }
    prefix: dict[str, tuple[Any, str, Any]] = {
        'first logits a place early': (OpenVla, 'view', first_logits_a_place_early),
        'another rope base': (
            *(token_network, 'rotary'),
            lambda at, size, base: _ROTARY(at, size, base * 1.1),
        ),
    }
    answer: dict[str, tuple[Any, str, Any]] = {
        'padding seen': (OpenVla, 'read_token', padding_seen),
        'tokens not kept': (OpenVla, 'read_token', tokens_not_kept),
        'an answer blind to its tokens': (OpenVla, 'read_token', blind_to_its_tokens),
        'every token at one position': (token_network, 'rotary', one_position),
    }
    parts = {'vision.onnx': vision, 'prefix.onnx': prefix, 'expert.onnx': answer}
    return {
        name: Patched(*of, file, quick=number < 2)  # type: ignore[arg-type]
        for file, part in parts.items()
        for number, (name, of) in enumerate(part.items())
    }


def folders() -> Mapping[str, Callable[[Path], Folder]]:
    return {
        f'{path.stem}-{key}': partial(folder, path, key)
        for path, b in batch_entries(KIND)
        if b == 0
        for key in ('set_one', 'set_two')
    }


def folder(path: Path, key: str, target: Path) -> Folder:
    found = load_openvla_case(path)
    recorded = [
        Recorded(
            seen=Observation(
                {'image': found.tensors[f'raw_image_{b}'].numpy()},
                np.zeros(len(STATE)),
                found.description['instructions'][b],
            ),
            noise=None,
            normalised=found.tensors['normalized_actions'][b][None],
            actions=found.tensors[f'actions_{key}'][b][None],
        )
        for b in found.requests
    ]
    return Folder(write_folder(target / 'policy', path), options_of(path, key), recorded, 1e-6)


CONTRACTS = (
    FamilyContract(
        family='openvla',
        tiny=tiny,
        case=case,
        kind=KIND,
        bound=2e-5,
        template='openvla',
        tokenizer='openvla_full_a.tokenizer.json',
        images=ImageSpec('stretch', 'bicubic_pillow'),
        norms_pass=True,
        parameters={'openvla': 7_498_156_704},
        past=past,
        faults=faults,
        folders=folders,
    ),
)
