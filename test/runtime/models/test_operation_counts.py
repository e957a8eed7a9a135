"""Operations counted on the meta device, against the same networks running on numbers."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from onnx_bundles import copy_bundle, tiny_onnx_bundle
from tiny_policy import tiny_dims, tiny_spec, write_tiny_policy
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from vla_runtime.bundle.folder import read_bundle
from vla_runtime.declarations.pi import PI0, PI05
from vla_runtime.family.counts import Work
from vla_runtime.files.json_file import JsonError
from vla_runtime.models.base.flow_network import FlowNetwork, build_network
from vla_runtime.models.base.flow_step import Prefix
from vla_runtime.models.shapes import operation_counts
from vla_runtime.models.shapes.operation_counts import count_operations, counts_of
from vla_runtime.models.shapes.traced_shapes import row_tensors

DIMS = {
    'pi05': ('pi05', tiny_dims('pi05')),
    'pi0': ('pi0', tiny_dims('pi0')),
    'smolvla': ('smolvla', tiny_dims('smolvla')),
    'pi05 odd': (
        'pi05',
        replace(tiny_dims('pi05'), action_dim=7, horizon=5, cameras=3, prompt_length=17),
    ),
    'pi0 shared': (
        'pi0',
        replace(
            tiny_dims('pi0'),
            language=replace(tiny_dims('pi0').language, depth=3, num_kv_heads=2),
            expert=replace(tiny_dims('pi0').expert, depth=3, num_kv_heads=2),
        ),
    ),
}
every = pytest.mark.parametrize('name', DIMS)
rows_1_and_2 = pytest.mark.parametrize('rows', [1, 2])


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """A gradient that is 0 by chance counts as a weight that was not read."""
    torch.manual_seed(0)


def flops_of(run: Callable[[], Any]) -> int:
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        run()
    return counter.get_total_flops()


def weights_read(network: nn.Module, run: Callable[[], Any]) -> int:
    """Bytes of the parameters that the outputs depend on; of a table, the rows looked up."""
    for parameter in network.parameters():
        # A zero hides what it multiplies.
        torch.nn.init.normal_(parameter, std=0.1)
        parameter.grad = None
    floats = [tensor for tensor in tree_leaves(run()) if tensor.is_floating_point()]
    sum(((t * torch.randn_like(t)).sum() for t in floats), torch.tensor(0.0)).backward()
    return 4 * sum(int((p.grad != 0).sum()) for p in network.parameters() if p.grad is not None)


def prefix_run(network: FlowNetwork, rows: int) -> tuple[Tensor, Callable[[], Any]]:
    """Image tokens, and a run over prompts of words that are all different."""
    dims = network.dims
    with torch.no_grad():
        tokens = network.vision(torch.randn(1, 3, dims.image_size, dims.image_size))
    images = torch.randn(dims.cameras, *tokens.shape[1:])
    inputs = row_tensors(network.family.prefix_inputs(dims), rows, 'cpu')
    inputs['tokens'] = torch.arange(rows * dims.prompt_length).view(rows, -1)
    inputs['token_mask'] = torch.ones_like(inputs['tokens'], dtype=torch.bool)
    if 'state' in inputs:
        inputs['state'] = torch.randn_like(inputs['state'])
    everyone = torch.ones(dims.cameras, dtype=torch.bool)
    return images, lambda: Prefix(network)(images, everyone, inputs)


@every
def test_vision_is_what_torch_counts(name):
    family, dims = DIMS[name]
    network, pixels = build_network(family, dims).vision, torch.randn(1, 3, *[dims.image_size] * 2)
    counted = count_operations(family, dims).vision.work(4)
    assert counted.flops == flops_of(lambda: network(pixels))
    assert counted.weight_bytes == 4 * sum(p.numel() for p in network.parameters())
    assert counted.data_bytes == pixels.nbytes + network(pixels).nbytes


@every
@rows_1_and_2
def test_the_prefix_is_what_torch_counts(name, rows):
    family, dims = DIMS[name]
    network = build_network(family, dims)
    images, run = prefix_run(network, rows)
    counted = count_operations(family, dims).prefix[rows].work(4)
    assert counted.flops == flops_of(run)
    assert counted.weight_bytes == weights_read(network, run)
    past = [tensor for tensor in run().values() if tensor.is_floating_point()]
    assert counted.data_bytes == sum(tensor.nbytes for tensor in (images, *past))


@every
@rows_1_and_2
def test_a_denoise_step_is_what_torch_counts(name, rows):
    family, dims = DIMS[name]
    network = build_network(family, dims)
    with torch.no_grad():
        past = {
            name: torch.randn_like(tensor) if tensor.is_floating_point() else tensor
            for name, tensor in prefix_run(network, rows)[1]().items()
        }
        conditioning = torch.randn_like(network.time_conditioning(torch.ones(1)))
    x = torch.randn(1, dims.horizon, dims.action_dim)
    head = row_tensors(network.family.head_inputs(dims), rows, 'cpu')
    head = {name: torch.randn_like(tensor) for name, tensor in head.items()}

    def run() -> Tensor:
        return network.velocity(x, past, conditioning, **head)

    counted = count_operations(family, dims).step[rows].work(4)
    assert counted.flops == flops_of(run)
    # A parameter of which only a part is read (`action_time_in`) counts whole.
    assert 1.0 <= counted.weight_bytes / weights_read(network, run) < 1.1
    floats = [tensor for tensor in past.values() if tensor.is_floating_point()]
    # x comes out as well.
    moved = (x, x, run(), conditioning, *head.values(), *floats)
    assert counted.data_bytes == sum(tensor.nbytes for tensor in moved)


def test_half_precision_halves_the_matrices_and_no_operation():
    counts = count_operations('pi05', PI05)
    for network in (counts.vision, counts.prefix[1], counts.step[1]):
        full, half = network.work(4), network.work(2)
        assert half.flops == full.flops
        assert 0.5 <= half.weight_bytes / full.weight_bytes < 0.51


def test_published_sizes_give_the_published_numbers():
    # So400m has 412 million parameters, the projector 2.4 million; the keys and values of 968
    # tokens (3 cameras, 200 text tokens) are 35.7 MB.
    counts = count_operations('pi05', PI05)
    assert counts.vision.work(4).weight_bytes / 4 == pytest.approx(414.8e6, rel=0.01)
    assert counts.prefix[1].past * 4 == pytest.approx(35.7e6, rel=0.01)
    assert (counts.matrices + counts.others) == 3_353_433_872
    assert sum(getattr(count_operations('pi0', PI0), part) for part in ('matrices', 'others')) == (
        3_238_048_528
    )


def test_a_chunk_is_made_of_the_runs_that_were_needed():
    counts = count_operations('pi05', PI05)
    whole = counts.inference(steps=10)
    hit = counts.inference(steps=10, images=0, prefix_runs=0)
    one = counts.inference(steps=10, images=1)
    assert set(whole) == {'vision', 'prefix', 'denoise'}
    assert hit['vision'] == hit['prefix'] == Work(0, 0, 0)
    assert hit['denoise'] == whole['denoise'] == counts.step[1].work(4) * 10
    assert one['vision'].flops * 3 == whole['vision'].flops
    assert one['prefix'] == whole['prefix']


def test_a_second_prompt_row_costs_no_second_vision_run():
    counts = count_operations('pi05', PI05)
    one, two = (counts.inference(steps=10, rows=rows) for rows in (1, 2))
    assert two['vision'] == one['vision']
    assert two['prefix'].flops == 2 * one['prefix'].flops
    assert 1.99 < two['denoise'].flops / one['denoise'].flops < 2
    assert two['denoise'].weight_bytes == one['denoise'].weight_bytes


def test_the_roofline_is_the_slower_of_computing_and_moving():
    work = Work(flops=100, weight_bytes=30, data_bytes=20)
    assert work.bytes == 50
    assert work.least_time_s(flops_per_s=10, bytes_per_s=1000) == 10.0
    assert work.least_time_s(flops_per_s=1000, bytes_per_s=10) == 5.0
    assert work + work == work * 2


def test_a_bundle_with_onnx_files_has_its_counts_and_needs_no_pytorch_for_them(monkeypatch):
    bundle = read_bundle(tiny_onnx_bundle('smolvla'), verify=False)
    counted = count_operations('smolvla', bundle.spec.dims)
    monkeypatch.setattr(operation_counts, 'count_operations', None)
    assert counts_of(bundle) == counted


def test_a_bundle_without_counts_is_counted(tmp_path):
    bundle = read_bundle(write_tiny_policy(tmp_path / 'tiny', tiny_spec()), verify=False)
    assert counts_of(bundle) == count_operations('pi05', bundle.spec.dims)


def test_a_damaged_count_is_named(tmp_path):
    folder = copy_bundle(tiny_onnx_bundle(), tmp_path / 'damaged')
    path = folder / 'onnx' / 'operations.json'
    document = json.loads(path.read_text())
    document['step']['2']['flops'] = 'many'
    path.unlink()
    path.write_text(json.dumps(document))
    with pytest.raises(JsonError):
        counts_of(read_bundle(folder, verify=False))
