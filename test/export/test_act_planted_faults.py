"""A wrong version of each table and order that ACT computes is found by the receipt.

The receipt compares right files with networks in which one computation is wrong. It cannot know
which of the two is, and the other way round each fault would need an export of its own.
"""

from __future__ import annotations

import math
import re
from pathlib import Path

import onnx_faults as faults
import pytest
import torch
from onnx_bundles import (  # noqa: F401
    copy_bundle,
    load_graph,
    save_graph,
    sessions_opened_once,
    tiny_onnx_bundle,
)
from thorough import thorough_after

from vla_runtime.bundle.folder import read_bundle
from vla_runtime.export.onnx.verification import VerificationError, check_graphs, verify_onnx
from vla_runtime.export.onnx.weights import BundleWeights
from vla_runtime.families.act import networks
from vla_runtime.families.act.positions import map_positions

# The files are right and stay so; networks are patched.
pytestmark = pytest.mark.usefixtures('sessions_opened_once')


def off_by_one(height, width, channels, device):
    """Places counted from 0."""
    return _positions(height, width, channels, device, first=0)


def columns_first(height, width, channels, device):
    rows, columns = map_positions(height, width, channels, device).chunk(2, dim=1)
    return torch.cat([columns, rows], dim=1)


def sines_before_cosines(height, width, channels, device):
    halves = map_positions(height, width, channels, device).chunk(2, dim=1)
    return torch.cat([part for half in halves for part in (half[:, 0::2], half[:, 1::2])], dim=1)


def a_frequency_for_each_number(height, width, channels, device):
    """Sine and cosine of one place at different frequencies."""
    return _positions(height, width, channels, device, pair=1)


def in_half(height, width, channels, device):
    return map_positions(height, width, channels, device).bfloat16().float()


def column_by_column(height, width, channels, device):
    right = map_positions(height, width, channels, device)
    return right.view(height, width, channels).transpose(0, 1).reshape(-1, channels)


def _positions(height, width, channels, device, first=1, pair=2):
    """Positions of a map, its places counted from `first`, with a frequency for `pair` numbers."""
    half = channels // 2
    number = torch.arange(half, device=device)
    frequency = 10000.0 ** (-(number // pair).float() * pair / half)
    codes = []
    for count in (height, width):
        places = torch.arange(first, count + first, device=device).float()
        angles = places[:, None] / (count + 1e-6) * (2 * math.pi) * frequency
        codes.append(torch.where(number % 2 == 0, angles.sin(), angles.cos()))
    rows = codes[0][:, None].expand(height, width, half)
    return torch.cat([rows, codes[1][None].expand(height, width, half)], dim=-1).flatten(0, 1)


@pytest.fixture(scope='module')
def files() -> Path:
    """Right files, not to be changed; made before anything is patched."""
    return tiny_onnx_bundle('act')


def failures_of(folder: Path) -> list[str]:
    return verify_onnx(folder, read_bundle(tiny_onnx_bundle('act')).spec).failures


def test_the_wrong_versions_differ_in_nothing_else():
    cpu = torch.device('cpu')
    assert (_positions(2, 3, 24, cpu) - map_positions(2, 3, 24, cpu)).abs().max() < 1e-6


@pytest.mark.parametrize(
    'wrong',
    thorough_after(
        2,
        [
            off_by_one,
            columns_first,
            sines_before_cosines,
            a_frequency_for_each_number,
            in_half,
            column_by_column,
        ],
    ),
    ids=lambda wrong: wrong.__name__,
)
def test_wrong_positions_of_a_map_are_found_in_the_prefix(files, monkeypatch, wrong):
    monkeypatch.setattr(networks, 'map_positions', wrong)
    found = failures_of(files)
    assert any(re.search(r"^prefix\.onnx: tensor 'cross_key'", line) for line in found), found
    # Positions rounded to halves change the chunk itself by less than the bound.
    if wrong is not in_half:
        assert any(line.startswith('monolithic.onnx') for line in found)


@pytest.mark.parametrize(
    ('table', 'change', 'file'),
    [
        ('vector_positions', lambda t: t.roll(1, 0), r"^prefix\.onnx: tensor 'cross_key'"),
        ('vector_positions', lambda t: t.bfloat16().float(), r"^prefix\.onnx: tensor 'cross_"),
        ('action_positions', lambda t: t.roll(1, 0), r"^expert\.onnx: tensor 'velocity'"),
        ('action_positions', lambda t: t.bfloat16().float(), r"^expert\.onnx: tensor 'velocity'"),
        ('latent', lambda t: torch.zeros_like(t), r"^prefix\.onnx: tensor 'cross_value'"),
    ],
    ids=[
        'vectors off by one',
        'vectors in half',
        'actions off by one',
        'actions in half',
        'latent',
    ],
)
def test_a_wrong_table_is_found_in_its_file(files, monkeypatch, table, change, file):
    read = BundleWeights.read
    monkeypatch.setattr(
        BundleWeights,
        'read',
        lambda self, name: change(read(self, name)) if name == table else read(self, name),
    )
    found = failures_of(files)
    assert any(re.search(file, line) for line in found), found


def test_cameras_in_another_order_are_found(files, monkeypatch):
    embed = networks.Act.embed

    def turned(self, tokens, mask, state):
        tokens, mask = (torch.cat([part[1:], part[:1]]) for part in (tokens, mask))
        return embed(self, tokens, mask, state)

    monkeypatch.setattr(networks.Act, 'embed', turned)
    found = failures_of(files)
    assert any(line.startswith('prefix.onnx') for line in found), found


@pytest.mark.parametrize('operator', ['Conv', 'MaxPool', 'Relu'])
def test_a_convolution_network_in_half_breaks_the_rules(tmp_path, operator):
    bundle = copy_bundle(tiny_onnx_bundle('act', 'float16'), tmp_path / 'changed')
    model = load_graph(bundle, 'vision.onnx')
    faults.run_in_half(model, faults.nodes_of(model, operator)[0])
    save_graph(model, bundle, 'vision.onnx')
    with pytest.raises(VerificationError, match=rf'\({operator}\) computes .* in float16'):
        check_graphs(bundle)
