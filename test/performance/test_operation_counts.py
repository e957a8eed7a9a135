"""Counted operations and weights against what PyTorch counts while the networks run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_policy import tiny_dims
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from vla_runtime.families import build_network
from vla_runtime.families.flow_step import DenoiseStep, Prefix
from vla_runtime.families.pi.dimensions import PI05, PiDims
from vla_runtime.families.pi.flow_policy import PiNetwork
from vla_runtime.performance import operation_counts

DIMS = {
    'pi05': tiny_dims('pi05'),
    'pi0': tiny_dims('pi0'),
    'pi05 odd': replace(tiny_dims('pi05'), action_dim=7, horizon=5, cameras=3, prompt_length=17),
    'pi0 shared': replace(
        tiny_dims('pi0'),
        language=replace(tiny_dims('pi0').language, depth=3, num_kv_heads=2),
        expert=replace(tiny_dims('pi0').expert, depth=3, num_kv_heads=2),
    ),
}
every = pytest.mark.parametrize('name', DIMS)
rows_1_and_2 = pytest.mark.parametrize('rows', [1, 2])


def network_of(dims: PiDims) -> PiNetwork:
    return build_network('pi0' if dims.state_dim else 'pi05', dims)


def flops_of(network: nn.Module, *inputs: Any) -> int:
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        network(*inputs)
    return counter.get_total_flops()


def _values(output: Any) -> tuple[Tensor, ...]:
    return tuple(output.values()) if isinstance(output, dict) else output


def weights_read(module: nn.Module, *inputs: Any) -> int:
    """Bytes of the parameters that the outputs depend on; of a table, the rows looked up."""
    for parameter in module.parameters():
        # A zero hides what it multiplies.
        torch.nn.init.normal_(parameter, std=0.1)
        parameter.grad = None
    output = module(*inputs)
    tensors = (
        [output]
        if isinstance(output, Tensor)
        else [o for o in _values(output) if o.is_floating_point()]
    )
    sum(
        ((tensor * torch.randn_like(tensor)).sum() for tensor in tensors), torch.tensor(0.0)
    ).backward()
    return 4 * sum(int((p.grad != 0).sum()) for p in module.parameters() if p.grad is not None)


def prefix_inputs(dims: PiDims, rows: int) -> tuple[Any, ...]:
    # Every token another word, so that every row of the table is looked up once.
    tokens = torch.arange(rows * dims.prompt_length).view(rows, -1)
    return (
        torch.randn(dims.cameras, dims.vision.tokens, dims.language.width),
        torch.ones(dims.cameras, dtype=torch.bool),
        {'tokens': tokens, 'token_mask': torch.ones_like(tokens, dtype=torch.bool)},
    )


def step_inputs(dims: PiDims, network: PiNetwork, rows: int) -> tuple[Any, ...]:
    d, x = dims.language, torch.randn(1, dims.horizon, dims.action_dim)
    past = torch.randn(d.depth, rows, d.num_kv_heads, dims.prefix_length, d.head_dim)
    with torch.no_grad():
        time = network.time_conditioning(torch.ones(1))
    return (
        x,
        {
            'past_key': past,
            'past_value': past,
            'prefix_mask': torch.ones(rows, dims.prefix_length, dtype=torch.bool),
        },
        torch.randn_like(time),
        torch.tensor(1.0),
        torch.tensor(-0.1),
        torch.ones(rows),
        torch.zeros_like(x),
        torch.zeros(1, dims.horizon, 1),
        {'state': torch.randn(rows, dims.state_dim)} if dims.state_dim else {},
    )


@every
@pytest.mark.parametrize('images', [1, 3])
def test_vision_is_what_torch_counts(name, images):
    dims, size = DIMS[name], DIMS[name].vision.image_size
    network, pixels = network_of(dims).vision, torch.randn(images, 3, size, size)
    counted = operation_counts.vision(dims, images)
    assert counted.flops == flops_of(network, pixels)
    assert counted.weight_bytes == 4 * sum(p.numel() for p in network.parameters())


@every
@rows_1_and_2
def test_the_prefill_is_what_torch_counts(name, rows):
    dims = DIMS[name]
    network, inputs = Prefix(network_of(dims)), prefix_inputs(dims, rows)
    counted = operation_counts.prefix(dims, rows)
    assert counted.flops == flops_of(network, *inputs)
    assert counted.weight_bytes == weights_read(network, *inputs)
    outputs = network(*inputs)
    moved = sum(tensor.nbytes for tensor in (inputs[0], *outputs.values()))
    assert counted.data_bytes == moved


@every
@rows_1_and_2
def test_a_denoise_step_is_what_torch_counts(name, rows):
    dims = DIMS[name]
    network = network_of(dims)
    step, inputs = DenoiseStep(network), step_inputs(dims, network, rows)
    counted = operation_counts.denoise_step(dims, rows)
    assert counted.flops == flops_of(step, *inputs)
    assert counted.weight_bytes == weights_read(step, *inputs)


def test_half_precision_halves_the_matrices_and_no_operation():
    for work in (operation_counts.vision, operation_counts.prefix, operation_counts.denoise_step):
        full, half = work(PI05), work(PI05, matrix_bytes=2)
        assert half.flops == full.flops
        assert 0.5 <= half.weight_bytes / full.weight_bytes < 0.51


def test_published_sizes_give_the_published_numbers():
    # So400m has 412 million parameters, the projector 2.4 million; the keys and values of 968
    # tokens (3 cameras, 200 text tokens) are 35.7 MB.
    assert operation_counts.vision(PI05).weight_bytes / 4 == pytest.approx(414.8e6, rel=0.01)
    moved = operation_counts.prefix(PI05).data_bytes - 3 * 256 * 2048 * 4
    assert moved == pytest.approx(35.7e6, rel=0.01)


def test_a_chunk_is_made_of_the_runs_that_were_needed():
    whole = operation_counts.inference(PI05, steps=10)
    hit = operation_counts.inference(PI05, steps=10, images=0, prefix_runs=0)
    one = operation_counts.inference(PI05, steps=10, images=1)
    assert set(whole) == {'vision', 'prefix', 'denoise'}
    assert hit['vision'] == hit['prefix'] == operation_counts.NOTHING
    assert hit['denoise'] == whole['denoise'] == operation_counts.denoise_step(PI05) * 10
    assert one['vision'].flops * 3 == whole['vision'].flops
    assert one['prefix'] == whole['prefix']


def test_a_second_prompt_row_costs_no_second_vision_run():
    one, two = (operation_counts.inference(PI05, steps=10, rows=rows) for rows in (1, 2))
    assert two['vision'] == one['vision']
    assert two['prefix'].flops == 2 * one['prefix'].flops
    assert 1.99 < two['denoise'].flops / one['denoise'].flops < 2
    assert two['denoise'].weight_bytes == one['denoise'].weight_bytes


def test_the_roofline_is_the_slower_of_computing_and_moving():
    work = operation_counts.Work(flops=100, weight_bytes=30, data_bytes=20)
    assert work.bytes == 50
    assert work.least_time_s(flops_per_s=10, bytes_per_s=1000) == 10.0
    assert work.least_time_s(flops_per_s=1000, bytes_per_s=10) == 5.0
    assert work + work == work * 2
