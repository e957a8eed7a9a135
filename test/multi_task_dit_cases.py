"""Loads the network cases of Multi-Task DiT (test/cases/README.md)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusion_cases import Sampling, samplings_of, scheduler_of_case
from network_cases import ReferenceCase, our_weights
from safetensors.torch import load_file
from torch import Tensor

from vla_runtime.families.blocks.dimensions import VisionDims
from vla_runtime.families.flow_network import build_network
from vla_runtime.families.multi_task_dit.checkpoint import NAMES
from vla_runtime.families.multi_task_dit.dimensions import (
    MultiTaskDitDims,
    TextDims,
    TransformerDims,
)
from vla_runtime.families.multi_task_dit.networks import MultiTaskDit


@dataclass(frozen=True)
class MultiTaskDitCase(ReferenceCase):
    """A case of Multi-Task DiT, and our network with its weights."""

    network: MultiTaskDit

    @property
    def cameras(self) -> range:
        return range(self.description['cameras'])

    @property
    def samplings(self) -> tuple[Sampling, ...]:
        """Runs of the scheduler that the case recorded; those of a flow are left out."""
        return samplings_of(self.description)

    def pixels(self, b: int) -> Tensor:
        """Normalised images of batch entry b, (V, 3, height, width), the newest step first."""
        steps = self.description['n_obs_steps']
        return torch.stack(
            [
                self._image(camera)[b, step]
                for step in reversed(range(steps))
                for camera in self.cameras
            ]
        )

    def _image(self, camera: int) -> Tensor:
        """Images of a camera (B, T, 3, height, width), normalised by the case's statistics."""
        assert self.description['normalization']['VISUAL'] == 'MEAN_STD'
        statistics = self.description['statistics'][f'observation.images.cam{camera}']
        mean, std = (torch.tensor(statistics[name])[:, None, None] for name in ('mean', 'std'))
        raw = self.tensors[f'raw_image_{camera}'].permute(0, 1, 4, 2, 3).float() / 255
        return (raw - mean) / (std + 1e-8)

    def rows(self, b: int) -> dict[str, Tensor]:
        """Prompt and states of batch entry b, one row."""
        return {name: self.tensors[name][b : b + 1] for name in ('tokens', 'token_mask', 'state')}

    def visible(self) -> Tensor:
        """A mask (V,) that hides nothing."""
        return torch.ones(self.network.dims.cameras, dtype=torch.bool)

    def prefix(self, b: int) -> Mapping[str, Tensor]:
        """Outputs of the prefix network for batch entry b."""
        tokens = self.network.vision(self.pixels(b))
        return self.network.prefix(tokens, self.visible(), **self.rows(b))

    def step_noise(self, sampling: Sampling, b: int) -> np.ndarray:
        """Noise of every step (N, H, A); zeros where none is drawn."""
        found = self.tensors.get(f'{sampling.prefix}step_noise')
        dims = self.network.dims
        if found is None or not found.numel():
            return np.zeros((sampling.steps, dims.horizon, dims.action_dim), np.float32)
        return found[:, b].numpy()


def dims_of_case(d: Mapping[str, Any]) -> MultiTaskDitDims:
    """Our dimensions of a case's description."""
    # What no policy changes is a constant of the networks.
    assert (d['v_eps'], d['t_eps'], d['dit_eps']) == (1e-5, 1e-5, 1e-6)
    assert not d['use_separate_rgb_encoder_per_camera']
    resize, crop = d['image_resize_shape'], d['image_crop_shape_used']
    first, last = d['actions_returned']
    assert first == d['n_obs_steps'] - 1
    return MultiTaskDitDims(
        vision=VisionDims(
            width=d['v_hidden'],
            depth=d['v_layers'],
            num_heads=d['v_heads'],
            mlp_dim=d['v_mlp'],
            patch_size=d['patch'],
            image_size=d['v_image'],
        ),
        text=TextDims(
            width=d['t_hidden'],
            depth=d['t_layers'],
            num_heads=d['t_heads'],
            mlp_dim=d['t_mlp'],
            positions=d['t_positions'],
        ),
        text_width=d['hidden_dim'],
        transformer=TransformerDims(
            width=d['hidden_dim'],
            depth=d['num_layers'],
            num_heads=d['num_heads'],
            mlp_dim=4 * d['hidden_dim'],
            time_width=d['timestep_embed_dim'],
            rotary_base=d['rope_base'] if d['use_rope'] else None,
            learned_positions=d['use_positional_encoding'],
        ),
        image=tuple(d['image']),
        resize=tuple(resize) if resize else None,
        crop=tuple(crop) if crop else None,
        scheduler=scheduler_of_case(d),
        vocabulary=d['vocab'],
        prompt_length=d['tokenizer_max_length'],
        cameras=d['cameras'] * d['n_obs_steps'],
        observation_steps=d['n_obs_steps'],
        horizon=d['horizon'],
        real_horizon=last - first,
        action_dim=d['action_dim'],
        state_dim=d['state_dim'],
    )


@lru_cache(maxsize=4)
def load_multi_task_dit_case(path: Path) -> MultiTaskDitCase:
    """Read a case and load its weights under our names, every one of them."""
    description = json.loads(path.read_text())
    network = build_network('multi_task_dit', dims_of_case(description))
    assert isinstance(network, MultiTaskDit)
    network.load_state_dict(our_weights(path, NAMES))
    network.eval().requires_grad_(False)
    return MultiTaskDitCase(description, load_file(path.with_suffix('.case.safetensors')), network)
