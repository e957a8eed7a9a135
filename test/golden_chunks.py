"""Chunks of every family's reference cases, from our network in any precision."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

import torch
from act_cases import ActCase, load_act_case
from evo1_cases import Evo1Case, load_evo1_case
from groot_cases import GrootCase, load_groot_case
from network_cases import NetworkCase, denoised, load_network_case, network_case_paths
from smolvla_cases import SmolVlaCase, load_smolvla_case
from torch import Tensor

from vla_runtime.engines.torch.weights import state_of
from vla_runtime.families.flow_network import FlowNetwork, empty_network

Case = NetworkCase | SmolVlaCase | ActCase | GrootCase | Evo1Case
KINDS = ('pi05', 'pi0', 'smolvla', 'act', 'groot_n15', 'groot_n16', 'groot_n17', 'evo1')


@lru_cache
def golden_cases() -> dict[str, Case]:
    """The first batch entry of every case, by its name."""
    found: dict[str, Case] = {}
    for kind in KINDS:
        for path in network_case_paths(kind):
            if kind.startswith('groot'):
                found[path.stem] = load_groot_case(path, 0)
            elif kind == 'evo1':
                found[path.stem] = load_evo1_case(path, 0)
            elif kind == 'act':
                found[path.stem] = load_act_case(path)
            else:
                load = load_smolvla_case if kind == 'smolvla' else load_network_case
                found[path.stem] = load(path)
    return found


def in_precision(network: FlowNetwork, precision: str) -> FlowNetwork:
    """The same network, its weights cast as an engine casts them."""
    other = empty_network(network.family.name, network.dims)
    other.load_state_dict(state_of(other, network.state_dict().items(), precision), assign=True)
    return other.eval().requires_grad_(False)


@torch.inference_mode()
def chunk_and_reference(case: Case, precision: str) -> tuple[Tensor, Tensor]:
    """Our chunk in a precision, and the reference's, (H, A) each."""
    case = replace(case, network=in_precision(case.network, precision))
    if isinstance(case, ActCase):
        return case.network.actions(case.prefix(0))[0], case.tensors['actions'][0]
    noise = case.tensors['noise'][:1].clone()
    rows: Mapping[str, Tensor] = {}
    if isinstance(case, Evo1Case):
        noise[..., case.network.dims.real_actions :] = 0.0
        past = case.prefix()
    elif isinstance(case, GrootCase):
        past, rows = case.prefix(), case.state()
    elif isinstance(case, SmolVlaCase):
        past = case.prefix(0)
    else:
        pixels, image_mask = case.images(0)
        tokens, token_mask = case.prompt(0)
        prompt = {'tokens': tokens[None], 'token_mask': token_mask[None]}
        past = case.network.prefix(case.network.vision(pixels), image_mask, **prompt)
        rows = case.head_inputs(0)
    steps = denoised(case.network, past, noise, case.steps, rows=rows)
    expected = case.actions() if isinstance(case, GrootCase) else case.tensors['actions'][0]
    return steps[-1][0][0], expected
