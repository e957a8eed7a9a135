"""Loads the network reference cases (test/cases/README.md) and builds tiny policies for tests."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from reference_cases import find
from safetensors.torch import load_file
from torch import Tensor

from vla_convert.checkpoints.tensor_names import TensorNames
from vla_convert.readers.pi import NAMES
from vla_runtime.declarations.pi import PiDims
from vla_runtime.family.declaration import PolicyDims
from vla_runtime.family.dimensions import DecoderDims, VisionDims
from vla_runtime.inference.denoise import flow_times
from vla_runtime.inference.real_time_chunking import plan_weights
from vla_runtime.models.base.flow_network import FlowNetwork, build_network
from vla_runtime.models.base.flow_step import DenoiseStep
from vla_runtime.models.pi import PiNetwork


@dataclass(frozen=True)
class ReferenceCase:
    """A reference case of any family: description and tensors."""

    description: Mapping[str, Any]
    tensors: Mapping[str, Tensor]

    @property
    def steps(self) -> int:
        return self.description['steps']

    @property
    def batch(self) -> int:
        return self.description['batch']

    def images(self, b: int) -> tuple[Tensor, Tensor]:
        """Pixels (V, 3, S, S) and mask (V,) of batch entry b."""
        cameras = range(self.description['cameras'])
        pixels = torch.stack([self.tensors[f'image_{i}'][b] for i in cameras])
        mask = torch.stack([self.tensors[f'image_mask_{i}'][b] for i in cameras])
        return pixels, mask


@dataclass(frozen=True)
class NetworkCase(ReferenceCase):
    """A case of pi0 or pi0.5, and our network with its weights."""

    network: PiNetwork

    @property
    def kind(self) -> str:
        return self.description['kind']

    def prompt(self, b: int, prefix: str = '') -> tuple[Tensor, Tensor]:
        """Tokens (L,) and mask (L,) of batch entry b; prefix `uncond_` for the other row."""
        return self.tensors[f'{prefix}tokens'][b], self.tensors[f'{prefix}token_mask'][b]

    def state(self, b: int) -> Tensor | None:
        """(1, S) for pi0."""
        return self.tensors['state'][b : b + 1] if self.kind == 'pi0' else None

    def head_inputs(self, b: int) -> dict[str, Tensor]:
        """Inputs of the head for batch entry b."""
        state = self.state(b)
        return {} if state is None else {'state': state}


def vision_of_case(d: Mapping[str, Any]) -> VisionDims:
    """Our dimensions of a description's vision tower."""
    return VisionDims(
        width=d['v_hidden'],
        depth=d['v_layers'],
        num_heads=d['v_heads'],
        mlp_dim=d['v_mlp'],
        patch_size=d['patch'],
        image_size=d['image'],
    )


def dims_of_case(d: Mapping[str, Any]) -> PiDims:
    """Our dimensions of a case's description."""
    heads = {
        'depth': d['depth'],
        'num_heads': d['num_heads'],
        'num_kv_heads': d['num_kv_heads'],
        'head_dim': d['head_dim'],
    }
    return PiDims(
        vision=vision_of_case(d),
        language=DecoderDims(width=d['width'], mlp_dim=d['mlp_dim'], **heads),
        expert=DecoderDims(width=d['e_width'], mlp_dim=d['e_mlp_dim'], **heads),
        vocabulary=d['vocab'],
        cameras=d['cameras'],
        prompt_length=d['tokens'],
        horizon=d['chunk'],
        action_dim=d['action_dim'],
        state_dim=d['state_dim'] if d['kind'] == 'pi0' else 0,
    )


def network_case_paths(*kinds: str) -> list[Path]:
    """Descriptions of the network cases in the cases folder; of pi0 and pi0.5 without a kind."""
    kinds = kinds or ('pi05', 'pi0')
    paths = [p.with_name(p.name.replace('.case.safetensors', '.json')) for p in find('*.case.*')]
    return [p for p in paths if json.loads(p.read_text()).get('kind') in kinds]


@lru_cache(maxsize=4)
def load_network_case(path: Path) -> NetworkCase:
    """Read a case of pi0 or pi0.5."""
    family = json.loads(path.read_text())['kind']
    return load_case(path, NetworkCase, family, dims_of_case, NAMES)


