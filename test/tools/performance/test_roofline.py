"""Memory and least times on paper, against the real networks and against plain arithmetic."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import onnx
import pytest
import torch
from onnx import TensorProto, helper
from onnx_bundles import tiny_onnx_bundle
from tiny_policy import tiny_dims

from vla_runtime.bundle.onnx_files import graph_path
from vla_runtime.declarations.pi import PI05, PiDims
from vla_runtime.engines.torch.engine import TorchEngine
from vla_runtime.family.counts import Work
from vla_runtime.family.listing import find_family, preset
from vla_runtime.models.base.flow_network import build_network
from vla_runtime.models.blocks.layers import matrix_names
from vla_runtime.models.shapes.operation_counts import count_operations
from vla_tools.performance.devices import DEVICES, GIB, MATRIX_BYTES
from vla_tools.performance.roofline import (
    MemoryNeed,
    Rates,
    engine_weight_bytes,
    fits,
    floor,
    largest_engine_bytes,
    memory_need,
    phase_floors,
    published_rates,
    weight_bytes,
)


@pytest.mark.parametrize('family', ['pi05', 'pi0'])
@pytest.mark.parametrize('size', [2, 4])
@pytest.mark.parametrize('full', [True, False])
def test_weights_are_those_of_the_network(family, size, full):
    dims = find_family(family).presets[family] if full else tiny_dims(family)
    with torch.device('meta'):
        network = build_network(family, dims)
    matrices = matrix_names(network)
    held = sum(
        value.numel() * (size if name in matrices else 4)
        for name, value in network.named_parameters()
    )
    assert weight_bytes(count_operations(family, dims), size) == held


def held_weights(path: Path, dims: PiDims) -> int:
    """Bytes of the numbers in an ONNX file that come from the checkpoint."""
    floats = (TensorProto.FLOAT, TensorProto.FLOAT16)
    # Scalars and the rotary embedding's frequencies are part of the formulas.
    smallest = dims.language.head_dim // 2
    return sum(
        math.prod(tensor.dims) * helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
        for tensor in onnx.load(path, load_external_data=False).graph.initializer
        if tensor.data_type in floats and math.prod(tensor.dims) > smallest
    )


@pytest.mark.parametrize('family', ['pi05', 'pi0'])
@pytest.mark.parametrize(('precision', 'size'), [('float32', 4), ('float16', 2)])
@pytest.mark.parametrize('rows', [1, 2])
def test_engines_of_static_shape_hold_the_weights_of_their_files(family, precision, size, rows):
    folder = tiny_onnx_bundle(family, precision)
    files = [
        graph_path(folder, 'vision'),
        *(graph_path(folder, 'prefix', r) for r in range(1, rows + 1)),
        *(graph_path(folder, 'expert', r) for r in range(1, rows + 1)),
    ]
    dims = tiny_dims(family)
    held = sum(held_weights(path, dims) for path in files)
    # The files keep vision's biases in float32: half a megabyte of pi0.5, and not counted.
    biases = dims.vision.depth * (5 * dims.vision.width + dims.vision.mlp_dim) + dims.language.width
    counts = count_operations(family, dims)
    # A parameter of which only a part is read (pi0's `action_time_in`) counts whole.
    counted = engine_weight_bytes(counts, size, rows)
    assert counted == pytest.approx(held - biases * (4 - size), rel=0.02)
    # What a build is refused for is asked of the largest file.
    vision, *others = (held_weights(path, dims) for path in files)
    largest = max(vision - biases * (4 - size), *others)
    assert largest_engine_bytes(counts, size) == pytest.approx(largest, rel=0.02)


def test_a_second_row_costs_weights_where_graphs_have_static_shapes():
    counts = count_operations('pi05', PI05)

    def need(backend: str, rows: int) -> MemoryNeed:
        return memory_need(counts, backend, precision='bfloat16', rows=rows)

    assert need('torch', 2).weights == need('torch', 1).weights == weight_bytes(counts, 2)
    one, two = need('onnxruntime', 1), need('onnxruntime', 2)
    vision = counts.vision.work(2).weight_bytes
    assert two.weights - one.weights == one.weights - vision
    # Two profiles of one engine read the same weights.
    assert need('tensorrt', 2).weights == need('tensorrt', 1).weights == one.weights
    table = PI05.vocabulary * PI05.language.width * 2
    assert counts.prefix[1].hosted * 2 == table
    # What no engine holds: the text table, parts of the last prefix layer, and the modulations.
    assert 0.85 < (one.weights + table) / weight_bytes(counts, 2) < 1.0
    for backend in ('onnxruntime', 'tensorrt'):
        assert need(backend, 2).past == need('torch', 2).past
    # TensorRT runs all engines over one block; every ONNX Runtime session keeps its own.
    assert need('tensorrt', 2).activations == 2 * need('tensorrt', 1).activations
    assert need('onnxruntime', 2).activations == 3 * need('onnxruntime', 1).activations


@pytest.mark.parametrize('rows', [1, 2])
@torch.no_grad()
def test_keys_and_values_are_those_of_the_engine(rows):
    dims = tiny_dims('pi05')
    engine = TorchEngine(build_network('pi05', dims), max_rows=rows)
    held = sum(
        slot['past_key'].nbytes + slot['past_value'].nbytes
        for buffers in engine._buffers.values()
        for slot in buffers.slots
    )
    need = memory_need(count_operations('pi05', dims), 'torch', precision='float32', rows=rows)
    assert need.past == held
    # What PyTorch lays out for its steps has the actions' keys and values besides.
    prepared = []
    for buffers in engine._buffers.values():
        for slot in buffers.slots:
            slot['prefix_mask'].fill_(True)
            keys = engine._network.prepare_prefix(slot)._self_layers._attended
            prepared += [keys._past_keys, keys._past_values]
    numbers = sum(tensor.untyped_storage().nbytes() for tensor in prepared)
    assert need.prepared <= numbers <= need.prepared * (1 + dims.horizon / dims.prefix_length)


def test_a_floor_is_the_larger_of_computing_and_moving():
    work = Work(flops=1000, weight_bytes=60, data_bytes=40)
    computing = floor(work, Rates(flops_per_s=1e3, bytes_per_s=1e3, source=''))
    assert (computing.milliseconds, computing.bound) == (1000.0, 'compute')
    moving = floor(work, Rates(flops_per_s=1e6, bytes_per_s=50.0, source=''))
    assert (moving.milliseconds, moving.bound) == (2000.0, 'memory')


def test_a_miss_is_the_sum_of_its_phases_and_a_hit_is_the_denoise_loop():
    counts = count_operations('pi05', replace(PI05, cameras=2))
    rates = published_rates(DEVICES['thor'], 'bfloat16')
    floors = phase_floors(counts, rates, precision='bfloat16', rows=2, steps=5, views=2)
    ms = {phase: one.milliseconds for phase, one in floors.items()}
    assert ms['denoise'] == pytest.approx(5 * ms['step'])
    assert ms['hit'] == ms['denoise']
    assert ms['miss'] == pytest.approx(2 * ms['vision'] + ms['prefix'] + ms['denoise'])
    # Thor, by hand: 10^9 * 273 bytes a second for the expert's weights and two rows' keys.
    moved = counts.step[2].work(2).bytes
    assert ms['step'] == pytest.approx(moved / 273e9 * 1e3)
    assert floors['step'].bound == 'memory'
    assert floors['prefix'].bound == 'compute'
    assert floors['miss'].bound == 'mostly prefix'


def test_one_changed_view_of_three_is_one_vision_run():
    rates = published_rates(DEVICES['agx-orin'], 'float16')
    one, all_ = (
        phase_floors(
            count_operations('pi05', PI05),
            rates,
            precision='float16',
            rows=1,
            steps=10,
            views=views,
        )
        for views in (1, 3)
    )
    saved = all_['miss'].milliseconds - one['miss'].milliseconds
    assert saved == pytest.approx(2 * one['vision'].milliseconds)


def test_what_fits_is_compared_with_what_the_system_leaves():
    device = DEVICES['orin-nx']
    counts = count_operations('pi05', PI05)
    need = memory_need(counts, 'torch', precision='bfloat16', rows=2)
    assert need.total == need.weights + need.past + need.prepared + need.activations
    assert fits(need, device)
    larger = memory_need(counts, 'torch', precision='float32', rows=2)
    assert not fits(larger, device)
    # Two copies of a network do not fit where one does.
    copies = memory_need(counts, 'onnxruntime', precision='bfloat16', rows=2)
    assert not fits(copies, replace(device, memory_gib=11.0))
    assert fits(need, replace(device, memory_gib=11.0))
    exactly = need.total / GIB
    assert fits(need, replace(device, memory_gib=exactly + 3.0, reserved_gib=3.0))
    assert not fits(need, replace(device, memory_gib=exactly + 3.0, reserved_gib=3.01))


def test_what_tensorrt_leaves_free_at_load_is_asked_of_the_device():
    counts = count_operations('pi05', PI05)
    need = memory_need(counts, 'tensorrt', precision='bfloat16', rows=1)
    exactly = need.total / GIB
    device = replace(DEVICES['orin-nano'], reserved_gib=0.0)
    assert not fits(need, replace(device, memory_gib=exactly + 0.24))
    assert fits(need, replace(device, memory_gib=exactly + 0.26))


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
