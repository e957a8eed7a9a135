"""Loads SmolVLA's network cases and builds tiny policies of it (test/cases/README.md)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from network_cases import ReferenceCase, load_case, vision_of_case
from torch import Tensor

from vla_convert.readers.smolvla import NAMES
from vla_runtime.declarations.smolvla import SmolVlaDims
from vla_runtime.family.dimensions import DecoderDims
from vla_runtime.models.smolvla import SmolVla


@dataclass(frozen=True)
class SmolVlaCase(ReferenceCase):
    """A case of SmolVLA, and our network with its weights."""

    network: SmolVla

    def rows(self, *entries: int) -> dict[str, Tensor]:
        """Inputs of the prefix, one row for each batch entry."""
        names = ('tokens', 'token_mask', 'state')
        return {name: torch.stack([self.tensors[name][b] for b in entries]) for name in names}


def dims_of_case(d: Mapping[str, Any]) -> SmolVlaDims:
    """Our dimensions of a case's description."""
    # What no policy changes is a constant of the networks.
    assert (d['v_eps'], d['rope_base']) == (1e-6, 10000)
    assert (d['min_period'], d['max_period']) == (4e-3, 4.0)
    assert (d['add_image_special_tokens'], d['prefix_length']) == (False, -1)
    heads = {name: d[name] for name in ('depth', 'num_heads', 'num_kv_heads', 'head_dim')}
    return SmolVlaDims(
        vision=vision_of_case(d),
        pixel_shuffle=d['scale_factor'],
        language=DecoderDims(width=d['width'], mlp_dim=d['mlp_dim'], **heads),
        expert=DecoderDims(width=d['e_width'], mlp_dim=d['e_mlp_dim'], **heads),
        self_attention_every=max(0, d['self_attn_every_n_layers']),
        vocabulary=d['vocab'],
        cameras=d['cameras'],
        prompt_length=d['tokens'],
        horizon=d['chunk'],
        action_dim=d['action_dim'],
        state_dim=d['state_dim'],
        rms_epsilon=d['rms_eps'],
    )


@lru_cache(maxsize=4)
def load_smolvla_case(path: Path) -> SmolVlaCase:
    return load_case(path, SmolVlaCase, 'smolvla', dims_of_case, NAMES)
