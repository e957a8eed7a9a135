"""Roofline of policies that answer in tokens: every pass reads the language model's weights."""

from __future__ import annotations

import math

import pytest

from vla_runtime.families.operation_counts import count_operations
from vla_runtime.family.listing import preset
from vla_tools.performance.devices import DEVICES, MATRIX_BYTES
from vla_tools.performance.roofline import memory_need, phase_floors, published_rates

# Of the published OpenVLA: 32 layers, and the output layer.
LANGUAGE = 32 * (4 * 4096**2 + 3 * 4096 * 11008) + 32064 * 4096
PASSES = 6


@pytest.mark.parametrize('device', ['agx-orin', 'thor', 'h200'])
@pytest.mark.parametrize('precision', ['bfloat16', 'int8'])
def test_openvla_is_bound_by_the_weights_of_its_passes(device: str, precision: str):
    found = preset('openvla')
    assert found is not None
    counts = count_operations(*found)
    assert counts.passes == PASSES
    rates = published_rates(DEVICES[device], precision)
    floors = phase_floors(counts, rates, precision=precision, rows=1, steps=1, views=1)
    size = MATRIX_BYTES[precision]
    assert floors['denoise'].bound == 'memory'
    assert floors['denoise'].milliseconds == pytest.approx(PASSES * floors['step'].milliseconds)
    least_ms = LANGUAGE * size / rates.bytes_per_s * 1e3
    assert least_ms <= floors['step'].milliseconds <= 1.1 * least_ms


def test_memory_is_told_from_the_sizes_alone():
    found = preset('openvla')
    assert found is not None
    counts = count_operations(*found)
    for precision, expected in (('bfloat16', 15.0e9), ('int8', 7.5e9)):
        need = memory_need(counts, 'torch', precision=precision, rows=1)
        assert math.isclose(need.weights, expected, rel_tol=0.03)


@pytest.mark.parametrize(('device', 'precision'), [('agx-orin', 'bfloat16'), ('h200', 'int8')])
def test_openvla_oft_makes_a_chunk_in_one_pass_over_all_places(device: str, precision: str):
    """The prefix is bound by its products: two a weight and place of the language model."""
    found = preset('openvla_oft')
    assert found is not None
    counts, dims = count_operations(*found), found[1]
    rates = published_rates(DEVICES[device], precision)
    floors = phase_floors(counts, rates, precision=precision, rows=1, steps=1, views=2)
    assert dims.prefix_length == 2 * 256 + 1 + 64 + 8 * 7 + 1
    products = 2.0 * dims.prefix_length * (LANGUAGE - 32064 * 4096)
    need = memory_need(counts, 'torch', precision=precision, rows=1)
    assert floors['prefix'].bound == 'compute'
    least_ms = products / rates.flops_per_s * 1e3
    assert least_ms <= floors['prefix'].milliseconds <= 1.1 * least_ms
    assert math.isclose(need.weights, 7.53e9 * MATRIX_BYTES[precision], rel_tol=0.03)
