"""Faults in what GR00T N1.6 computes with indices: `verify` finds each of them.

As in N1.7's: right files are compared with networks in which one computation is wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from onnx_bundles import (  # noqa: F401
    copy_bundle,
    load_graph,
    save_graph,
    sessions_opened_once,
    tiny_onnx_bundle,
)
from onnx_faults import rotary_angles_rounded, rotary_cosines_rounded
from thorough import thorough_but
from torch import Tensor
from torch.nn import functional as F

from vla_runtime.bundle.folder import read_bundle
from vla_runtime.bundle.schema import BundleSpec
from vla_runtime.export.onnx.verification import verify_onnx
from vla_runtime.export.receipt import VerificationError
from vla_runtime.families.blocks.attention import Rotary, rotate
from vla_runtime.families.groot import siglip2
from vla_runtime.families.groot.n16 import GrootN16
from vla_runtime.families.groot.siglip2 import EagleVision2, GridAttention

# The files are right and stay so; networks are patched.
pytestmark = pytest.mark.usefixtures('sessions_opened_once')

FAMILY = 'groot_n16'


@pytest.fixture(scope='module')
def policy() -> tuple[Path, BundleSpec]:
    """A tiny policy with its ONNX files, which are not to be changed."""
    bundle = tiny_onnx_bundle(FAMILY)
    return bundle, read_bundle(bundle).spec


CUT, PLACES, RESIZING = EagleVision2.cut, EagleVision2.places, siglip2.resizing


def cut_channels_first(self: EagleVision2, pixels: Tensor) -> Tensor:
    """Numbers of a patch as a convolution has them."""
    patches, patch = CUT(self, pixels), self.dims.patch_size
    return patches.unflatten(-1, (patch, patch, 3)).permute(0, 1, 4, 2, 3).flatten(2)


def rows_and_columns_swapped(
    self: EagleVision2, rows: int, columns: int, device: torch.device
) -> Tensor:
    return PLACES(self, rows, columns, device).flip(-1)


def resizing_without_antialias(side: int, count: int, device: torch.device) -> Tensor:
    """A triangle of one step, whatever the scale."""
    centres = ((torch.arange(count, device=device) + 0.5) * side / count - 0.5).clamp(0, side - 1)
    return F.relu(1 - (torch.arange(side, device=device) - centres[:, None]).abs())


def resizing_between_corners(side: int, count: int, device: torch.device) -> Tensor:
    places = torch.linspace(0, side - 1, count, device=device)
    return F.relu(1 - (torch.arange(side, device=device) - places[:, None]).abs())


def pixel_shuffle_of_n15(self: EagleVision2, x: Tensor, rows: int, columns: int) -> Tensor:
    """Numbers of a square by row, then column, then channel."""
    edge = self.dims.merge
    squares = x.view(x.shape[0], rows // edge, edge, columns // edge, edge, -1)
    squares = squares.permute(0, 1, 3, 2, 4, 5)
    return squares.flatten(3).flatten(1, 2)


def turned_in_halves(self: GridAttention, x: Tensor, rotary: Rotary) -> Tensor:
    """Pairs of a head's two halves, as the language model has them."""
    return rotate(x, rotary)


def no_windows(self: EagleVision2, rows: int, columns: int, device: torch.device) -> None:
    return None


def no_rope(self: EagleVision2, rows: int, columns: int, device: torch.device) -> None:
    return None


FAULTS: dict[str, tuple[object, str, Callable]] = {
    'numbers of a patch by channel': (EagleVision2, 'cut', cut_channels_first),
    'rows and columns': (EagleVision2, 'places', rows_and_columns_swapped),
    'positions between corners': (siglip2, 'resizing', resizing_between_corners),
    'positions without antialias': (siglip2, 'resizing', resizing_without_antialias),
    "N1.5's pixel shuffle": (EagleVision2, 'unshuffled', pixel_shuffle_of_n15),
    'pairs in halves': (GridAttention, 'turned', turned_in_halves),
    'no windows': (EagleVision2, 'windows', no_windows),
    'no rotary positions': (EagleVision2, 'rotary', no_rope),
}


@pytest.mark.parametrize(
    'fault', thorough_but(['pairs in halves', 'positions without antialias', 'no windows'], FAULTS)
)
def test_a_wrong_index_is_found(policy, monkeypatch, fault):
    owner, name, wrong = FAULTS[fault]
    monkeypatch.setattr(owner, name, wrong)
    failures = verify_onnx(*policy).failures
    assert any('vision.onnx' in line for line in failures), failures


@pytest.mark.parametrize(
    'change', [{'window': 2}, {'full_attention': (1,)}, {'rope_base': 3.5}, {'rope_base': None}]
)
def test_a_tower_of_other_settings_is_found(policy, change):
    folder, spec = policy
    moved = replace(spec.dims, vision=replace(spec.dims.vision, **change))
    failures = verify_onnx(folder, replace(spec, dims=moved)).failures
    assert any('vision.onnx' in line for line in failures), failures


def test_images_at_another_place_of_the_prompt_are_found(policy):
    folder, spec = policy
    first, second = spec.dims.image_places
    moved = replace(spec, dims=replace(spec.dims, image_places=(first - 1, second)))
    failures = verify_onnx(folder, moved).failures
    assert any('prefix.onnx' in line for line in failures), failures


def test_text_and_images_in_another_order_are_found(policy, monkeypatch):
    right = GrootN16.memories

    def turned(self: GrootN16, past: dict[str, Tensor]) -> dict[int, object]:
        found = right(self, past)
        return {block: found[other] for block, other in zip(found, reversed(found), strict=True)}

    monkeypatch.setattr(GrootN16, 'memories', turned)
    failures = verify_onnx(*policy).failures
    assert any('expert.onnx' in line for line in failures), failures


@pytest.mark.parametrize('plant', [rotary_angles_rounded, rotary_cosines_rounded])
def test_a_rope_table_in_half_is_found(policy, tmp_path, plant):
    folder = copy_bundle(policy[0], tmp_path / 'changed')
    model = load_graph(folder, 'prefix.onnx')
    plant(model)
    save_graph(model, folder, 'prefix.onnx')
    with pytest.raises(VerificationError, match=r'prefix\.onnx'):
        verify_onnx(folder, policy[1])
