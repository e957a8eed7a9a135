"""Policies of every family in fp8, emulated on a CPU: numbers, memory, and what is refused."""

from __future__ import annotations

import logging
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from golden_chunks import chunk_and_reference, golden_cases
from network_cases import relative_error
from recorded_graphs import RecordedGraphs
from thorough import thorough_but
from tiny_policy import TINY_FAMILIES, observation, tiny_dims, tiny_spec, write_tiny_policy

from vla_runtime.engines import preflight
from vla_runtime.engines.tolerances import error_of
from vla_runtime.engines.torch import cuda_graph, weights
from vla_runtime.engines.torch import engine as torch_engine
from vla_runtime.engines.torch.loading import load_torch_engine
from vla_runtime.engines.torch.weights import load_network
from vla_runtime.families.blocks.float8 import E4M3
from vla_runtime.families.blocks.layers import Linear, matrix_names, product_names
from vla_runtime.families.flow_network import empty_network
from vla_runtime.family.listing import preset
from vla_runtime.inference.settings import PolicySettings
from vla_runtime.policy import Policy
from vla_runtime.types import CommittedPlan

# Of chunks from random weights, relative to the largest action if above 1. Rounding is 16 times
# that of bfloat16, for small numbers beside large ones more; errors are 5 to 29 times its errors.
BOUND, TIMES_BFLOAT16 = 0.3, 32

families = pytest.mark.parametrize(
    'family', thorough_but(['pi05', 'smolvla', 'act'], TINY_FAMILIES)
)


@pytest.fixture(scope='module')
def bundles(tmp_path_factory: pytest.TempPathFactory):
    made: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in made:
            folder = tmp_path_factory.mktemp('bundles') / family
            made[family] = write_tiny_policy(folder, tiny_spec(family))
        return made[family]

    return make


def chunks(bundle: Path, precision: str, settings: PolicySettings | None = None) -> np.ndarray:
    """Normalised actions of two inferences."""
    loaded = Policy.load(bundle, 'torch', precision=precision, settings=settings, threads=1)
    with closing(loaded) as policy:
        return np.stack([policy.infer(observation(seed=n))[0].normalised for n in (0, 1)])


@families
def test_chunks_of_every_family_are_near_those_in_float32_and_repeat(bundles, family):
    expected, half, found = (chunks(bundles(family), one) for one in ('float32', 'bfloat16', 'fp8'))
    least, error = error_of(half, expected)[0], error_of(found, expected)[0]
    assert least < error <= min(BOUND, TIMES_BFLOAT16 * least)
    np.testing.assert_array_equal(chunks(bundles(family), 'fp8'), found)


@families
def test_products_weigh_a_byte_a_number_and_all_else_is_as_in_bfloat16(bundles, family):
    spec, path = tiny_spec(family), bundles(family) / 'weights.safetensors'
    eight, half = (
        load_network(family, spec.dims, path, device='cpu', precision=precision)
        for precision in ('fp8', 'bfloat16')
    )
    products = product_names(eight)
    assert products and products < matrix_names(eight)
    for name, parameter in eight.named_parameters():
        other = half.get_parameter(name)
        if name not in products:
            assert parameter.dtype == other.dtype and torch.equal(parameter, other)
            continue
        assert parameter.dtype == E4M3
        assert parameter.untyped_storage().nbytes() == parameter.numel()
        scale = eight.get_buffer(f'{name}_scale')
        assert scale.shape == parameter.shape[:1] and scale.dtype == torch.float32
        # Within half of the format's last bit, of a row's largest number.
        off = (parameter.float() * scale[:, None] - other.float()).abs()
        assert (off <= 2.0**-4 * other.float().abs().amax(dim=1, keepdim=True)).all()


@pytest.mark.parametrize('family', ['pi05', 'pi0', 'smolvla'])
def test_fused_and_plain_modules_give_the_same_numbers(bundles, family, monkeypatch):
    exact, fused = (chunks(bundles(family), one) for one in ('float32', 'fp8'))
    network = type(empty_network(family, tiny_dims(family)))
    monkeypatch.setattr(network, 'fused', lambda self, static_shapes=False: self)
    # Rounding of float32 sums takes single numbers to the next one in 8 bits: in the mean 0.1 to
    # 0.2 of what 8 bits are off by.
    apart = error_of(fused, chunks(bundles(family), 'fp8'))[1]
    assert apart <= 0.4 * error_of(fused, exact)[1]


