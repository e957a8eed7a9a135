"""Faults in what GR00T N1.5 computes with indices: `verify` finds each of them.

The receipt compares right files with networks in which one computation is wrong. It cannot know
which of the two is, and the other way round each fault would need an export of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from onnx_bundles import (  # noqa: F401
    copy_bundle,
    exported,
    load_graph,
    save_graph,
    sessions_opened_once,
    tiny_onnx_bundle,
)
from onnx_faults import (
    position_in_half,
    positions_to_half,
    rotary_angles_rounded,
    rotary_cosines_rounded,
)
from thorough import thorough_but
from tiny_policy import tiny_spec
from torch import Tensor

from vla_runtime.bundle.folder import read_bundle
from vla_runtime.bundle.schema import BundleSpec
from vla_runtime.export.onnx.cases import seeded_cases
from vla_runtime.export.onnx.verification import verify_onnx
from vla_runtime.export.receipt import VerificationError
from vla_runtime.families.groot import eagle, time_table
from vla_runtime.families.groot.n15 import GrootN15
from vla_runtime.families.groot.vision import EagleVision

# The files are right and stay so; networks are patched.
pytestmark = pytest.mark.usefixtures('sessions_opened_once')

FAMILY = 'groot_n15'


@pytest.fixture(scope='module')
def policy() -> tuple[Path, BundleSpec]:
    """A tiny policy with its ONNX files, which are not to be changed."""
    bundle = tiny_onnx_bundle(FAMILY)
    return bundle, read_bundle(bundle).spec


def shuffle_columns_first(self: EagleVision, x: Tensor) -> Tensor:
    """Patches of a square column by column."""
    n, _, width = x.shape
    edge, few = self.edge, self.side // self.edge
    squares = x.view(n, few, edge, few, edge, width).permute(0, 1, 3, 4, 2, 5)
    return squares.reshape(n, few * few, edge * edge * width)


def shuffle_channels_first(self: EagleVision, x: Tensor) -> Tensor:
    """Channel-major squares, as N1.6 has them."""
    n, _, width = x.shape
    edge, few = self.edge, self.side // self.edge
    squares = x.view(n, few, edge, few, edge, width).permute(0, 1, 3, 5, 2, 4)
    return squares.reshape(n, few * few, edge * edge * width)


def positions_off_by_one(self: EagleVision) -> Tensor:
    return self.position_embedding.roll(1, 0)


def positions_turned(self: EagleVision) -> Tensor:
    """Patches column by column."""
    return self.position_embedding.view(self.side, self.side, -1).transpose(0, 1).flatten(0, 1)


RIGHT_ROTARY = eagle.rotary


def rope(change: Callable[[Tensor], Tensor], base: float = 1e6) -> Callable[..., object]:
    """Rotary positions from changed ones, with this base."""

    def wrong(positions: Tensor, head_dim: int, _: float) -> object:
        return RIGHT_ROTARY(change(positions), head_dim, base)

    return wrong


ON_NETWORK = {
    'pixel shuffle, columns first': (EagleVision, 'shuffled', shuffle_columns_first),
    'pixel shuffle, channels first': (EagleVision, 'shuffled', shuffle_channels_first),
    'patch positions off by one': (EagleVision, 'positions', positions_off_by_one),
    'patch positions column by column': (EagleVision, 'positions', positions_turned),
    'rope base of Llama': (eagle, 'rotary', rope(lambda p: p, base=10000.0)),
    'rope positions backwards': (eagle, 'rotary', rope(lambda p: -p)),
}


@pytest.mark.parametrize(
    'fault', thorough_but(['pixel shuffle, columns first', 'rope positions backwards'], ON_NETWORK)
)
def test_a_wrong_index_is_found(policy, monkeypatch, fault):
    monkeypatch.setattr(*ON_NETWORK[fault])
    failures = verify_onnx(*policy).failures
    part = 'prefix' if 'rope' in fault else 'vision'
    assert any(f'{part}.onnx' in line for line in failures), failures


@pytest.mark.parametrize(
    'fault', [rotary_angles_rounded, rotary_cosines_rounded, positions_to_half, position_in_half]
)
def test_a_rope_table_in_half_is_found(policy, tmp_path, fault):
    folder = copy_bundle(policy[0], tmp_path / 'changed')
    model = load_graph(folder, 'prefix.onnx')
    fault(model)
    save_graph(model, folder, 'prefix.onnx')
    with pytest.raises(VerificationError, match=r'prefix\.onnx'):
        verify_onnx(folder, policy[1])


def naive(times: np.ndarray) -> np.ndarray:
    return ((1.0 - np.asarray(times, np.float64)) * 1000).astype(np.int64)


def in_half(times: np.ndarray) -> np.ndarray:
    return ((1.0 - np.asarray(times, np.float16).astype(np.float64)) * 1000).astype(np.int64)


RIGHT = time_table.bucket
BUCKETS = {
    'in floats': naive,
    'in half precision': in_half,
    'off by one': lambda times: RIGHT(times) + 1,
    'not turned round': lambda times: 1000 - RIGHT(times),
}


@pytest.mark.thorough
def test_a_wrong_bucket_in_the_time_table_is_found(tmp_path, monkeypatch):
    # With the published 4 steps a bucket computed in floats is right, with 5 it is wrong.
    spec = replace(tiny_spec(FAMILY), denoise_steps=4)
    folder = exported(tmp_path / 'four', spec)
    assert verify_onnx(folder, spec).failures == []
    for name, bucket in BUCKETS.items():
        with monkeypatch.context() as patch:
            patch.setattr(time_table, 'bucket', bucket)
            # The table is the same in every case.
            failures = verify_onnx(folder, spec, cases=seeded_cases(folder, spec)[:1]).failures
        assert any(line.startswith('time table') for line in failures), (name, failures)


@pytest.mark.thorough
def test_a_bucket_off_by_one_is_found_in_a_half(monkeypatch):
    # Its error, 0.08, is within bfloat16's bound of tensors.
    folder = tiny_onnx_bundle(FAMILY, 'bfloat16')
    spec = read_bundle(folder).spec
    cases = seeded_cases(folder, spec)[:1]
    assert verify_onnx(folder, spec, cases=cases).failures == []
    monkeypatch.setattr(time_table, 'bucket', lambda times: RIGHT(times) + 1)
    failures = verify_onnx(folder, spec, cases=cases).failures
    assert any('the bound for float32 is 5e-05' in line for line in failures), failures


def test_images_at_another_place_of_the_prompt_are_found(policy):
    folder, spec = policy
    first, second = spec.dims.image_places
    moved = replace(spec, dims=replace(spec.dims, image_places=(first, second + 1)))
    failures = verify_onnx(folder, moved).failures
    assert any('prefix.onnx' in line for line in failures), failures


def test_action_positions_off_by_one_are_found(policy, monkeypatch):
    right = GrootN15.embed_tokens

    def shifted(self, x, state, conditioning):
        tokens, modulation = right(self, x, state, conditioning)
        horizon = self.dims.horizon
        first, actions = tokens[:, :-horizon], tokens[:, -horizon:]
        actions = actions - self.positions[:horizon] + self.positions[1 : horizon + 1]
        return torch.cat([first, actions], dim=1), modulation

    monkeypatch.setattr(GrootN15, 'embed_tokens', shifted)
    failures = verify_onnx(*policy).failures
    assert any('expert.onnx' in line for line in failures), failures
