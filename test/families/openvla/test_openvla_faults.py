"""Faults in OpenVLA's networks: the receipt of right ONNX files finds each of them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

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
from vla_runtime.export.onnx.export import write_onnx
from vla_runtime.export.onnx.verification import verify_onnx
from vla_runtime.export.receipt import VerificationError
from vla_runtime.families import token_network
from vla_runtime.families.blocks import gelu_vision
from vla_runtime.families.openvla.networks import OpenVla
from vla_runtime.families.openvla.towers import Tower
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
    view = OpenVla.view

    def wrong(self: OpenVla, mask: Tensor):
        right = view(self, mask)
        return right._replace(last=right.last - 1)

    patch.setattr(OpenVla, 'view', wrong)


def another_rope_base(patch: pytest.MonkeyPatch) -> None:
    rotary = token_network.rotary
    patch.setattr(token_network, 'rotary', lambda at, size, base: rotary(at, size, base * 1.1))


def read_wrong(change: Callable[..., Any]) -> Patch:
    """Patch a pass: `change` gets its arguments and outputs, and returns the outputs."""

    def apply(patch: pytest.MonkeyPatch) -> None:
        read = OpenVla.read_token

        def wrong(self: OpenVla, tokens, place, past, key, value):
            return change(partial(read, self), tokens, place, past, key, value)

        patch.setattr(OpenVla, 'read_token', wrong)

    return apply


def padding_seen(patch: pytest.MonkeyPatch) -> None:
    position = OpenVla.answer_position

    def change(read, tokens, place, past, key, value):
        # Positions still count the prompt.
        right = position(read.args[0], past['prefix_mask'])
        everything = {**past, 'prefix_mask': torch.ones_like(past['prefix_mask'])}
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(OpenVla, 'answer_position', lambda self, mask: right)
            return read(tokens, place, everything, key, value)

    read_wrong(change)(patch)


def tokens_not_kept(patch: pytest.MonkeyPatch) -> None:
    def change(read, tokens, place, past, key, value):
        found = read(tokens, place, past, key, value)
        return found._replace(key=torch.zeros_like(found.key))

    read_wrong(change)(patch)


def answer_is_blind_to_its_tokens(patch: pytest.MonkeyPatch) -> None:
    def change(read, tokens, place, past, key, value):
        return read(tokens, place, past, torch.zeros_like(key), value)

    read_wrong(change)(patch)


def place_stops_at_the_fourth(patch: pytest.MonkeyPatch) -> None:
    """The first passes are right, the later ones read the place before theirs."""

    def change(read, tokens, place, past, key, value):
        return read(tokens, torch.where(place < 4, place, 3), past, key, value)

    read_wrong(change)(patch)


def last_pass_at_the_position_before(patch: pytest.MonkeyPatch) -> None:
    def change(read, tokens, place, past, key, value):
        last = key.shape[0] - 1
        position = OpenVla.answer_position
        shift = torch.where(place == last, 1, 0)
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(
                OpenVla, 'answer_position', lambda self, mask: position(self, mask) - shift
            )
            return read(tokens, place, past, key, value)

    read_wrong(change)(patch)


def every_token_at_one_position(patch: pytest.MonkeyPatch) -> None:
    rotary = token_network.rotary

    def wrong(at: Tensor, size: int, base: float):
        return rotary(at * 0 if at.shape[1] == 1 else at, size, base)

    patch.setattr(token_network, 'rotary', wrong)


def second_likeliest(patch: pytest.MonkeyPatch) -> None:
    def change(read, tokens, place, past, key, value):
        found = read(tokens, place, past, key, value)
        return found._replace(token=found.token + 1)

    read_wrong(change)(patch)


FAULTS: tuple[Patch, ...] = (
    tanh_gelu,
    position_on_the_class_token,
    means_exchanged,
    first_logits_a_place_early,
    another_rope_base,
    padding_seen,
    tokens_not_kept,
    answer_is_blind_to_its_tokens,
    place_stops_at_the_fourth,
    last_pass_at_the_position_before,
    every_token_at_one_position,
)


def test_a_graph_that_names_another_token_is_found(exported, tmp_path: Path, monkeypatch):
    """Such a fault is in the files alone: PyTorch's own tokens are those of its logits."""
    folder, spec, _ = exported
    target = tmp_path / 'bundle'
    shutil.copytree(folder, target)
    shutil.rmtree(target / 'onnx')
    second_likeliest(monkeypatch)
    write_onnx(target, spec, 'float32')
    assert any("'token'" in line for line in verify_onnx(target, spec).failures)


@pytest.mark.parametrize('fault', FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_is_found(exported, monkeypatch: pytest.MonkeyPatch, fault: Patch):
    folder, spec, _ = exported
    fault(monkeypatch)
    try:
        failures = verify_onnx(folder, spec).failures
    except VerificationError as error:
        failures = [str(error)]
    assert failures
