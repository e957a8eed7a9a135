"""Loads the network cases of MolmoAct2 (test/cases/README.md)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from network_cases import ReferenceCase, our_weights
from safetensors.torch import load_file
from torch import Tensor

from vla_convert.readers.molmoact2 import NAMES, PACKED, TABLES, parts_of
from vla_runtime.declarations.molmoact2 import (
    ActionExpertDims,
    ImageIds,
    LanguageDims,
    MolmoAct2Dims,
    PoolingDims,
    TowerDims,
)
from vla_runtime.models.base.flow_network import build_network
from vla_runtime.models.molmoact2 import MolmoAct2
from vla_runtime.processing.plain_images import signed_table, to_plain_pixels
from vla_runtime.processing.tiles import choose_tiling, tiled


@dataclass(frozen=True)
class MolmoAct2Case(ReferenceCase):
    """One batch entry of a case of MolmoAct2, and our network with its weights.

    Attributes:
        entry: the batch entry.
    """

    network: MolmoAct2
    entry: int

    def of(self, name: str) -> Tensor:
        return self.tensors[name][self.entry]

    @property
    def first(self) -> int:
        """Places of padding in front of the prompt."""
        return int(self.of('attention_mask').long().argmax())

    def rows(self) -> dict[str, Tensor]:
        """Inputs of the prefix: the text without padding in front, (1, …) each."""
        ids = self.of('input_ids')[self.first :]
        tokens = ids[~self.of('token_type_ids')[self.first :].bool()]
        length = self.network.dims.prompt_length
        padded = torch.zeros(length, dtype=torch.int64)
        padded[: len(tokens)] = tokens
        return {'tokens': padded[None], 'token_mask': (torch.arange(length) < len(tokens))[None]}

    @property
    def length(self) -> int:
        """Tokens of the prompt, images among them."""
        return len(self.of('input_ids')) - self.first

    def pixels(self) -> list[Tensor]:
        """Pictures of the cameras, cut and resized from the raw images."""
        dims, found = self.network.dims, []
        keys = self.description['camera_keys']
        for camera, key in enumerate(self.description['camera_order']):
            raw = self.of(f'raw_image_{keys.index(key)}').numpy()
            tiling = None if dims.tiles is None else dims.tiles[camera]
            picture = tiled(raw, dims.image_sizes[camera], tiling)
            out = np.empty((3, *picture.shape[:2]), np.float32)
            found.append(torch.from_numpy(to_plain_pixels(picture, signed_table(), out)))
        return found

    def image_tokens(self) -> Tensor:
        """(V, N, W), zeros behind those of a smaller image."""
        each = [self.network.vision(picture[None])[0] for picture in self.pixels()]
        longest = max(map(len, each))
        return torch.stack(
            [torch.nn.functional.pad(one, (0, 0, 0, longest - len(one))) for one in each]
        )

    def prefix(self) -> Mapping[str, Tensor]:
        seen = torch.ones(self.network.dims.cameras, dtype=torch.bool)
        return self.network.prefix(self.image_tokens(), seen, **self.rows())


def dims_of_case(d: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> MolmoAct2Dims:
    """Our dimensions of a case's description."""
    assert d['v_eps'] == 1e-6
    ids, images, mask = (
        tensors[name] for name in ('input_ids', 'token_type_ids', 'attention_mask')
    )
    # Of the longest prompt; places of images are the same in all.
    longest = int(mask.sum(dim=1).argmax())
    image = images[longest].bool()
    starts = torch.nonzero(image & ~torch.nn.functional.pad(image, (1, 0))[:-1])[:, 0].tolist()
    overlaps = d['crop_mode'] != 'resize'
    edge, margins = d['image'][0], tuple(d['overlap_margins'])
    sizes = [d['images'][d['camera_keys'].index(key)] for key in d['camera_order']]
    token, hides = d['token_ids'], d['hf_action_mode'] == 'both'
    text = ids[longest][mask[longest].bool() & ~image].tolist()
    return MolmoAct2Dims(
        vision=TowerDims(
            width=d['v_hidden'],
            depth=d['vision_layers_kept'],
            num_heads=d['v_heads'],
            num_kv_heads=d['v_kv_heads'],
            head_dim=d['v_head_dim'],
            mlp_dim=d['v_mlp'],
            patch_size=d['patch'],
            positions=int(d['v_positions'] ** 0.5),
            image_size=edge,
            layers=tuple(one % d['v_layers'] + 1 for one in d['vit_layers']),
        ),
        pooling=PoolingDims(
            width=d['pool_hidden'],
            num_heads=d['pool_heads'],
            num_kv_heads=d['pool_kv_heads'],
            head_dim=d['pool_head_dim'],
            mlp_dim=d['pool_mlp'],
            window=tuple(d['pooling']),
            masked=d['pooling_attention_mask'],
        ),
        language=LanguageDims(
            width=d['width'],
            depth=d['depth'],
            mlp_dim=d['mlp_dim'],
            num_heads=d['num_heads'],
            num_kv_heads=d['num_kv_heads'],
            head_dim=d['head_dim'],
            head_norm=HEAD_NORMS[d['qk_norm_type'] if d['use_qk_norm'] else ''],
            norm_after=d['norm_after'],
            bias=d['qkv_bias'],
        ),
        expert=ActionExpertDims(
            width=d['e_width'],
            depth=d['depth'],
            num_heads=d['e_heads'],
            mlp_dim=d['e_mlp_dim'],
            time_width=d['time_dim'],
            context_norm=d['context_layer_norm'],
            head_norm=d['e_qk_norm'],
        ),
        vocabulary=d['vocab'] + d['additional_vocab'],
        cameras=len(d['camera_order']),
        image_places=tuple(int((mask[longest].bool() & ~image)[:start].sum()) for start in starts),
        image_ids=ImageIds(
            patch=token['image_patch_id'],
            start=token['image_start_token_id'],
            end=token['image_end_token_id'],
            column=token['image_col_id'],
            low_start=token['low_res_image_start_token_id'],
        ),
        prompt_length=int((mask[longest].bool() & ~image).sum()),
        horizon=d['chunk'],
        action_dim=d['action_dim_max'],
        real_actions=d['action_dim'],
        tilings=tuple(
            choose_tiling(
                tuple(size),
                edge - sum(margins) * d['patch'],
                sum(margins) * d['patch'],
                d['max_crops'],
            )
            for size in sizes
        )
        if overlaps
        else None,
        most_tiles=d['max_crops'] if overlaps else 1,
        margins=margins if overlaps else (1, 1),
        columns=d['col_tokens'],
        low_columns=d['col_tokens']
        if d['single_crop_col_tokens'] is None
        else d['single_crop_col_tokens'],
        hides_first=hides and text[0] == token['eos_token_id'],
        hidden_end=text[::-1].index(token['eos_token_id']) + 1 if hides else 0,
        rope_base=d['rope_theta'],
        rms_epsilon=d['rms_eps'],
    )


HEAD_NORMS = {'qwen3': 'each', 'olmo': 'together', '': 'none'}


@lru_cache(maxsize=8)
def load_molmoact2_case(path: Path, b: int) -> MolmoAct2Case:
    description = json.loads(path.read_text())
    tensors = load_file(path.with_suffix('.case.safetensors'))
    dims = dims_of_case(description, tensors)
    weights = {}
    found = our_weights(path, NAMES)
    found[TABLES[0]] = torch.cat([found.pop(name) for name in TABLES])
    for name, tensor in found.items():
        if PACKED in name:
            heads = dims.language.num_heads, dims.language.num_kv_heads
            for part, first, count in parts_of(len(tensor), *heads):
                weights[name.replace(PACKED, f'.{part}.')] = tensor[first : first + count]
        else:
            weights[name] = tensor
    network = build_network('molmoact2', dims)
    assert isinstance(network, MolmoAct2)
    network.load_state_dict(weights)
    return MolmoAct2Case(description, tensors, network.eval().requires_grad_(False), b)