def load_case(
    path: Path,
    case: Callable[..., Any],
    family: str,
    dims_of: Callable[[Mapping[str, Any]], PolicyDims],
    names: TensorNames,
    *more: object,
) -> Any:
    """Read a case and load its weights under our names, every one of them."""
    description = json.loads(path.read_text())
    network = build_network(family, dims_of(description))
    network.load_state_dict(our_weights(path, names))
    network.eval().requires_grad_(False)
    return case(description, load_file(path.with_suffix('.case.safetensors')), network, *more)


def our_weights(path: Path, names: TensorNames) -> dict[str, Tensor]:
    """A case's weights under our names; one that has none keeps its own."""
    weights = load_file(path.with_suffix('.weights.safetensors'))
    ours = {}
    for name, tensor in weights.items():
        if not names.is_unused(name):
            parts = names.parts(name) or (name,)
            ours |= dict(zip(parts, tensor.chunk(len(parts)), strict=True))
    for copy, original in names.tied.items():
        if copy in ours:
            ours.setdefault(original, ours.pop(copy))
    return ours


def random_network(family: str, dims: PolicyDims) -> FlowNetwork:
    """A network with random weights of a size that makes everything matter."""
    network = build_network(family, dims).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in network.named_parameters():
        is_table = parameter.ndim == 1 or 'position' in name or 'embedding' in name
        scale = 0.5 if is_table else 0.5 * parameter.shape[-1] ** -0.5
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
        if 'norm' in name and name.endswith('weight'):
            parameter.add_(1.0)
    return network


def batch_entries(*kinds: str) -> Iterator[tuple[Path, int]]:
    """Every (case, batch entry) of these kinds, as `network_case_paths` has them."""
    for path in network_case_paths(*kinds):
        description = json.loads(path.read_text())
        # A case of OpenVLA has requests of different lengths in place of a batch.
        for b in range(description.get('batch') or description['requests']):
            yield path, b


def each_entry(*kinds: str) -> pytest.MarkDecorator:
    """Run a test with `path` and `b` of every case and batch entry of these kinds."""
    return pytest.mark.parametrize(
        ('path', 'b'), list(batch_entries(*kinds)), ids=lambda value: getattr(value, 'stem', value)
    )


def each_case(*kinds: str) -> pytest.MarkDecorator:
    """Run a test with `path` of every case of these kinds."""
    return pytest.mark.parametrize('path', network_case_paths(*kinds), ids=lambda path: path.stem)


def committed_plan(
    previous: Tensor, horizon: int, steps: int, schedule: str, overlap: int = 6
) -> tuple[Tensor, np.ndarray]:
    """Plan (1, H, A) of a case's previous chunk, and its weights (N, H) by a schedule."""
    plan = torch.zeros(1, horizon, previous.shape[1])
    plan[0, : len(previous)] = previous
    weights = plan_weights(
        flow_times(steps),
        schedule=schedule,
        delay=2,
        execution_horizon=min(overlap, len(previous)),
        horizon=horizon,
        maximum=10.0,
    )
    return plan, weights


def denoised(
    network: FlowNetwork,
    past: Mapping[str, Tensor],
    noise: Tensor,
    steps: int,
    plan: Tensor | None = None,
    weights: np.ndarray | None = None,
    rows: Mapping[str, Tensor] | None = None,
) -> list[tuple[Tensor, Tensor]]:
    """(x, velocity) of every step from noise (1, H, A), as the engines run them.

    `rows` are the head's inputs that come from an observation.
    """
    step, x, states = DenoiseStep(network), noise, []
    prepared = network.prepare_prefix(past)
    plan = torch.zeros_like(x) if plan is None else plan
    for k, t in enumerate(torch.tensor(flow_times(steps), dtype=torch.float32)):
        weight = torch.zeros(x.shape[1]) if weights is None else torch.from_numpy(weights[k])
        table = network.split_conditioning(network.time_conditioning(t[None]))
        dt = torch.tensor(-1.0 / steps)
        x, velocity = step(
            x, prepared, table, t, dt, torch.ones(1), plan, weight[None, :, None], rows or {}
        )
        # A joined network may write the next velocity where this one is.
        states.append((x.clone(), velocity.clone()))
    return states


def largest_error(ours: Tensor | Any, reference: Tensor) -> float:
    """Largest absolute difference."""
    return float((torch.as_tensor(ours) - reference).abs().max())


def relative_error(ours: Tensor | Any, reference: Tensor) -> float:
    """Largest difference, relative to the largest value where that is above one."""
    return largest_error(ours, reference) / max(1.0, float(reference.abs().max()))
