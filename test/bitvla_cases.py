"""Loads BitVLA's cases (test/cases/README.md) and builds our networks with their weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from network_cases import ReferenceCase
from openvla_cases import language_of_case
from safetensors.torch import load_file
from torch import Tensor

from vla_convert.readers.bitvla import NAMES, is_ternary
from vla_runtime.declarations.bitvla import BitVlaDims
from vla_runtime.family.dimensions import VisionDims
from vla_runtime.family.ternary_weights import pack, scale_of, ternary_of
from vla_runtime.models.base.flow_network import build_network
from vla_runtime.models.bitvla import BitVla


@dataclass(frozen=True)
class BitVlaCase(ReferenceCase):
    """A case of BitVLA, and our network with its weights."""

    network: BitVla
    path: Path

    @property
    def requests(self) -> range:
        return range(self.description['requests'])

    def text(self, request: int) -> tuple[Tensor, Tensor]:
        """Text tokens (1, L) and mask (1, L), without images, padded to the prompt's length."""
        d, dims = self.description, self.network.dims
        ids = self.tensors[f'input_ids_{request}']
        assert ids[-1] == d['stop_token']
        prompt = ids[: len(ids) - dims.action_places - 1]
        found = prompt[prompt != d['image_token']]
        tokens = torch.zeros(1, dims.prompt_length, dtype=torch.int64)
        tokens[0, : len(found)] = found
        return tokens, torch.arange(dims.prompt_length)[None] < len(found)

    def rows(self, request: int) -> dict[str, Tensor]:
        """Inputs of the prefix besides images."""
        tokens, mask = self.text(request)
        state = self.tensors[f'proprio_{request}'][None]
        return {'tokens': tokens, 'token_mask': mask, 'state': state}

    def visible(self) -> Tensor:
        """A mask (V,) that hides no camera."""
        return torch.ones(self.network.dims.cameras, dtype=torch.bool)

    def image_tokens(self, request: int) -> Tensor:
        """Image tokens of all cameras, (V, N, W)."""
        return self.network.vision(self.tensors[f'pixel_values_{request}'])

    def past(self, request: int) -> Mapping[str, Tensor]:
        """Outputs of the prefix network for a request."""
        return self.network.prefix(self.image_tokens(request), self.visible(), **self.rows(request))


def dims_of_case(d: Mapping[str, Any], input_ids: Tensor) -> BitVlaDims:
    """Our dimensions of a case; places are those of its first request."""
    assert d['v_eps'] == 1e-6
    text, places = 0, []
    for number, token in enumerate(input_ids.tolist()):
        if token != d['image_token']:
            text += 1
        elif input_ids[number - 1] != token:
            places.append(text)
    before_state = input_ids[: int((input_ids == d['proprio_token']).nonzero())]
    longest = len(input_ids) - d['cameras'] * d['tokens_per_image'] - d['placeholders'] - 1
    return BitVlaDims(
        vision=VisionDims(
            width=d['v_hidden'],
            depth=d['v_feature_layers'],
            num_heads=d['v_heads'],
            mlp_dim=d['v_mlp'],
            patch_size=d['patch'],
            image_size=d['image'],
        ),
        language=language_of_case(d),
        vocabulary=d['vocab'],
        cameras=d['cameras'],
        image_places=tuple(places),
        state_place=int((before_state != d['image_token']).sum()),
        # Padding must not matter.
        prompt_length=longest + 16,
        stop_token=d['stop_token'],
        horizon=d['chunk'],
        action_dim=d['action_dim'],
        state_dim=d['proprio_dim'],
        head_width=d['width'],
        rope_base=d['rope_theta'],
        rms_epsilon=d['rms_eps'],
    )


def our_case_weights(path: Path, blocks: int) -> dict[str, Tensor]:
    """A case's weights under our names, ternary where the policy's are, without later blocks."""
    weights: dict[str, Tensor] = {}
    for theirs, tensor in load_file(path.with_suffix('.weights.safetensors')).items():
        if NAMES.is_unused(theirs):
            continue
        name = NAMES.ours(theirs)
        assert name is not None, theirs
        if name.startswith('vision.blocks.') and int(name.split('.')[2]) >= blocks:
            continue
        if is_ternary(name, ternary_vision=True):
            layer = name.removesuffix('.weight')
            packed, scale = rounded(tensor)
            weights |= {f'{layer}.packed': packed, f'{layer}.weight_scale': scale}
        else:
            weights[name] = tensor
    return weights


def rounded(master: Tensor) -> tuple[Tensor, Tensor]:
    """Packed ternary weights and scale of master weights, as the exporter makes them."""
    numbers = master.numpy()
    return torch.from_numpy(pack(ternary_of(numbers))), torch.tensor(scale_of(numbers))


@lru_cache(maxsize=4)
def load_bitvla_case(path: Path) -> BitVlaCase:
    """Read a case and load its weights, every one of them."""
    d = json.loads(path.read_text())
    tensors = load_file(path.with_suffix('.case.safetensors'))
    network = build_network('bitvla', dims_of_case(d, tensors['input_ids_0']))
    assert isinstance(network, BitVla)
    network = network.eval().requires_grad_(False)
    network.load_state_dict(our_case_weights(path, d['v_feature_layers']))
    return BitVlaCase(d, tensors, network, path)


def unnormalised(d: Mapping[str, Any], actions: np.ndarray) -> np.ndarray:
    """Actions in the robot's units, as OFT writes them."""
    stats = d['norm_stats']['action']
    q01, q99 = np.array(stats['q01']), np.array(stats['q99'])
    scaled = 0.5 * (actions + 1.0) * (q99 - q01 + 1e-8) + q01
    return np.where(stats['mask'], scaled, actions)
