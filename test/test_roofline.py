"""Memory and least times on paper, against the real networks and against plain arithmetic."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tiny_policy import tiny_dims

from vla_runtime import operations
from vla_runtime.devices import DEVICES, GIB
from vla_runtime.dimensions import PRESETS
from vla_runtime.engines.torch_engine import TorchEngine
from vla_runtime.models import policy_network
from vla_runtime.models.layers import matrix_names
from vla_runtime.roofline import (
    Rates,
    fits,
    floor,
    memory_need,
    phase_floors,
    published_rates,
    weight_bytes,
)


@pytest.mark.parametrize('family', ['pi05', 'pi0'])
@pytest.mark.parametrize('size', [2, 4])
@pytest.mark.parametrize('full', [True, False])
def test_weights_are_those_of_the_network(family, size, full):
    dims = PRESETS[family] if full else tiny_dims(family)
    with torch.device('meta'):
        network = policy_network(family, dims)
    matrices = matrix_names(network)
    held = sum(
        value.numel() * (size if name in matrices else 4)
        for name, value in network.named_parameters()
    )
    assert weight_bytes(dims, size) == held


@pytest.mark.parametrize('rows', [1, 2])
def test_keys_and_values_are_those_of_the_engine(rows):
    dims = tiny_dims('pi05')
    engine = TorchEngine(policy_network('pi05', dims), max_rows=rows)
    held = sum(
        slot.past_key.nbytes + slot.past_value.nbytes
        for buffers in engine._buffers.values()
        for slot in buffers.slots
    )
    assert memory_need(dims, precision='float32', rows=rows).past == held


def test_a_floor_is_the_larger_of_computing_and_moving():
    work = operations.Work(flops=1000, weight_bytes=60, data_bytes=40)
    computing = floor(work, Rates(flops_per_s=1e3, bytes_per_s=1e3, source=''))
    assert (computing.milliseconds, computing.bound) == (1000.0, 'compute')
    moving = floor(work, Rates(flops_per_s=1e6, bytes_per_s=50.0, source=''))
    assert (moving.milliseconds, moving.bound) == (2000.0, 'memory')


def test_a_miss_is_the_sum_of_its_phases_and_a_hit_is_the_denoise_loop():
    dims = replace(PRESETS['pi05'], cameras=2)
    rates = published_rates(DEVICES['thor'], 'bfloat16')
    floors = phase_floors(dims, rates, precision='bfloat16', rows=2, steps=5, views=2)
    ms = {phase: one.milliseconds for phase, one in floors.items()}
    assert ms['denoise'] == pytest.approx(5 * ms['step'])
    assert ms['hit'] == ms['denoise']
    assert ms['miss'] == pytest.approx(2 * ms['vision'] + ms['prefix'] + ms['denoise'])
    # Thor, by hand: 10^9 * 273 bytes a second for the expert's weights and two rows' keys.
    moved = operations.denoise_step(dims, 2, 2).bytes
    assert ms['step'] == pytest.approx(moved / 273e9 * 1e3)
    assert floors['step'].bound == 'memory'
    assert floors['prefix'].bound == 'compute'
    assert floors['miss'].bound == 'mostly prefix'


def test_one_changed_view_of_three_is_one_vision_run():
    rates = published_rates(DEVICES['agx-orin'], 'float16')
    one, all_ = (
        phase_floors(PRESETS['pi05'], rates, precision='float16', rows=1, steps=10, views=views)
        for views in (1, 3)
    )
    saved = all_['miss'].milliseconds - one['miss'].milliseconds
    assert saved == pytest.approx(2 * one['vision'].milliseconds)


def test_what_fits_is_compared_with_what_the_system_leaves():
    device = DEVICES['orin-nx']
    need = memory_need(PRESETS['pi05'], precision='bfloat16', rows=2)
    assert need.total == need.weights + need.past + need.activations
    assert fits(need, device)
    assert not fits(memory_need(PRESETS['pi05'], precision='float32', rows=2), device)
    exactly = need.total / GIB
    assert fits(need, replace(device, memory_gib=exactly + 3.0, reserved_gib=3.0))
    assert not fits(need, replace(device, memory_gib=exactly + 3.0, reserved_gib=3.01))
