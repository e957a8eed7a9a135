"""GR00T N1.6's networks against the training code's numbers, and both forms of its tower."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from groot_cases import N16, load_groot_case
from network_cases import each_case, each_entry, random_network, relative_error
from tiny_policy import tiny_dims
from torch.nn import functional as F

from vla_runtime.models.groot.networks import GrootN16
from vla_runtime.models.groot.towers import EagleVision2, resizing

# Relative to the largest value: float32's own noise is 1e-5 in the layers.
BOUND = 2e-5

entries = each_entry(N16)
cases = each_case(N16)
of_cases = pytest.mark.cases


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.inference_mode():
        yield


@of_cases
@entries
def test_rows_of_the_plan_that_the_reference_freezes_are_the_first(path: Path, b: int):
    """The reference's own chunking, by hand over our velocities."""
    case = load_groot_case(path, b)
    d = case.description
    options, overlap = d['rtc_options'], d['rtc_options']['rtc_overlap_steps']
    frozen, rate = options['rtc_frozen_steps'], options['rtc_ramp_rate']
    plan, past = case.tensors['rtc_previous_chunk'][b], case.prefix()
    x = case.tensors['noise'][b : b + 1].clone()
    x[:, :overlap] = plan[:overlap]
    share = torch.ones(x.shape[1])
    share[:frozen] = 0
    ramp = 1 - torch.exp(-rate * torch.linspace(0, 1, overlap - frozen + 2))
    share[frozen:overlap] = (ramp / ramp[-1])[1:-1]
    for k in range(case.steps):
        conditioning = case.network.time_conditioning(torch.tensor([1 - k / case.steps]))
        velocity = case.network.velocity(x, past, conditioning, **case.state())
        x = x - share[:, None] * velocity / case.steps
    assert relative_error(x[0, :frozen], case.tensors['rtc_actions'][b, :frozen]) <= BOUND
    assert relative_error(x[0], case.tensors['rtc_actions'][b]) <= BOUND


@pytest.mark.parametrize(('side', 'count'), [(16, 18), (16, 9), (7, 6), (7, 8), (5, 5), (3, 40)])
def test_positions_are_resized_as_the_library_resizes_images(side: int, count: int):
    table = torch.randn(1, 4, side, side, generator=torch.Generator().manual_seed(0))
    expected = F.interpolate(
        table, size=(count, count), mode='bilinear', align_corners=False, antialias=True
    )
    weights = resizing(side, count, table.device)
    assert relative_error(weights @ table @ weights.T, expected) <= 1e-6


def tower(**changes: object) -> EagleVision2:
    dims = tiny_dims('groot_n16')
    network = random_network('groot_n16', replace(dims, vision=replace(dims.vision, **changes)))
    assert isinstance(network, GrootN16)
    return network.vision


def test_windows_are_squares_from_the_top_left_and_what_is_left_of_them():
    (seen,) = tower(window=3).windows(4, 6, torch.device('cpu'))
    # Rows 0 to 2 and 3; columns 0 to 2 and 3 to 5.
    squares = [
        [row * 6 + column for row in rows for column in columns]
        for rows in (range(3), range(3, 4))
        for columns in (range(3), range(3, 6))
    ]
    expected = torch.zeros(24, 24, dtype=torch.bool)
    for square in squares:
        for patch in square:
            expected[patch, square] = True
    assert torch.equal(seen, expected)


def test_a_window_is_as_if_alone_and_a_block_of_full_attention_is_not():
    """Windows cut out of the image give the same, but for what positions add."""
    pixels = torch.randn(1, 3, 32, 48, generator=torch.Generator().manual_seed(1))
    other = pixels.clone()
    # A patch of the first window.
    other[:, :, :8, :8] += 1
    apart = tower(window=3, full_attention=())
    changed = (apart.patches(pixels) - apart.patches(other)).abs().amax(dim=(0, 2)).view(4, 6)
    assert (changed[:3, :3] > 1e-4).all()
    assert changed[3:].max() == 0 and changed[:, 3:].max() == 0
    joined = tower(window=3, full_attention=(2,))
    changed = (joined.patches(pixels) - joined.patches(other)).abs().amax(dim=(0, 2))
    assert (changed > 1e-7).all()


def test_pairs_side_by_side_turn_by_column_and_row_by_turns():
    """As complex numbers: pair 2i by the column, pair 2i + 1 by the row, base^(-4i / D) each."""
    vision = tower(rope_base=7.0)
    rotary = vision.rotary(4, 6, torch.device('cpu'))
    assert rotary is not None
    attention, size = vision.blocks[0].attention, vision.dims.head_dim
    generator = torch.Generator().manual_seed(2)
    q, k = (torch.randn(1, 2, 24, size, generator=generator) for _ in range(2))
    found = attention.rotate(q, rotary) @ attention.rotate(k, rotary).transpose(-1, -2)
    rows, columns = torch.meshgrid(torch.arange(4.0), torch.arange(6.0), indexing='ij')
    step = 7.0 ** (-torch.arange(0, size, 4) / size)
    angles = torch.stack(
        [columns.flatten()[:, None] * step, rows.flatten()[:, None] * step], dim=-1
    ).flatten(1)
    turn = torch.polar(torch.ones_like(angles), angles)
    qc, kc = (torch.view_as_complex(x.view(*x.shape[:-1], -1, 2)) * turn for x in (q, k))
    expected = (qc @ kc.conj().transpose(-1, -2)).real
    assert relative_error(found, expected) <= 1e-5
