"""Loads the network reference cases (test/cases/README.md) and builds tiny policies for tests."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from reference_cases import find
from safetensors.torch import load_file
from torch import Tensor

from vla_runtime.export.tensor_names import TEXT_HEAD, TEXT_TABLE, our_name
from vla_runtime.families import build_network
from vla_runtime.families.blocks.dimensions import GemmaDims, VisionDims
from vla_runtime.families.pi.dimensions import PiDims
from vla_runtime.families.pi.flow_policy import PiNetwork


@dataclass(frozen=True)
class NetworkCase:
    """One reference case: description, tensors, and our network with its weights."""

    description: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    network: PiNetwork

    @property
    def kind(self) -> str:
        return self.description['kind']

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

    def prompt(self, b: int, prefix: str = '') -> tuple[Tensor, Tensor]:
        """Tokens (L,) and mask (L,) of batch entry b; prefix `uncond_` for the other row."""
        return self.tensors[f'{prefix}tokens'][b], self.tensors[f'{prefix}token_mask'][b]

    def state(self, b: int) -> Tensor | None:
        """(1, S) for pi0."""
        return self.tensors['state'][b : b + 1] if self.kind == 'pi0' else None

    def head_inputs(self, b: int) -> dict[str, Tensor]:
        """Of batch entry b."""
        state = self.state(b)
        return {} if state is None else {'state': state}


def dims_of_case(d: Mapping[str, Any]) -> PiDims:
    """Our dimensions of a case's description."""
    heads = {
        'depth': d['depth'],
        'num_heads': d['num_heads'],
        'num_kv_heads': d['num_kv_heads'],
        'head_dim': d['head_dim'],
    }
    return PiDims(
        vision=VisionDims(
            width=d['v_hidden'],
            depth=d['v_layers'],
            num_heads=d['v_heads'],
            mlp_dim=d['v_mlp'],
            patch_size=d['patch'],
            image_size=d['image'],
        ),
        language=GemmaDims(width=d['width'], mlp_dim=d['mlp_dim'], **heads),
        expert=GemmaDims(width=d['e_width'], mlp_dim=d['e_mlp_dim'], **heads),
        vocabulary=d['vocab'],
        cameras=d['cameras'],
        prompt_length=d['tokens'],
        horizon=d['chunk'],
        action_dim=d['action_dim'],
        state_dim=d['state_dim'] if d['kind'] == 'pi0' else 0,
    )


def network_case_paths(kind: str | None = None) -> list[Path]:
    """Descriptions of all network cases in the cases folder, of one family or of both."""
    paths = [p.with_name(p.name.replace('.case.safetensors', '.json')) for p in find('*.case.*')]
    return [p for p in paths if kind is None or json.loads(p.read_text())['kind'] == kind]


@lru_cache(maxsize=4)
def load_network_case(path: Path) -> NetworkCase:
    """Read a case and load its weights under our names, every one of them."""
    description = json.loads(path.read_text())
    network = build_network(description['kind'], dims_of_case(description))
    weights = load_file(path.with_suffix('.weights.safetensors'))
    renamed = {our_name(name): tensor for name, tensor in weights.items()}
    renamed.pop(None, None)
    # The text table may be stored as the output table it is tied to.
    renamed.setdefault(TEXT_TABLE, renamed.pop(TEXT_HEAD, torch.empty(0)))
    renamed.pop(TEXT_HEAD, None)
    network.load_state_dict({str(name): tensor for name, tensor in renamed.items()})
    network.eval().requires_grad_(False)
    tensors = load_file(path.with_suffix('.case.safetensors'))
    return NetworkCase(description, tensors, network)


def batch_entries() -> Iterator[tuple[Path, int]]:
    """Every (case, batch entry)."""
    for path in network_case_paths():
        for b in range(json.loads(path.read_text())['batch']):
            yield path, b


def largest_error(ours: Tensor | Any, reference: Tensor) -> float:
    """Largest absolute difference."""
    return float((torch.as_tensor(ours) - reference).abs().max())
