"""Loads ACT's network cases and builds tiny policies of it (test/cases/README.md)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from network_cases import ReferenceCase, our_weights
from safetensors.torch import load_file
from torch import Tensor

from vla_convert.readers.act import NAMES
from vla_runtime.declarations.act import ActDims, StackDims
from vla_runtime.family.dimensions import ResNetDims
from vla_runtime.models.act import Act
from vla_runtime.models.base.flow_network import build_network


@dataclass(frozen=True)
class ActCase(ReferenceCase):
    """A case of ACT, and our network with its weights."""

    network: Act

    @property
    def cameras(self) -> range:
        return range(len(self.description['images']))

    def pixels(self, b: int) -> list[Tensor]:
        """Normalised images of batch entry b, (3, height, width) each."""
        return [self.tensors[f'image_{i}'][b] for i in self.cameras]

    def image_tokens(self, b: int) -> Tensor:
        """Image tokens of all cameras as an engine holds them, (V, N, W)."""
        found = [self.network.vision(pixels[None])[0] for pixels in self.pixels(b)]
        tokens = torch.zeros(len(found), max(map(len, found)), self.network.dims.width)
        for camera, of_image in enumerate(found):
            tokens[camera, : len(of_image)] = of_image
        return tokens

    def state(self, b: int) -> Tensor:
        """The state, that of the environment behind it, (1, S)."""
        parts = [self.tensors[name] for name in ('state', 'env_state') if name in self.tensors]
        return torch.cat([part[b : b + 1] for part in parts], dim=1)

    def visible(self) -> Tensor:
        """A mask (V,) that hides no camera."""
        return torch.ones(len(self.cameras), dtype=torch.bool)


def dims_of_case(d: Mapping[str, Any], weights: Mapping[str, Tensor]) -> ActDims:
    """Our dimensions of a case; the backbone's are those of its weights, under LeRobot's names."""
    # What no policy changes is a constant of the networks.
    assert (d['bn_eps'], d['layer_norm_eps']) == (1e-5, 1e-5)
    stack = {'width': d['width'], 'num_heads': d['heads'], 'mlp_dim': d['mlp']}
    stages = range(1, len(d['backbone_blocks']) + 1)
    channels = [len(weights[f'backbone.layer{stage}.0.conv1.weight']) for stage in stages]
    sizes = tuple((height, width) for height, width in d['images'])
    return ActDims(
        backbone=ResNetDims(
            stem=len(weights['backbone.conv1.weight']),
            channels=tuple(channels),  # type: ignore[arg-type]
            blocks=tuple(d['backbone_blocks']),
            bottleneck=d['bottleneck'],
            dilated=d['dilate_last_stage'],
        ),
        encoder=StackDims(depth=d['encoder_layers'], **stack),
        decoder=StackDims(depth=d['decoder_layers'], **stack),
        cameras=len(sizes),
        images=sizes,
        horizon=d['chunk'],
        action_dim=d['action_dim'],
        state_dim=d['state_dim'] + d['env_state_dim'],
        environment_dim=d['env_state_dim'],
        activation=d['activation'],
        pre_norm=d['pre_norm'],
    )


@lru_cache(maxsize=4)
def load_act_case(path: Path) -> ActCase:
    """Read a case and load its weights under our names, every one of them."""
    description = json.loads(path.read_text())
    weights = load_file(path.with_suffix('.weights.safetensors'))
    network = build_network('act', dims_of_case(description, weights))
    assert isinstance(network, Act)
    network.load_state_dict(our_weights(path, NAMES))
    network.eval().requires_grad_(False)
    return ActCase(description, load_file(path.with_suffix('.case.safetensors')), network)
