"""A wrong version of each index and order that Evo-1 computes is found by the receipt.

The receipt compares right files with networks in which one computation is wrong. It cannot know
which of the two is, and the other way round each fault would need an export of its own.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from onnx_bundles import (  # noqa: F401
    sessions_opened_once,
    tiny_onnx_bundle,
)
from thorough import thorough_after
from tiny_policy import tiny_spec

from vla_runtime.export.onnx.verification import verify_onnx
from vla_runtime.export.onnx.weights import BundleWeights
from vla_runtime.families.blocks.attention import rotary
from vla_runtime.families.evo1 import networks, time_table, vision

# The files are right and stay so; networks are patched.
pytestmark = pytest.mark.usefixtures('sessions_opened_once')


@pytest.fixture(scope='module')
def files() -> Path:
    """Right files, not to be changed; made before anything is patched."""
    return tiny_onnx_bundle('evo1')


def failures_of(folder: Path) -> list[str]:
    return verify_onnx(folder, tiny_spec('evo1')).failures


def squares(patches: torch.Tensor, side: int, edge: int, *order: int) -> torch.Tensor:
    n, _, width = patches.shape
    few = side // edge
    cut = patches.view(n, few, edge, few, edge, width).permute(0, *order)
    return cut.reshape(n, few * few, -1)


def columns_of_squares_first(patches, side, edge):
    return squares(patches, side, edge, 3, 1, 2, 4, 5)


def columns_in_a_square_first(patches, side, edge):
    return squares(patches, side, edge, 1, 3, 4, 2, 5)


def channels_first(patches, side, edge):
    return squares(patches, side, edge, 1, 3, 5, 2, 4)


def rows_of_patches(patches, side, edge):
    """Patches that follow each other instead of squares."""
    return patches.reshape(patches.shape[0], (side // edge) ** 2, -1)


@pytest.mark.parametrize(
    'wrong',
    thorough_after(
        1, [columns_of_squares_first, columns_in_a_square_first, channels_first, rows_of_patches]
    ),
    ids=lambda wrong: wrong.__name__,
)
def test_pixels_shuffled_in_another_order_are_found(files, monkeypatch, wrong):
    monkeypatch.setattr(vision, 'shuffle_pixels', wrong)
    found = failures_of(files)
    assert any(re.search(r"^vision\.onnx: tensor 'image_tokens'", line) for line in found), found


def the_usual_base(positions, head_dim, base):
    return rotary(positions, head_dim)


def off_by_one_from_the_middle(positions, head_dim, base):
    return rotary(positions + (positions > positions.shape[1] // 2), head_dim, base)


def images_not_counted(positions, head_dim, base):
    """Positions as if an image were one token."""
    return rotary(positions.clamp(max=4) + (positions - 8).clamp(min=0), head_dim, base)


def in_half(positions, head_dim, base):
    cosine, sine = rotary(positions, head_dim, base)
    return cosine.bfloat16().float(), sine.bfloat16().float()


def positions_in_half(positions, head_dim, base):
    return rotary((positions * 5).bfloat16() / 5, head_dim, base)


@pytest.mark.parametrize(
    'wrong',
    [
        the_usual_base,
        off_by_one_from_the_middle,
        images_not_counted,
        in_half,
        positions_in_half,
    ],
    ids=lambda wrong: wrong.__name__,
)
def test_a_wrong_rotary_table_is_found_in_the_prefix(files, monkeypatch, wrong):
    monkeypatch.setattr(networks, 'rotary', wrong)
    found = failures_of(files)
    assert any(re.search(r"^prefix\.onnx: tensor 'cross_key'", line) for line in found), found
    assert any(line.startswith('monolithic.onnx') for line in found)


def row_in_float32(times):
    passed = np.float32(1) - np.asarray(times, np.float32)
    return (passed * np.float32(999)).astype(np.int64)


def row_not_snapped(times):
    passed = 1.0 - np.asarray(times, np.float32).astype(np.float64)
    return (passed * 999).astype(np.int64)


def row_rounded(times):
    return np.rint((1.0 - np.asarray(times)) * 999).astype(np.int64)


def row_of_a_thousand(times):
    return np.minimum((1.0 - np.asarray(times)) * 1000, 999).astype(np.int64)


def row_of_the_other_direction(times):
    return (np.asarray(times) * 999).astype(np.int64)


def row_in_half(times):
    return ((1.0 - np.asarray(times)).astype(np.float16) * np.float16(999)).astype(np.int64)


# Most are right by chance with the files' own 3 steps.
@pytest.mark.parametrize(
    'wrong',
    thorough_after(
        2,
        [
            row_in_float32,
            row_not_snapped,
            row_of_the_other_direction,
            row_rounded,
            row_of_a_thousand,
            row_in_half,
        ],
    ),
    ids=lambda wrong: wrong.__name__,
)
def test_a_wrong_row_of_the_time_table_is_found(files, monkeypatch, wrong):
    monkeypatch.setattr(time_table, 'time_rows', wrong)
    found = failures_of(files)
    assert any(line.startswith('time table') for line in found), found


def change_table(change: Callable[[torch.Tensor], torch.Tensor]):
    read = BundleWeights.read

    def wrong(self, name):
        found = read(self, name)
        return change(found) if name == 'action_positions' else found

    return wrong


@pytest.mark.parametrize(
    'change',
    [lambda t: t.roll(1, 1), lambda t: t.bfloat16().float()],
    ids=['off by one', 'in half'],
)
def test_wrong_places_in_the_chunk_are_found_in_the_head(files, monkeypatch, change):
    monkeypatch.setattr(BundleWeights, 'read', change_table(change))
    found = failures_of(files)
    assert any(re.search(r"^expert\.onnx: tensor 'velocity'", line) for line in found), found


def test_images_and_masks_in_another_order_are_found(files, monkeypatch):
    embed = networks.Evo1.embed_prefix

    def cameras_turned(self, image_tokens, image_mask, *text):
        turned = [torch.cat([part[:, 1:], part[:, :1]], 1) for part in (image_tokens, image_mask)]
        return embed(self, *turned, *text)

    def hidden_camera_seen(self, image_tokens, image_mask, *text):
        return embed(
            self,
            image_tokens,
            torch.ones(image_mask.shape, dtype=torch.bool, device=image_mask.device),
            *text,
        )

    def images_off_by_one(self, image_tokens, image_mask, *text):
        dims, moved = self.dims, tuple(place + 1 for place in self.dims.image_places)
        self.dims = replace(dims, image_places=moved)
        found = embed(self, image_tokens, image_mask, *text)
        self.dims = dims
        return found

    for wrong in (cameras_turned, hidden_camera_seen, images_off_by_one):
        with monkeypatch.context() as patch:
            patch.setattr(networks.Evo1, 'embed_prefix', wrong)
            found = failures_of(files)
        assert any(line.startswith('prefix.onnx') for line in found), wrong.__name__
