"""BitVLA."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from bitvla_cases import load_bitvla_case
from torch import Tensor
from torch.nn import functional as F

from family_contracts.declaration import Case, FamilyContract, Fault, OtherDims, Patched
from family_contracts.robot import CAMERAS, places_of
from vla_runtime.bundle.schema import CropSpec, ImageSpec
from vla_runtime.declarations.bitvla import BitVlaDims
from vla_runtime.family.dimensions import DecoderDims, VisionDims
from vla_runtime.models import bitvla as networks
from vla_runtime.models.base import parallel_network
from vla_runtime.models.bitvla import BitVla, TernaryMlp
from vla_runtime.models.blocks import siglip, ternary
from vla_runtime.models.blocks.attention import rotary
from vla_runtime.models.blocks.ternary import TernaryLinear

TOKENIZER = 'bitvla_tokenizer.json'


def tiny(horizon: int) -> BitVlaDims:
    places = places_of('bitvla', TOKENIZER)
    return BitVlaDims(
        vision=VisionDims(width=24, depth=1, num_heads=2, mlp_dim=32, patch_size=7, image_size=28),
        language=DecoderDims(
            width=40, depth=2, mlp_dim=48, num_heads=4, num_kv_heads=2, head_dim=10
        ),
        vocabulary=264,
        cameras=len(CAMERAS),
        image_places=places,
        state_place=places[-1],
        prompt_length=places[-1] + 160,
        stop_token=257,
        horizon=horizon,
        action_dim=6,
        state_dim=5,
        head_width=36,
    )


def case(path: Path, b: int) -> Case:
    """Codes are rounded: in some cases one on the edge goes the other way, and moves all behind."""
    found = load_bitvla_case(path)
    of, exact = found.tensors, path.stem.endswith(('_a', '_b'))
    hidden = of[f'action_hidden_{b}'].view(1, found.network.dims.horizon, -1)
    return Case(
        network=found.network,
        steps=1,
        pixels=of[f'pixel_values_{b}'],
        image_mask=found.visible(),
        rows=found.rows(b),
        actions=of[f'normalized_actions_{b}'] if exact else None,
        image_tokens=of[f'image_features_{b}'],
        past={'action_features': hidden} if exact else {},
    )


def past(dims: BitVlaDims) -> Mapping[str, tuple[int, ...]]:
    return {'action_features': (1, dims.horizon, dims.action_dim * dims.language.width)}


_EMBED = BitVla.embed_prefix


def cameras_turned(self: Any, image_tokens: Tensor, image_mask: Tensor, *rows: Tensor) -> Any:
    turned = [torch.cat([part[1:], part[:1]]) for part in (image_tokens, image_mask)]
    return _EMBED(self, *turned, *rows)


def placeholders_embedded(self: Any, *given: Tensor, **rows: Tensor) -> Any:
    """The places are token 1 in the ids; their embeddings are zero."""
    embeddings, mask = _EMBED(self, *given, **rows)
    embeddings[:, -1 - self.dims.action_places : -1] = self.language.embed(torch.tensor([1]))
    return embeddings, mask


def float_activations(self: TernaryLinear, x: Tensor) -> Tensor:
    weights = ternary.unpack(self.packed, self.in_features).float() * self.weight_scale
    return F.linear(x, weights, self.bias)


_QUANTISE, _PRODUCT, _ATTEND, _READ = (
    *(ternary.quantise_tokens, TernaryLinear.product),
    *(networks.attend, BitVla.read),
)


def scaled_by(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """Codes of tokens by other scales."""

    def wrong(x: Tensor) -> tuple[Tensor, Tensor]:
        scale = change(_QUANTISE(x)[1])
        return (x.float() * scale).round().clamp(-128, 127).to(torch.int8), scale

    return wrong


def one_scale_a_tensor(scale: Tensor) -> Tensor:
    return scale.amin().expand(scale.shape).contiguous()


def scale_of_the_first_row(self: TernaryLinear, codes: Tensor, scale: Tensor) -> Tensor:
    return _PRODUCT(self, codes, scale[..., :1, :].expand(scale.shape))


def causal(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    length = k.shape[2]
    lower = torch.ones(1, length, length, dtype=torch.bool, device=k.device).tril()
    return _ATTEND(q, k, v, torch.logical_and(seen, lower))


def read_in_place(self: BitVla, embeddings: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    x, positions = _READ(self, embeddings, mask)
    return torch.roll(x, -1, dims=1), positions


def padding_seen(self: BitVla, embeddings: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    return _READ(self, embeddings, torch.ones_like(mask))


def relu_not_squared(self: TernaryMlp, x: Tensor) -> Tensor:
    gate, up = networks.apply_together((self.gate, self.up), x)
    return self.down(self.norm(F.relu(gate) * up))


def no_norm_before_the_last_product(self: TernaryMlp, x: Tensor) -> Tensor:
    gate, up = networks.apply_together((self.gate, self.up), x)
    return self.down(F.relu(gate).square() * up)


def tanh_gelu(x: Tensor, **_: Any) -> Tensor:
    return torch.ops.aten.gelu(x, approximate='tanh')


def faults() -> Mapping[str, Fault]:
    prefix: dict[str, tuple[Any, str, Any]] = {
        'cameras turned': (BitVla, 'embed_prefix', cameras_turned),
        'placeholders embedded': (BitVla, 'embed_prefix', placeholders_embedded),
        'float activations': (TernaryLinear, 'forward', float_activations),
        'a scale of 126': (ternary, 'quantise_tokens', scaled_by(lambda s: s * (126 / 127))),
        'one scale a tensor': (ternary, 'quantise_tokens', scaled_by(one_scale_a_tensor)),
        'scale of the first row': (TernaryLinear, 'product', scale_of_the_first_row),
        'causal': (networks, 'attend', causal),
        'read in place': (BitVla, 'read', read_in_place),
        'padding seen': (BitVla, 'read', padding_seen),
        'ReLU not squared': (TernaryMlp, 'forward', relu_not_squared),
        'no norm before the last product': (
            *(TernaryMlp, 'forward'),
            no_norm_before_the_last_product,
        ),
    }
    vision: dict[str, tuple[Any, str, Any]] = {
        'tanh in the projector': (siglip.F, 'gelu', tanh_gelu),
        'exact GELU in the tower': (networks, 'gelu_tanh', F.gelu),
    }
    planted: dict[str, Fault] = {
        name: Patched(*of, file, quick=number < 2)  # type: ignore[arg-type]
        for file, part in (('prefix.onnx', prefix), ('vision.onnx', vision))
        for number, (name, of) in enumerate(part.items())
    }
    return planted | {
        'the state a place later': OtherDims(
            lambda dims: replace(dims, state_place=dims.state_place + 1), 'prefix.onnx'
        ),
        'another rope base': OtherDims(
            lambda dims: replace(dims, rope_base=1.1 * dims.rope_base), 'prefix.onnx'
        ),
        'rope positions backwards': Patched(
            parallel_network, 'rotary', lambda p, *size: rotary(-p, *size), 'prefix.onnx'
        ),
    }


CONTRACTS = (
    FamilyContract(
        family='bitvla',
        tiny=tiny,
        case=case,
        bound=1e-5,
        template='bitvla',
        tokenizer=TOKENIZER,
        images=ImageSpec('crop', 'lanczos', CropSpec(28, 0.9)),
        norms_pass=True,
        parameters={'bitvla': 405_277_205},
        past=past,
        faults=faults,
    ),
)
