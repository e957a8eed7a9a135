"""Faults in what GR00T N1.7 computes with indices: `verify` finds each of them.

The receipt compares right files with networks in which one computation is wrong. It cannot know
which of the two is, and the other way round each fault would need an export of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
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
from onnx_faults import rotary_angles_rounded, rotary_cosines_rounded, round_tensor
from thorough import thorough_but
from tiny_policy import tiny_dims, tiny_spec
from torch import Tensor

from vla_runtime.bundle.folder import read_bundle
from vla_runtime.bundle.schema import BundleSpec
from vla_runtime.export.onnx.cases import seeded_cases
from vla_runtime.export.onnx.verification import verify_onnx
from vla_runtime.export.receipt import VerificationError
from vla_runtime.families.blocks.attention import Rotary
from vla_runtime.families.groot import qwen3_vl, time_table
from vla_runtime.families.groot.n17 import GrootN17
from vla_runtime.families.groot.qwen3_vl import QwenVision

# The files are right and stay so; networks are patched.
pytestmark = pytest.mark.usefixtures('sessions_opened_once')

FAMILY = 'groot_n17'


@pytest.fixture(scope='module')
def policy() -> tuple[Path, BundleSpec]:
    """A tiny policy with its ONNX files, which are not to be changed."""
    bundle = tiny_onnx_bundle(FAMILY)
    return bundle, read_bundle(bundle).spec


CUT, SQUARES, POSITIONS = QwenVision.cut, QwenVision.squares, QwenVision.positions
VISION_ROTARY, TAPS = QwenVision.rotary, qwen3_vl._taps


def row_by_row(self: QwenVision, x: Tensor, rows: int, columns: int) -> Tensor:
    """No squares at all."""
    return x


def columns_first(self: QwenVision, x: Tensor, rows: int, columns: int) -> Tensor:
    """Patches of a square column by column."""
    edge, lead = self.dims.merge, x.shape[:-2]
    x = x.view(*lead, rows // edge, edge, columns // edge, edge, x.shape[-1])
    x = x.transpose(-4, -3).transpose(-3, -2)
    return x.reshape(*lead, rows * columns, x.shape[-1])


def cut_transposed(self: QwenVision, pixels: Tensor) -> Tensor:
    """Numbers of a patch column by column."""
    return CUT(self, pixels).transpose(-1, -2)


def positions_turned(self: QwenVision, rows: int, columns: int) -> Tensor:
    """The table read column by column."""
    side = self.dims.positions
    table = self.position_embedding.view(side, side, -1).transpose(0, 1).flatten(0, 1)
    tower = SimpleNamespace(position_embedding=table, dims=self.dims, squares=self.squares)
    return POSITIONS(tower, rows, columns)  # type: ignore[arg-type]


def taps_of_centres(count: int, side: int, device: torch.device) -> object:
    """Interpolation between centres of cells, as images are resized, not between corners."""
    places = ((torch.arange(count) + 0.5) * side / count - 0.5).clamp(0, side - 1).to(device)
    low = places.long()
    return (low, 1 - (places - low)), ((low + 1).clamp(max=side - 1), places - low)


def taps_nearest(count: int, side: int, device: torch.device) -> object:
    """No interpolation."""
    (low, weight), (high, share) = TAPS(count, side, device)
    return (low, (weight >= 0.5).float()), (high, (share > 0.5).float())


def vision_rotary_columns_first(
    self: QwenVision, rows: int, columns: int, device: torch.device
) -> Rotary:
    """Column angles before row angles."""
    cosine, sine = VISION_ROTARY(self, rows, columns, device)
    quarter = self.dims.head_dim // 4
    return tuple(  # type: ignore[return-value]
        torch.cat([x.narrow(-1, quarter * i, quarter) for i in (1, 0, 3, 2)], dim=-1)
        for x in (cosine, sine)
    )


STARTS, OFFSETS, TURN = GrootN17.starts, GrootN17.offsets, GrootN17.rotary_positions


def one_position_a_token(self: GrootN17, mask: Tensor) -> Tensor:
    return mask.long().cumsum(dim=1) - 1


def starts_behind_rows(self: GrootN17, mask: Tensor) -> Tensor:
    """Behind an image the next token continues after its rows, not after its longer side."""
    rows, columns = self.dims.grid
    assert rows < columns
    count, place = self.dims.image_tokens, torch.arange(mask.shape[1], device=mask.device)
    behind = [
        (place >= number * count + before).long()
        for number, before in enumerate(self.dims.image_places, start=1)
    ]
    return STARTS(self, mask) - (columns - rows) * sum(behind)


def rows_and_columns_swapped(self: GrootN17, device: torch.device) -> Tensor:
    time, row, column = OFFSETS(self, device).unbind(1)
    return torch.stack((time, column, row), dim=1)


def no_grid(self: GrootN17, device: torch.device) -> Tensor:
    return OFFSETS(self, device) * 0


def sections_in_a_row(self: GrootN17, device: torch.device) -> Tensor:
    """Sections of frequencies one after the other instead of interleaved."""
    times, rows, columns = self.dims.rope_sections
    pair = torch.arange(times + rows + columns, device=device)
    return (pair >= times).long() + (pair >= times + rows).long()


def rope_backwards(self: GrootN17, starts: Tensor) -> Rotary:
    return TURN(self, -starts)


FAULTS: dict[str, tuple[object, str, Callable[..., object], str]] = {
    'patches row by row': (QwenVision, 'squares', row_by_row, 'vision'),
    'squares column by column': (QwenVision, 'squares', columns_first, 'vision'),
    'numbers of a patch turned': (QwenVision, 'cut', cut_transposed, 'vision'),
    'patch positions turned': (QwenVision, 'positions', positions_turned, 'vision'),
    'positions between centres': (qwen3_vl, '_taps', taps_of_centres, 'vision'),
    'positions not interpolated': (qwen3_vl, '_taps', taps_nearest, 'vision'),
    'vision rope columns first': (QwenVision, 'rotary', vision_rotary_columns_first, 'vision'),
    'one position a token': (GrootN17, 'starts', one_position_a_token, 'prefix'),
    'starts behind rows': (GrootN17, 'starts', starts_behind_rows, 'prefix'),
    'rows and columns': (GrootN17, 'offsets', rows_and_columns_swapped, 'prefix'),
    'no rows and columns': (GrootN17, 'offsets', no_grid, 'prefix'),
    'rope sections in a row': (GrootN17, 'axes', sections_in_a_row, 'prefix'),
    'rope backwards': (GrootN17, 'rotary_positions', rope_backwards, 'prefix'),
}


@pytest.mark.parametrize(
    'fault',
    thorough_but(
        [
            'squares column by column',
            'positions between centres',
            'starts behind rows',
            'rope sections in a row',
        ],
        FAULTS,
    ),
)
def test_a_wrong_index_is_found(policy, monkeypatch, fault):
    owner, name, wrong, part = FAULTS[fault]
    monkeypatch.setattr(owner, name, wrong)
    failures = verify_onnx(*policy).failures
    assert any(f'{part}.onnx' in line for line in failures), failures


def test_a_deepstack_of_another_block_is_found(policy):
    folder, spec = policy
    moved = replace(spec.dims, vision=replace(spec.dims.vision, deepstack=(2,)))
    failures = verify_onnx(folder, replace(spec, dims=moved)).failures
    assert any('vision.onnx' in line for line in failures), failures


def test_images_at_another_place_of_the_prompt_are_found(policy):
    folder, spec = policy
    first, second = spec.dims.image_places
    moved = replace(spec, dims=replace(spec.dims, image_places=(first, second + 1)))
    failures = verify_onnx(folder, moved).failures
    assert any('prefix.onnx' in line for line in failures), failures


def test_text_and_images_in_another_order_are_found(policy, monkeypatch):
    right = GrootN17.memories

    def turned(self: GrootN17, past: dict[str, Tensor]) -> dict[int, object]:
        found = right(self, past)
        return {block: found[other] for block, other in zip(found, reversed(found), strict=True)}

    monkeypatch.setattr(GrootN17, 'memories', turned)
    failures = verify_onnx(*policy).failures
    assert any('expert.onnx' in line for line in failures), failures


def vision_table_rounded(place: int) -> Callable[[onnx.ModelProto], None]:
    """Round the cosines (0) or sines (1) of the patches, which are constants: sizes are fixed."""

    def fault(model: onnx.ModelProto) -> None:
        sizes = tiny_dims(FAMILY)
        rows, columns = sizes.patches
        shape = [1, 1, rows * columns, sizes.vision.head_dim]
        tables = [t.name for t in model.graph.initializer if list(t.dims) == shape]
        assert len(tables) == 2
        round_tensor(model, tables[place])

    return fault


ROPE_IN_HALF = {
    'angles of the prompt': ('prefix.onnx', rotary_angles_rounded),
    'cosines of the prompt': ('prefix.onnx', rotary_cosines_rounded),
    'cosines of the patches': ('vision.onnx', vision_table_rounded(0)),
    'sines of the patches': ('vision.onnx', vision_table_rounded(1)),
}


@pytest.mark.parametrize('fault', ROPE_IN_HALF)
def test_a_rope_table_in_half_is_found(policy, tmp_path, fault):
    graph, plant = ROPE_IN_HALF[fault]
    folder = copy_bundle(policy[0], tmp_path / 'changed')
    model = load_graph(folder, graph)
    plant(model)
    save_graph(model, folder, graph)
    with pytest.raises(VerificationError, match=graph.replace('.', r'\.')):
        verify_onnx(folder, policy[1])


RIGHT = time_table.bucket
BUCKETS = {
    'in floats': lambda times: ((1.0 - np.asarray(times, np.float64)) * 1000).astype(np.int64),
    'in half precision': lambda times: (
        (1.0 - np.asarray(times, np.float16).astype(np.float64)) * 1000
    ).astype(np.int64),
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