@pytest.mark.thorough
@families
def test_a_graph_replays_8_bits_as_they_run(bundles, family, monkeypatch):
    """Scales are made on the device: nothing waits for a number, which would end a capture."""
    monkeypatch.setattr(torch_engine, 'captures_graphs', lambda device: True)
    monkeypatch.setattr(cuda_graph, 'CudaGraphCapture', RecordedGraphs)
    eager, graphed = (
        Policy.load(bundles(family), 'torch', precision='fp8', use_cuda_graphs=use, threads=1)
        for use in (False, True)
    )
    with closing(eager), closing(graphed):
        for number in (0, 1, 0):
            found, report = graphed.infer(observation(seed=number), number=number)
            expected, _ = eager.infer(observation(seed=number), number=number)
            np.testing.assert_array_equal(found.normalised, expected.normalised)
    assert set(report.cuda_graph.values()) == {'captured'}


@pytest.mark.parametrize('family', ['pi05', 'smolvla'])
def test_a_plan_can_tie_a_chunk_through_the_network(bundles, family):
    """`rtc_mode: jacobian` needs gradients, which 8 bits do not have by themselves."""
    settings = PolicySettings(rtc_mode='jacobian')
    found = {}
    for precision in ('float32', 'fp8'):
        loaded = Policy.load(
            bundles(family), 'torch', precision=precision, settings=settings, threads=1
        )
        with closing(loaded) as policy:
            free, _ = policy.infer(observation(), number=0)
            plan = CommittedPlan(free.actions + 0.2, delay_steps=2, execution_horizon=5)
            tied, report = policy.infer(observation(), number=0, plan=plan)
            assert report.rtc_mode == 'jacobian'
            found[precision] = tied.normalised - free.normalised
    # The plan moves the chunk, and about as far as it does in float32.
    assert np.abs(found['float32']).max() > 5e-2
    assert error_of(found['fp8'], found['float32'])[0] <= 0.5 * np.abs(found['float32']).max()


@pytest.mark.cases
@pytest.mark.parametrize('name', golden_cases())
def test_chunks_of_the_golden_cases_are_near_the_reference(name):
    case = golden_cases()[name]
    exact, half, error = (
        relative_error(*chunk_and_reference(case, precision))
        for precision in ('float32', 'bfloat16', 'fp8')
    )
    assert exact <= 2e-5 and half < error <= min(BOUND, TIMES_BFLOAT16 * half)


def test_a_number_that_is_none_is_refused_as_in_float32(bundles):
    with closing(Policy.load(bundles('pi05'), 'torch', precision='fp8', threads=1)) as policy:
        for weight in policy._engine._network.parameters():
            if weight.dtype == torch.float32 and weight.dim() == 2:
                weight.data[0, 0] = torch.nan
        with pytest.raises(ValueError, match='not finite'):
            policy.infer(observation())


def test_a_cpu_says_that_it_emulates(bundles, caplog):
    with caplog.at_level(logging.WARNING):
        Policy.load(bundles('act'), 'torch', precision='fp8', threads=1).close()
    assert "precision 'fp8' is emulated on a CPU" in caplog.text
    caplog.clear()
    Policy.load(bundles('act'), 'torch', precision='bfloat16', threads=1).close()
    assert 'emulated' not in caplog.text


@pytest.mark.parametrize('capability', [(8, 7), (8, 6), (8, 0), (7, 5)])
def test_a_gpu_without_such_products_is_refused_before_its_weights_are_read(
    tmp_path, monkeypatch, capability
):
    monkeypatch.setattr(preflight, '_compute_capability', lambda index: capability)
    monkeypatch.setattr(weights, 'torch_device', torch.device)
    options = {'precision': 'fp8', 'max_rows': 1, 'use_cuda_graphs': True, 'device': 'cuda'}
    number = '.'.join(map(str, capability))
    with pytest.raises(
        ValueError, match=rf"'fp8': device 'cuda' has compute capability {number}.* use bfloat16"
    ):
        load_torch_engine('act', tiny_dims('act'), tmp_path / 'none', **options)


@pytest.mark.parametrize('capability', [(8, 9), (9, 0), (11, 0), (12, 0)])
def test_a_gpu_that_has_them_goes_on_to_its_weights(tmp_path, monkeypatch, capability):
    monkeypatch.setattr(preflight, '_compute_capability', lambda index: capability)
    monkeypatch.setattr(weights, 'torch_device', torch.device)
    options = {'precision': 'fp8', 'max_rows': 1, 'use_cuda_graphs': True, 'device': 'cuda:1'}
    with pytest.raises(FileNotFoundError):
        load_torch_engine('act', tiny_dims('act'), tmp_path / 'none', **options)


@pytest.mark.parametrize(
    'name', ['pi05', 'pi0', 'smolvla', 'groot_n15', 'groot_n16', 'groot_n17', 'evo1', 'act']
)
def test_published_sizes_need_no_padding_for_tensor_cores(name):
    family, dims = preset(name)
    for module in empty_network(family, dims).modules():
        if isinstance(module, Linear):
            assert module.in_features % 16 == module.out_features % 16 == 0
