"""Faults in BitVLA's networks: the receipt of right ONNX files finds each of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from bitvla_folders import options_of, write_folder
from network_cases import network_case_paths
from onnx_bundles import sessions_opened_once, write_onnx_once  # noqa: F401
from test_bitvla_checkpoint import observation
from torch import Tensor
from torch.nn import functional as F

from vla_convert.export.conversion import plan_export, write_export
from vla_convert.export.onnx.ternary import ENDING
from vla_convert.export.onnx.verification import verify_onnx
from vla_convert.export.receipt import VerificationError
from vla_runtime.bundle.onnx_files import ONNX_FOLDER
from vla_runtime.bundle.schema import BundleSpec
from vla_runtime.families import parallel_network
from vla_runtime.families.bitvla import networks
from vla_runtime.families.bitvla.networks import BitVla, TernaryMlp
from vla_runtime.families.blocks import siglip, ternary
from vla_runtime.families.blocks.ternary import TernaryLinear
from vla_runtime.policy import Policy

pytestmark = [pytest.mark.cases, pytest.mark.usefixtures('sessions_opened_once')]
PATHS = network_case_paths('bitvla')
Patch = Callable[[pytest.MonkeyPatch], None]


@pytest.fixture(scope='module', params=PATHS, ids=[path.stem for path in PATHS])
def exported(request, tmp_path_factory) -> tuple[Path, BundleSpec, Path]:
    """Right files, not to be changed; made before anything is patched."""
    folder = tmp_path_factory.mktemp('bitvla')
    source = write_folder(folder / 'policy', request.param)
    made = write_export(
        plan_export(source, options_of(request.param), default_name='tiny'),
        folder / 'bundle',
        finish=lambda target, spec: write_onnx_once(target, spec, 'float32'),
    )
    return folder / 'bundle', made.spec, request.param


def test_onnx_runtime_makes_pytorchs_actions(exported):
    folder, _, path = exported
    seen = observation(json.loads(path.read_text()))
    chunks = []
    for backend in ('torch', 'onnxruntime'):
        with closing(Policy.load(folder, backend=backend)) as policy:
            chunks.append(policy.infer(seen)[0].actions)
    found, expected = chunks
    # A code on the edge between two moves the actions by up to this.
    assert np.abs(found - expected).max() <= 0.1 * max(1.0, np.abs(expected).max())
    assert np.abs(found - expected).mean() <= 0.02


def test_right_files_pass_and_hold_whole_numbers(exported):
    folder, spec, _ = exported
    receipt = verify_onnx(folder, spec)
    assert receipt.failures == []
    assert {item.tensor for item in receipt.tensors} >= {'codes', 'image_tokens'}
    graph = onnx.load(folder / ONNX_FOLDER / 'prefix.onnx', load_external_data=False).graph
    ternaries = [item for item in graph.initializer if item.name.endswith(ENDING)]
    # Queries, keys and values are one product, and so are gate and up.
    assert len(ternaries) == 4 * spec.dims.language.depth
    assert {item.data_type for item in ternaries} == {onnx.TensorProto.INT8}


def float_activations(patch: pytest.MonkeyPatch) -> None:
    def forward(self: TernaryLinear, x: Tensor) -> Tensor:
        weights = ternary.unpack(self.packed, self.in_features).float() * self.weight_scale
        return F.linear(x, weights, self.bias)

    patch.setattr(TernaryLinear, 'forward', forward)
    together = lambda layers, x: [layer(x) for layer in layers]  # noqa: E731
    for module in (networks,):
        patch.setattr(module, 'apply_together', together)


def a_scale_of_126(patch: pytest.MonkeyPatch) -> None:
    patch_codes(patch, lambda x, scale: (x * scale * (126 / 127), scale * (126 / 127)))


def one_scale_a_tensor(patch: pytest.MonkeyPatch) -> None:
    def wrong(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        least = scale.amin().expand(scale.shape).contiguous()
        return x * least, least

    patch_codes(patch, wrong)


def patch_codes(
    patch: pytest.MonkeyPatch, change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
) -> None:
    right = ternary.quantise_tokens

    def wrong(x: Tensor) -> tuple[Tensor, Tensor]:
        _, scale = right(x)
        scaled, scale = change(x.float(), scale)
        return scaled.round().clamp(-128, 127).to(torch.int8), scale

    patch.setattr(ternary, 'quantise_tokens', wrong)


def scale_of_the_first_row(patch: pytest.MonkeyPatch) -> None:
    product = TernaryLinear.product

    def wrong(self: TernaryLinear, codes: Tensor, token_scale: Tensor) -> Tensor:
        return product(self, codes, token_scale[..., :1, :].expand(token_scale.shape))

    patch.setattr(TernaryLinear, 'product', wrong)


def tanh_gelu_in_the_projector(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(siglip.F, 'gelu', lambda x, **_: torch.ops.aten.gelu(x, approximate='tanh'))


def exact_gelu_in_the_tower(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(networks, 'gelu_tanh', F.gelu)


def another_rope_base(patch: pytest.MonkeyPatch) -> None:
    rotary = parallel_network.rotary
    patch.setattr(parallel_network, 'rotary', lambda at, size, base: rotary(at, size, base * 1.1))


def causal(patch: pytest.MonkeyPatch) -> None:
    attend = networks.attend

    def wrong(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        length = k.shape[2]
        lower = torch.ones(1, length, length, dtype=torch.bool, device=k.device).tril()
        return attend(q, k, v, torch.logical_and(seen, lower))

    patch.setattr(networks, 'attend', wrong)


def read_in_place(patch: pytest.MonkeyPatch) -> None:
    read = BitVla.read

    def wrong(self: BitVla, embeddings: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        x, positions = read(self, embeddings, mask)
        return torch.roll(x, -1, dims=1), positions

    patch.setattr(BitVla, 'read', wrong)


def relu_not_squared(patch: pytest.MonkeyPatch) -> None:
    def forward(self: TernaryMlp, x: Tensor) -> Tensor:
        gate, up = networks.apply_together((self.gate, self.up), x)
        return self.down(self.norm(F.relu(gate) * up))

    patch.setattr(TernaryMlp, 'forward', forward)


def no_norm_before_the_last_product(patch: pytest.MonkeyPatch) -> None:
    def forward(self: TernaryMlp, x: Tensor) -> Tensor:
        gate, up = networks.apply_together((self.gate, self.up), x)
        return self.down(F.relu(gate).square() * up)

    patch.setattr(TernaryMlp, 'forward', forward)


def padding_seen(patch: pytest.MonkeyPatch) -> None:
    read = BitVla.read
    patch.setattr(BitVla, 'read', lambda self, x, mask: read(self, x, torch.ones_like(mask)))


def state_a_place_late(patch: pytest.MonkeyPatch) -> None:
    embed = BitVla.embed_prefix

    def wrong(self: BitVla, *given: Tensor, **rows: Tensor) -> tuple[Tensor, Tensor]:
        right = self.dims
        object.__setattr__(right, 'state_place', right.state_place + 1)
        try:
            return embed(self, *given, **rows)
        finally:
            object.__setattr__(right, 'state_place', right.state_place - 1)

    patch.setattr(BitVla, 'embed_prefix', wrong)


def placeholders_embedded(patch: pytest.MonkeyPatch) -> None:
    embed = BitVla.embed_prefix

    def wrong(self: BitVla, *given: Tensor, **rows: Tensor) -> tuple[Tensor, Tensor]:
        embeddings, mask = embed(self, *given, **rows)
        embeddings[:, -1 - self.dims.action_places : -1] = self.language.embed(torch.tensor([1]))
        return embeddings, mask

    patch.setattr(BitVla, 'embed_prefix', wrong)


FAULTS: tuple[Patch, ...] = (
    float_activations,
    a_scale_of_126,
    one_scale_a_tensor,
    scale_of_the_first_row,
    tanh_gelu_in_the_projector,
    exact_gelu_in_the_tower,
    another_rope_base,
    causal,
    read_in_place,
    relu_not_squared,
    no_norm_before_the_last_product,
    padding_seen,
    state_a_place_late,
    placeholders_embedded,
)


@pytest.mark.parametrize('fault', FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_is_found(exported, monkeypatch: pytest.MonkeyPatch, fault: Patch):
    folder, spec, _ = exported
    fault(monkeypatch)
    try:
        failures = verify_onnx(folder, spec).failures
    except VerificationError as error:
        failures = [str(error)]
    assert failures
