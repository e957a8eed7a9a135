"""Loads the network cases of Multi-Task DiT (test/cases/README.md)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from network_cases import load_case
from sampled_cases import SampledCase, Sampling, scheduler_of_case
from torch import Tensor

from vla_convert.readers.multi_task_dit import NAMES
from vla_runtime.declarations.multi_task_dit import (
    MultiTaskDitDims,
    MultiTaskDitFlowDims,
    TextDims,
    TransformerDims,
)
from vla_runtime.family.dimensions import VisionDims
from vla_runtime.models.base.flow_network import FlowNetwork, build_network
from vla_runtime.models.multi_task_dit import MultiTaskDit, MultiTaskDitFlow


@dataclass(frozen=True)
class MultiTaskDitCase(SampledCase):
    """A case of Multi-Task DiT, and our network with its weights.

    It is the one that takes noise away, whatever the case's own objective: `network_of` has others.
    """

    network: MultiTaskDit

    def rows(self, b: int) -> dict[str, Tensor]:
        """Prompt and states of batch entry b, one row."""
        return {name: self.tensors[name][b : b + 1] for name in ('tokens', 'token_mask', 'state')}

    def network_of(self, sampling: Sampling, b: int = 0) -> FlowNetwork:
        """Our network of a chunk: the same weights read as those of a flow, where it has one."""
        if sampling.scheduler is not None:
            return self.network
        return flow_network(self.network, sampling.integrator)


@lru_cache
def flow_network(network: MultiTaskDit, integrator: str) -> MultiTaskDitFlow:
    """The weights of a network as those of a flow, which is followed by this integrator."""
    own = vars(network.dims)
    dims = {name: value for name, value in own.items() if name != 'scheduler'}
    flow = build_network(
        'multi_task_dit_flow',
        MultiTaskDitFlowDims(**dims, integrator=integrator),  # type: ignore[arg-type]
    )
    assert isinstance(flow, MultiTaskDitFlow)
    flow.load_state_dict(network.state_dict())
    return flow.eval().requires_grad_(False)


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
    return load_case(path, MultiTaskDitCase, 'multi_task_dit', dims_of_case, NAMES)
