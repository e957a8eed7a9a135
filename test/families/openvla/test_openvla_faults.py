"""Faults in OpenVLA's networks: the receipt of right ONNX files finds each of them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from network_cases import network_case_paths
from onnx_bundles import sessions_opened_once, write_onnx_once  # noqa: F401
from openvla_cases import load_openvla_case
from openvla_folders import STATE, options_of, write_folder
from torch import Tensor

from vla_runtime.bundle.schema import BundleSpec
from vla_runtime.export.conversion import plan_export, write_export
from vla_runtime.export.onnx.verification import verify_onnx
from vla_runtime.export.receipt import VerificationError
from vla_runtime.families.blocks import gelu_vision
from vla_runtime.families.openvla import networks
from vla_runtime.families.openvla.networks import OpenVla
from vla_runtime.families.openvla.towers import Tower
from vla_runtime.families.token_network import TokenCache
from vla_runtime.policy import Policy
from vla_runtime.types import Observation

pytestmark = [pytest.mark.cases, pytest.mark.usefixtures('sessions_opened_once')]
PATHS = network_case_paths('openvla_full')
Patch = Callable[[pytest.MonkeyPatch], None]


@pytest.fixture(scope='module', params=PATHS, ids=[path.stem for path in PATHS])
def exported(request, tmp_path_factory) -> tuple[Path, BundleSpec, Path]:
    """Right files, not to be changed; made before anything is patched."""
    folder = tmp_path_factory.mktemp('openvla')
    source = write_folder(folder / 'policy', request.param)
    made = write_export(
        plan_export(source, options_of(request.param), default_name='tiny'),
        folder / 'bundle',
        finish=lambda target, spec: write_onnx_once(target, spec, 'float32'),
    )
    return folder / 'bundle', made.spec, request.param


def test_onnx_runtime_makes_the_cases_actions(exported):
    folder, _, path = exported
    case = load_openvla_case(path)
    with closing(Policy.load(folder, backend='onnxruntime')) as policy:
        for request in case.requests:
            chunk, _ = policy.infer(
                Observation(
                    images={'image': case.tensors[f'raw_image_{request}'].numpy()},
                    state=np.zeros(len(STATE)),
                    instruction=case.description['instructions'][request],
                )
            )
            expected = case.tensors['actions_set_one'][request].numpy()
            assert np.abs(chunk.actions[0] - expected).max() <= 1e-5


def test_right_files_pass(exported):
    folder, spec, _ = exported
    assert verify_onnx(folder, spec).failures == []


def tanh_gelu(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(gelu_vision.F, 'gelu', lambda x: torch.ops.aten.gelu(x, approximate='tanh'))


def position_on_the_class_token(patch: pytest.MonkeyPatch) -> None:
    embed = Tower.embed

    def wrong(self: Tower, pixels: Tensor) -> Tensor:
        x = embed(self, pixels)
        if self.registers is None:
            return x
        beside = torch.zeros_like(x)
        beside[:, 0] = self.position_embedding[:, 0]
        return x + beside

    patch.setattr(Tower, 'embed', wrong)


def means_exchanged(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        'vla_runtime.families.openvla.towers._normalised', lambda pixels, mean, std: pixels
    )


def first_logits_a_place_early(patch: pytest.MonkeyPatch) -> None:
    end = OpenVla._prompt_end
    patch.setattr(OpenVla, '_prompt_end', lambda self, mask: end(self, mask) - 1)


def another_rope_base(patch: pytest.MonkeyPatch) -> None:
    rotary = networks.rotary
    patch.setattr(networks, 'rotary', lambda at, size, base: rotary(at, size, base * 1.1))


def padding_seen(patch: pytest.MonkeyPatch) -> None:
    read = OpenVla.read_token

    def wrong(self: OpenVla, token: Tensor, number: int, cache: TokenCache):
        return read(self, token, number, cache._replace(seen=torch.ones_like(cache.seen)))

    patch.setattr(OpenVla, 'read_token', wrong)


def tokens_not_kept(patch: pytest.MonkeyPatch) -> None:
    read = OpenVla.read_token

    def wrong(self: OpenVla, token: Tensor, number: int, cache: TokenCache):
        logits, _ = read(self, token, number, cache)
        return logits, cache

    patch.setattr(OpenVla, 'read_token', wrong)


def every_token_at_one_position(patch: pytest.MonkeyPatch) -> None:
    rotary = networks.rotary

    def wrong(at: Tensor, size: int, base: float):
        return rotary(at * 0 if at.shape[1] == 1 else at, size, base)

    patch.setattr(networks, 'rotary', wrong)


def whole_vocabulary(patch: pytest.MonkeyPatch) -> None:
    decode = OpenVla.decode
    patch.setattr(OpenVla, 'decode', lambda self, tokens: decode(self, tokens + 64))


def a_bin_too_low(patch: pytest.MonkeyPatch) -> None:
    decode = OpenVla.decode
    patch.setattr(OpenVla, 'decode', lambda self, tokens: decode(self, tokens + 1))


FAULTS: tuple[Patch, ...] = (
    tanh_gelu,
    position_on_the_class_token,
    means_exchanged,
    first_logits_a_place_early,
    another_rope_base,
    padding_seen,
    tokens_not_kept,
    every_token_at_one_position,
    whole_vocabulary,
    a_bin_too_low,
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
