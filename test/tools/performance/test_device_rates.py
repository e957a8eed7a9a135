"""Rates of a device: published where it is known, measured where it is not."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from vla_runtime.families.blocks import fused_product
from vla_tools.performance import device_rates
from vla_tools.performance.devices import DEVICES, GIB


@pytest.fixture
def small(monkeypatch):
    """Probes that take no time; what they find is then no device's best."""
    monkeypatch.setattr(device_rates, '_SIDE', 32)
    monkeypatch.setattr(device_rates, '_ARRAY_BYTES', 2**16)


def test_a_known_gpu_has_its_published_rates_and_is_not_touched(small):
    found = device_rates.rates_of('NVIDIA H200', 139 * GIB, 'cuda:0', 'bfloat16')
    assert found.source == DEVICES['h200'].source
    assert found.flops_per_s == 989.5e12
    assert found.bytes_per_s == 4800e9


def test_a_cpu_is_measured(small):
    found = device_rates.rates_of(None, 0, 'cpu', 'float32')
    assert found.source.startswith('measured here: PyTorch')
    assert 0 < found.flops_per_s < 1e15
    assert 0 < found.bytes_per_s < 1e15


def test_a_cpu_is_measured_through_the_product_of_the_fused_modules_too(small, monkeypatch):
    called = []
    monkeypatch.setattr(
        fused_product, 'one_pass', lambda device, dtype: lambda *given: called.append(given)
    )
    device_rates.rates_of(None, 0, 'cpu', 'float32')
    assert called


@pytest.mark.parametrize('precision', ['bfloat16', 'float16'])
def test_a_cpu_emulates_half_precision_and_has_no_rate_in_it(small, precision):
    # PyTorch's product in float16 was ten times slower than a whole run in ONNX Runtime.
    assert device_rates.rates_of(None, 0, 'cpu', precision) is None


def test_a_float16_rate_that_can_be_beaten_says_so():
    card = 'NVIDIA GeForce RTX 4090'
    assert 'is twice as fast' in device_rates.rates_of(card, 24 * GIB, 'cuda', 'float16').source
    assert (
        device_rates.rates_of(card, 24 * GIB, 'cuda', 'bfloat16').source
        == DEVICES['rtx-4090'].source
    )


def test_without_torch_numpy_measures_float32_and_nothing_else(small, monkeypatch):
    # As on a machine that serves TensorRT or ONNX alone.
    monkeypatch.setattr(device_rates.importlib.util, 'find_spec', lambda name: None)
    assert device_rates.rates_of(None, 0, 'cpu', 'float32').source == (
        f'measured here: NumPy {np.__version__}'
    )
    assert device_rates.rates_of(None, 0, 'cpu', 'bfloat16') is None
    assert device_rates.rates_of('NVIDIA Unheard Of', 8 * GIB, 'cuda:0', 'float32') is None


@pytest.mark.skipif(torch.cuda.is_available(), reason='this PyTorch reaches a GPU')
@pytest.mark.parametrize('precision', ['float32', 'bfloat16'])
def test_a_gpu_in_no_table_has_no_rates_where_pytorch_cannot_reach_it(small, precision):
    assert device_rates.rates_of('NVIDIA Unheard Of', 8 * GIB, 'cuda:0', precision) is None


def test_the_best_run_counts_and_a_copy_moves_each_byte_twice(monkeypatch):
    monkeypatch.setattr(device_rates, '_ARRAY_BYTES', 1000)
    seconds = {'multiply': iter([4.0, 2.0] * 10), 'read': iter([1.0] * 5), 'copy': iter([1.0] * 5)}
    found = device_rates._best(
        lambda work: next(seconds[work]), 10, 'multiply', 'read', 'copy', 'so'
    )
    assert found.flops_per_s == 2 * 10**3 / 2.0
    assert found.bytes_per_s == 2000.0
    assert found.source == 'so'
