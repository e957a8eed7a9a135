"""Faults in what SmolVLA computes with indices: `verify` finds each of them.

The receipt compares right files with networks in which one computation is wrong. It cannot know
which of the two is, and the other way round each fault would need an export of its own. The image
has 25 patches a side: there the bucket rule of patch positions uses a row twice.
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
)
from onnx_faults import (
    position_in_half,
    positions_to_half,
    rotary_angles_rounded,
    rotary_cosines_rounded,
)
from thorough import thorough_after
from tiny_policy import tiny_spec
from torch import Tensor

from vla_runtime.bundle.schema import BundleSpec
from vla_runtime.export.onnx.verification import verify_onnx
from vla_runtime.export.receipt import VerificationError
from vla_runtime.families.blocks.attention import Rotary, rotary
from vla_runtime.families.smolvla import flow_policy, vision
from vla_runtime.families.smolvla.dimensions import SmolVlaDims
from vla_runtime.families.smolvla.flow_policy import SmolVla
from vla_runtime.families.smolvla.vision import SmolVlmVision, position_rows

# The files are right and stay so; networks are patched.
pytestmark = pytest.mark.usefixtures('sessions_opened_once')

SIDE = 25


def spec_of_side() -> BundleSpec:
    spec = tiny_spec('smolvla')
    assert isinstance(spec.dims, SmolVlaDims)
    eyes = replace(spec.dims.vision, patch_size=2, image_size=2 * SIDE)
    return replace(spec, dims=replace(spec.dims, vision=eyes, pixel_shuffle=5))


@pytest.fixture(scope='module')
def policy(tmp_path_factory) -> tuple[Path, BundleSpec]:
    """Right files, not to be changed; made before anything is patched."""
    spec = spec_of_side()
    return exported(tmp_path_factory.mktemp('smolvla') / 'policy', spec), spec


def test_right_files_pass(policy):
    assert position_rows(SIDE) != list(range(SIDE))
    assert verify_onnx(*policy).failures == []


# --- rows of the position table ---------------------------------------------------------------


def exact(side: int) -> list[int]:
    """Buckets without rounding."""
    return list(range(side))


def in_half(side: int) -> list[int]:
    step = np.float16(1) / np.float16(side)
    bounds = np.arange(1, side, dtype=np.float16) * step
    places = np.arange(side, dtype=np.float16) * step
    return [int(row) for row in np.searchsorted(bounds, places, side='right')]


def rounded_up(side: int) -> list[int]:
    """A place on a bound counted to the bucket before it."""
    places = np.arange(side, dtype=np.float32) * (np.float32(1) / np.float32(side))
    return [int(row) for row in np.searchsorted(vision._bounds(side), places, side='left')]


def bounds_rounded_once(side: int) -> list[int]:
    """Bounds as numpy's arange gives them, not as torch's."""
    step = np.float32(1) / np.float32(side)
    bounds = np.arange(step, 1, step, dtype=np.float32)
    places = np.arange(side, dtype=np.float32) * step
    found = np.searchsorted(bounds, places, side='right')
    return [int(row) for row in np.minimum(found, side - 1)]


def off_by_one(side: int) -> list[int]:
    return [min(row + 1, side - 1) for row in position_rows(side)]


@pytest.mark.parametrize(
    'wrong',
    thorough_after(2, [exact, in_half, rounded_up, bounds_rounded_once, off_by_one]),
    ids=lambda wrong: wrong.__name__,
)
def test_wrong_rows_of_the_position_table_are_found(policy, monkeypatch, wrong):
    assert wrong(SIDE) != position_rows(SIDE)
    monkeypatch.setattr(vision, 'position_rows', wrong)
    failures = verify_onnx(*policy).failures
    assert any(line.startswith('vision.onnx') for line in failures), failures


# --- pixel shuffle ----------------------------------------------------------------------------


def shuffled(*order: int) -> Callable[[SmolVlmVision, Tensor], Tensor]:
    def wrong(self: SmolVlmVision, patches: Tensor) -> Tensor:
        n, _, width = patches.shape
        edge, few = self.edge, self.side // self.edge
        cut = patches.view(n, few, edge, few, edge, width).permute(0, *order)
        return self.projector(cut.reshape(n, few * few, edge * edge * width)).float()

    return wrong


ORDERS = {
    'squares column by column': (3, 1, 2, 4, 5),
    'patches of a square column by column': (1, 3, 4, 2, 5),
    'channels first': (1, 3, 5, 2, 4),
    'patches row by row': (1, 2, 3, 4, 5),
}


@pytest.mark.parametrize('order', thorough_after(1, ORDERS))
def test_pixels_shuffled_in_another_order_are_found(policy, monkeypatch, order):
    monkeypatch.setattr(SmolVlmVision, 'project', shuffled(*ORDERS[order]))
    failures = verify_onnx(*policy).failures
    assert any(line.startswith('vision.onnx') for line in failures), failures


# --- rotary positions -------------------------------------------------------------------------


def in_the_prefix(change: Callable[[Tensor], Tensor]) -> Callable[..., Rotary]:
    """Rotary from changed positions, in the prefix alone."""

    def wrong(positions: Tensor, head_dim: int) -> Rotary:
        long = positions.shape[1] > spec_of_side().dims.horizon
        return rotary(change(positions) if long else positions, head_dim)

    return wrong


PREFIX = {
    'positions cumsum without -1': lambda p: p + 1,
    'positions that count hidden tokens': lambda p: torch.ones_like(p).cumsum(dim=1) - 1,
    'positions backwards': lambda p: -p,
    'positions in half': lambda p: (p * 5).bfloat16() / 5,
}


@pytest.mark.parametrize('fault', thorough_after(2, PREFIX))
def test_wrong_positions_of_the_prefix_are_found(policy, monkeypatch, fault):
    monkeypatch.setattr(flow_policy, 'rotary', in_the_prefix(PREFIX[fault]))
    failures = verify_onnx(*policy).failures
    assert any(line.startswith("prefix.onnx: tensor 'self_key'") for line in failures), failures


def rotations(start: Callable[[Tensor], Tensor], cross: Callable[[Tensor], Tensor]) -> object:
    """Rotary of the actions: where self layers start, and where cross layers do; (R, 1) each."""

    def wrong(self: SmolVla, mask: Tensor) -> tuple[Rotary, Rotary]:
        steps = torch.arange(self.dims.horizon, device=mask.device)
        head_dim = self.dims.expert.head_dim
        return rotary(start(mask) + steps, head_dim), rotary(cross(mask) + steps, head_dim)

    return wrong


def valid(mask: Tensor) -> Tensor:
    return mask.long().sum(dim=1, keepdim=True)


def zero(mask: Tensor) -> Tensor:
    return valid(mask) * 0


EXPERT = {
    'self layers on the last position of the prefix': (lambda mask: valid(mask) - 1, zero),
    'self layers behind hidden tokens': (lambda mask: zero(mask) + mask.shape[1], zero),
    'self layers from 0': (zero, zero),
    'cross layers from 1': (valid, lambda mask: zero(mask) + 1),
    'cross layers from the prefix on': (valid, valid),
}


@pytest.mark.parametrize('fault', thorough_after(2, EXPERT))
def test_wrong_positions_of_the_actions_are_found(policy, monkeypatch, fault):
    monkeypatch.setattr(SmolVla, 'rotations', rotations(*EXPERT[fault]))
    failures = verify_onnx(*policy).failures
    assert any(line.startswith("expert.onnx: tensor 'velocity'") for line in failures), failures


TABLES = (rotary_angles_rounded, rotary_cosines_rounded, positions_to_half)


@pytest.mark.parametrize(
    ('graph', 'fault'),
    [
        *(('prefix.onnx', fault) for fault in (*TABLES, position_in_half)),
        *(('expert.onnx', fault) for fault in TABLES),
    ],
)
def test_a_rope_table_in_half_is_found(policy, tmp_path, graph, fault):
    folder = copy_bundle(policy[0], tmp_path / 'changed')
    model = load_graph(folder, graph)
    fault(model)
    save_graph(model, folder, graph)
    with pytest.raises(VerificationError, match=graph.replace('.', r'\.')):
        verify_onnx(folder, policy[1])
