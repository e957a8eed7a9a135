"""pi0-FAST."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from network_cases import batch_entries
from pi0_fast_cases import load_pi0_fast_case, options_of, write_folder
from torch import Tensor
from torch.nn import functional as F

from family_contracts.declaration import Case, FamilyContract, Fault, Folder, Patched, Recorded
from family_contracts.robot import CAMERAS, JOINTS
from vla_runtime.declarations.pi0_fast import ACTION_TOKENIZER, Pi0FastDims
from vla_runtime.family.dimensions import DecoderDims, VisionDims
from vla_runtime.models.base import token_network
from vla_runtime.models.pi0_fast import Pi0Fast


def tiny(horizon: int) -> Pi0FastDims:
    return Pi0FastDims(
        vision=VisionDims(width=24, depth=1, num_heads=2, mlp_dim=32, patch_size=14, image_size=28),
        language=DecoderDims(
            width=32, depth=2, mlp_dim=48, num_heads=4, num_kv_heads=1, head_dim=8
        ),
        vocabulary=460,
        cameras=len(CAMERAS),
        prompt_length=96,
        horizon=horizon,
        action_dim=len(JOINTS),
        answer_tokens=20,
        skipped_tokens=20,
        action_scale=10.0,
        least_coefficient=-50.0,
    )


def case(path: Path, b: int) -> Case:
    found = load_pi0_fast_case(path)
    of = found.tensors
    pixels, seen = found.images(b)
    tokens, mask = found.prompt(b)
    places, steps = found.places(b), of['logits'].shape[1]
    return Case(
        network=found.network,
        steps=1,
        pixels=pixels,
        image_mask=seen,
        rows={'tokens': tokens, 'token_mask': mask},
        actions=of['chunk'][b],
        tokens=of['generated_tokens'][b, :steps],
        logits=of['logits'][b],
        image_tokens=[of[f'image_features_{camera}'][b] for camera in range(len(pixels))],
        past={
            'prefix_key': of['prefix_keys'][:, b : b + 1][..., places, :],
            'prefix_value': of['prefix_values'][:, b : b + 1][..., places, :],
            'logits': of['logits'][b, :1],
        },
    )


def past(dims: Pi0FastDims) -> Mapping[str, tuple[int, ...]]:
    language = dims.language
    keys = (language.depth, 1, language.num_kv_heads, dims.prefix_length, language.head_dim)
    return {
        'prefix_key': keys,
        'prefix_value': keys,
        'prefix_mask': (1, dims.prefix_length),
        'logits': (1, dims.vocabulary),
    }


_VIEW, _READ, _LOGITS = Pi0Fast.view, Pi0Fast.read_token, Pi0Fast.token_logits
_ROTARY = token_network.rotary


def causal_prompt(self: Pi0Fast, mask: Tensor) -> Any:
    right, length = _VIEW(self, mask), mask.shape[1]
    causal = torch.ones(1, length, length, dtype=torch.bool, device=mask.device).tril()
    return right._replace(sees=torch.logical_and(right.sees, causal))


def logits_of_the_first_token(self: Pi0Fast, mask: Tensor) -> Any:
    return _VIEW(self, mask)._replace(last=mask.sum(1) * 0)


def positions_count_padding(self: Pi0Fast, mask: Tensor) -> Tensor:
    return mask.to(torch.int64).sum(dim=[1]) * 0 + mask.shape[1]


def head_tied_to_the_table(self: Pi0Fast, x: Tensor) -> Tensor:
    normed = self.language.norm(x)
    table = self.language.embedding.weight
    return _LOGITS(self, x) if table.is_meta else F.linear(normed, table)


def late_places_lost(self: Pi0Fast, tokens: Tensor, place: Tensor, *more: Any) -> Any:
    """Of the far pass alone: the first ones are right."""
    return _READ(self, tokens, torch.where(place > 16, 16, place), *more)


def faults() -> Mapping[str, Fault]:
    prefix: dict[str, tuple[Any, str, Any]] = {
        'a causal prompt': (Pi0Fast, 'view', causal_prompt),
        'logits of the first token': (Pi0Fast, 'view', logits_of_the_first_token),
        'a head tied to the table': (Pi0Fast, 'token_logits', head_tied_to_the_table),
        'another rope base': (
            *(token_network, 'rotary'),
            lambda at, size, base: _ROTARY(at, size, base * 1.1),
        ),
    }
    answer: dict[str, tuple[Any, str, Any]] = {
        'positions that count padding': (Pi0Fast, 'answer_position', positions_count_padding),
        'late places lost': (Pi0Fast, 'read_token', late_places_lost),
    }
    return {
        name: Patched(*of, file, quick=number < 2)  # type: ignore[arg-type]
        for file, part in (('prefix.onnx', prefix), ('expert.onnx', answer))
        for number, (name, of) in enumerate(part.items())
    }


def folders() -> Mapping[str, Callable[[Path], Folder]]:
    return {f'{path.stem}-{b}': partial(folder, path, b) for path, b in batch_entries('pi0_fast')}


def folder(path: Path, b: int, target: Path) -> Folder:
    found = load_pi0_fast_case(path)
    tokens, mask = found.prompt(b)
    source = write_folder(target / 'policy', path)
    recorded = Recorded(
        seen=found.observation(b),
        noise=None,
        normalised=found.tensors['chunk'][b],
        actions=found.tensors['chunk_robot_units'][b],
        tokens=tokens[mask],
    )
    return Folder(source, options_of(path, source), [recorded])


CONTRACTS = (
    FamilyContract(
        family='pi0_fast',
        tiny=tiny,
        case=case,
        bound=2e-5,
        template='pi0_fast',
        tokenizer='pi0_fast_a.text_tokenizer.json',
        files={ACTION_TOKENIZER: 'pi0_fast_a.fast_tokenizer.json'},
        parameters={'pi0_fast': 3_449_982_704},
        past=past,
        faults=faults,
        folders=folders,
        gives_chunks=False,
    ),
)
