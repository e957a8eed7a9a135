"""Loads OpenVLA's network cases (test/cases/README.md), and folders made of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from network_cases import ReferenceCase
from safetensors.torch import load_file
from torch import Tensor

from vla_convert.readers.openvla import NAMES, without_last_blocks
from vla_runtime.declarations.openvla import OPENVLA, OpenVlaDims
from vla_runtime.family.dimensions import DecoderDims, VisionDims
from vla_runtime.models.base.flow_network import build_network
from vla_runtime.models.openvla import OpenVla


@dataclass(frozen=True)
class OpenVlaCase(ReferenceCase):
    """A case of OpenVLA, and our network with its weights."""

    network: OpenVla
    path: Path

    @property
    def requests(self) -> range:
        return range(self.description['requests'])

    def prompt(self, request: int) -> tuple[Tensor, Tensor]:
        """Tokens (1, L) and mask (1, L) of a request, padded to the network's prompt length."""
        found = self.tensors[f'input_ids_{request}']
        tokens = torch.full((1, self.network.dims.prompt_length), 3, dtype=torch.int64)
        tokens[0, : len(found)] = found
        return tokens, torch.arange(tokens.shape[1])[None] < len(found)

    def pixels(self, request: int) -> Tensor:
        """Pixels (1, 3, S, S) in [-1, 1]: SigLIP's channels, as its statistics scale them back."""
        siglip = self.tensors[f'pixel_values_{request}'][3:]
        d = self.network.dims
        mean, std = (torch.tensor(v)[:, None, None] for v in (d.siglip_mean, d.siglip_std))
        return ((siglip * std + mean) * 2.0 - 1.0)[None]


def language_of_case(d: Mapping[str, Any]) -> DecoderDims:
    """Our dimensions of a description's language model."""
    names = ('width', 'depth', 'mlp_dim', 'num_heads', 'num_kv_heads', 'head_dim')
    return DecoderDims(**{name: d[name] for name in names})


def dims_of_case(d: Mapping[str, Any], prompt_length: int) -> OpenVlaDims:
    """Our dimensions of a case from the towers to robot units."""
    assert d['v_eps'] == 1e-6
    assert d['patch_block'] == [d['dino_depth'] - 2, d['siglip_depth'] - 2]
    (dino_mean, siglip_mean), (dino_std, siglip_std) = d['image_means'], d['image_stds']
    towers = {
        tower: VisionDims(
            width=d[f'{tower}_width'],
            # The last block is in the file, and nothing reads it.
            depth=d[f'{tower}_depth'] - 1,
            num_heads=d[f'{tower}_heads'],
            mlp_dim=int(d[f'{tower}_width'] * d[f'{tower}_mlp_ratio']),
            patch_size=d['patch'],
            image_size=d['image'],
        )
        for tower in ('dino', 'siglip')
    }
    joint = d['dino_width'] + d['siglip_width']
    return OpenVlaDims(
        **towers,
        dino_registers=d['num_prefix_tokens_dino'] - 1,
        projector_dim=4 * joint,
        language=language_of_case(d),
        vocabulary=d['vocab'],
        used_vocabulary=d['used_vocab'],
        action_bins=d['n_action_bins'],
        prompt_length=prompt_length,
        action_dim=d['action_dim'],
        dino_mean=tuple(dino_mean),
        dino_std=tuple(dino_std),
        siglip_mean=tuple(siglip_mean),
        siglip_std=tuple(siglip_std),
        rope_base=d['rope_theta'],
        rms_epsilon=d['rms_eps'],
    )


def our_case_weights(path: Path) -> dict[str, Tensor]:
    """A case's weights under our names, those that nothing reads left out."""
    weights: dict[str, Tensor] = {}
    for theirs, tensor in load_file(path.with_suffix('.weights.safetensors')).items():
        if NAMES.is_unused(theirs):
            continue
        names = NAMES.parts(theirs)
        assert names, theirs
        weights |= dict(zip(names, tensor.chunk(len(names)), strict=True))
    kept = without_last_blocks(set(weights))
    return {name: tensor for name, tensor in weights.items() if name in kept}


@lru_cache(maxsize=4)
def load_openvla_case(path: Path) -> OpenVlaCase:
    """Read a case from the towers to robot units, and load its weights, every one of them."""
    d = json.loads(path.read_text())
    tensors = load_file(path.with_suffix('.case.safetensors'))
    longest = max(len(tensors[f'input_ids_{request}']) for request in range(d['requests']))
    # Padding must not matter.
    network = build_network('openvla', dims_of_case(d, longest + 3)).eval().requires_grad_(False)
    network.load_state_dict(our_case_weights(path))
    return OpenVlaCase(d, tensors, network, path)


@lru_cache(maxsize=4)
def load_decoding_case(path: Path) -> OpenVlaCase:
    """Read a case of the language model alone; towers and projector stay as they were drawn."""
    d = json.loads(path.read_text())
    tower = VisionDims(
        width=8,
        depth=1,
        num_heads=2,
        mlp_dim=8,
        patch_size=2,
        image_size=2 * round(d['vision_tokens'] ** 0.5),
    )
    dims = OpenVlaDims(
        dino=tower,
        siglip=tower,
        dino_registers=1,
        projector_dim=16,
        language=language_of_case(d),
        vocabulary=d['vocab'],
        used_vocabulary=d['vocab'],
        action_bins=256,
        prompt_length=1 + d['text_tokens'] + 2,
        action_dim=d['new_tokens'],
        dino_mean=OPENVLA.dino_mean,
        dino_std=OPENVLA.dino_std,
        siglip_mean=OPENVLA.siglip_mean,
        siglip_std=OPENVLA.siglip_std,
        rope_base=d['rope_theta'],
        rms_epsilon=d['rms_eps'],
    )
    network = build_network('openvla', dims).eval().requires_grad_(False)
    weights = load_file(path.with_suffix('.weights.safetensors'))
    ours = {NAMES.ours(f'language_model.{name}'): tensor for name, tensor in weights.items()}
    missing, unexpected = network.load_state_dict(ours, strict=False)
    assert not unexpected
    assert all(name.startswith('vision.') for name in missing)
    return OpenVlaCase(d, load_file(path.with_suffix('.case.safetensors')), network, path)
