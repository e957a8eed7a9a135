"""OpenVLA-OFT; its cases are OpenVLA's, with what a plain network made of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from network_cases import network_case_paths
from oft_cases import (
    expected,
    expected_path,
    load_oft_case,
    observed,
    oft_options,
    write_oft_folder,
)
from torch import Tensor

from family_contracts.declaration import (
    Case,
    FamilyContract,
    Fault,
    Folder,
    OtherDims,
    Patched,
    Recorded,
)
from family_contracts.robot import CAMERAS, JOINTS
from vla_runtime.bundle.schema import CropSpec, ImageSpec
from vla_runtime.declarations.openvla import OPENVLA_OFT, OpenVlaOftDims
from vla_runtime.family.dimensions import DecoderDims, VisionDims
from vla_runtime.models import openvla as networks
from vla_runtime.models.base import parallel_network
from vla_runtime.models.base.parallel_network import HeadBlock
from vla_runtime.models.blocks import transformer
from vla_runtime.models.openvla import OpenVlaOft, Tower

KIND = 'openvla_full'


def tiny(horizon: int) -> OpenVlaOftDims:
    return OpenVlaOftDims(
        dino=VisionDims(width=20, depth=1, num_heads=2, mlp_dim=24, patch_size=7, image_size=28),
        siglip=VisionDims(width=24, depth=1, num_heads=3, mlp_dim=32, patch_size=7, image_size=28),
        dino_registers=2,
        projector_dim=36,
        language=DecoderDims(
            width=40, depth=2, mlp_dim=48, num_heads=4, num_kv_heads=4, head_dim=10
        ),
        vocabulary=384,
        prompt_length=112,
        action_dim=len(JOINTS) + 1,
        dino_mean=OPENVLA_OFT.dino_mean,
        dino_std=OPENVLA_OFT.dino_std,
        siglip_mean=OPENVLA_OFT.siglip_mean,
        siglip_std=OPENVLA_OFT.siglip_std,
        cameras=len(CAMERAS),
        horizon=horizon,
        state_dim=5,
        head_width=36,
    )


def case(path: Path, b: int) -> Case:
    if not expected_path(path).exists():
        pytest.skip('the case has no numbers of OFT')
    found, of = load_oft_case(path), expected(path)
    pixels = found.pixels(b)
    return Case(
        network=found.network,
        steps=1,
        pixels=list(pixels),
        image_mask=torch.ones(len(pixels), dtype=torch.bool),
        rows=found.rows(b),
        actions=of[f'actions_{b}'],
        image_tokens=[found.of.tensors[f'image_features_{number}'] for number in found.numbers(b)],
        past={'action_features': of[f'features_{b}']},
    )


def past(dims: OpenVlaOftDims) -> Mapping[str, tuple[int, ...]]:
    return {'action_features': (1, dims.horizon, dims.action_dim * dims.language.width)}


_EMBED, _READ, _ATTEND = OpenVlaOft.embed_prefix, OpenVlaOft.read, transformer.attend
_ROTARY, _TOWER, _BLOCK = parallel_network.rotary, Tower.embed, HeadBlock.forward
_PROMPT = OpenVlaOft.embed_prompt


def cameras_turned(self: Any, image_tokens: Tensor, image_mask: Tensor, *rows: Tensor) -> Any:
    turned = [torch.cat([part[1:], part[:1]]) for part in (image_tokens, image_mask)]
    return _EMBED(self, *turned, *rows)


def causal(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None) -> Tensor:
    if seen is None:
        # The towers'.
        return _ATTEND(q, k, v, seen)
    length = k.shape[2]
    lower = torch.ones(1, length, length, dtype=torch.bool, device=k.device).tril()
    return _ATTEND(q, k, v, torch.logical_and(seen, lower))


def read_in_place(self: Any, embeddings: Tensor, mask: Tensor) -> Any:
    x, positions = _READ(self, embeddings, mask)
    return torch.cat([x[:, 1:], x[:, :1]], dim=1), positions


def padding_seen(self: Any, embeddings: Tensor, mask: Tensor) -> Any:
    return _READ(self, embeddings, torch.ones_like(mask))


def state_at_the_end(
    self: Any, text: Tensor, token_mask: Tensor, images: Tensor, seen: Tensor, state: Tensor
) -> Any:
    embeddings, mask = _PROMPT(self, text, token_mask, images, seen, state)
    place = 1 + images.shape[1] * images.shape[2]
    order = (slice(0, place), slice(place + 1, None), slice(place, place + 1))
    return tuple(torch.cat([part[:, one] for one in order], dim=1) for part in (embeddings, mask))


def state_before_the_images(
    self: Any, text: Tensor, token_mask: Tensor, images: Tensor, seen: Tensor, state: Tensor
) -> Any:
    embeddings, mask = _PROMPT(self, text, token_mask, images, seen, state)
    place = 1 + images.shape[1] * images.shape[2]
    order = (slice(0, 1), slice(place, place + 1), slice(1, place), slice(place + 1, None))
    return tuple(torch.cat([part[:, one] for one in order], dim=1) for part in (embeddings, mask))


def places_embedded(self: Any, *given: Tensor) -> Any:
    """The places are token 1 in the ids; their embeddings are zero."""
    embeddings, mask = _EMBED(self, *given)
    count = self.dims.action_places
    one = torch.ones(len(embeddings), count, dtype=torch.int64, device=embeddings.device)
    before, after = embeddings[:, : -1 - count], embeddings[:, -1:]
    return torch.cat([before, self.language.embed(one), after], dim=1), mask


def no_residual(self: HeadBlock, x: Tensor) -> Tensor:
    return _BLOCK(self, x) - x


def tanh_gelu(x: Tensor) -> Tensor:
    return torch.ops.aten.gelu(x, approximate='tanh')


def faults() -> Mapping[str, Fault]:
    vision: dict[str, tuple[Any, str, Any]] = {
        'tanh in the towers': (networks.F, 'gelu', tanh_gelu),
        'colours not normalised': (networks, '_normalised', lambda pixels, mean, std: pixels),
    }
    prefix: dict[str, tuple[Any, str, Any]] = {
        'cameras turned': (OpenVlaOft, 'embed_prefix', cameras_turned),
        'causal': (transformer, 'attend', causal),
        'read in place': (OpenVlaOft, 'read', read_in_place),
        'padding seen': (OpenVlaOft, 'read', padding_seen),
        'the state at the end': (OpenVlaOft, 'embed_prompt', state_at_the_end),
        'the state before the images': (OpenVlaOft, 'embed_prompt', state_before_the_images),
        'places embedded': (OpenVlaOft, 'embed_prefix', places_embedded),
        'rope positions backwards': (
            *(parallel_network, 'rotary'),
            lambda at, *size: _ROTARY(-at, *size),
        ),
    }
    head: dict[str, tuple[Any, str, Any]] = {
        'a head without its residuals': (HeadBlock, 'forward', no_residual),
    }
    parts = {'vision.onnx': vision, 'prefix.onnx': prefix, 'expert.onnx': head}
    planted: dict[str, Fault] = {
        name: Patched(*of, file, quick=number < 2)  # type: ignore[arg-type]
        for file, part in parts.items()
        for number, (name, of) in enumerate(part.items())
    }
    other = OtherDims(lambda dims: replace(dims, rope_base=1.1 * dims.rope_base), 'prefix.onnx')
    return {**planted, 'another rope base': other}


def folders() -> Mapping[str, Callable[[Path], Folder]]:
    return {
        path.stem: partial(folder, path)
        for path in network_case_paths(KIND)
        if expected_path(path).exists()
    }


def folder(path: Path, target: Path) -> Folder:
    found, of = load_oft_case(path), expected(path)
    recorded = [
        Recorded(
            seen=observed(path, found.description, b),
            noise=None,
            normalised=of[f'normalised_{b}'].float(),
            actions=of[f'robot_{b}'],
            tokens=found.of.tensors[f'input_ids_{b}'],
        )
        for b in found.requests
    ]
    written = write_oft_folder(target / 'policy', path)
    return Folder(written, oft_options(path), recorded, 1e-5)


CONTRACTS = (
    FamilyContract(
        family='openvla_oft',
        tiny=tiny,
        case=case,
        kind=KIND,
        bound=1e-5,
        template='openvla',
        tokenizer='openvla_full_a.tokenizer.json',
        images=ImageSpec('crop', 'lanczos', CropSpec(28, 0.9)),
        norms_pass=True,
        parameters={'openvla_oft': 7_534_758_567},
        past=past,
        faults=faults,
        folders=folders,
    ),
)
