"""The table of devices: rates follow from what its sources say, and drivers' names find them."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from vla_runtime.models.blocks import products
from vla_tools.cli.bench import _power_lines
from vla_tools.performance import device_rates
from vla_tools.performance.device_rates import power_state
from vla_tools.performance.devices import DEVICES, GIB, MATRIX_BYTES, device_of_cuda

# How many times a published rate is dense half precision on tensor cores.
FACTORS = {'INT8': 4, 'FP4': 8, 'FP16': 2, 'BF16': 2}


@pytest.mark.parametrize('key', DEVICES)
def test_rates_follow_from_the_figures_in_the_source(key):
    device = DEVICES[key]
    assert device.source.startswith('NVIDIA, ')
    sparse = re.search(r'(\d+) sparse (\w+) (TOPS|TFLOPS)', device.source)
    if sparse:
        assert device.half_tflops == pytest.approx(int(sparse[1]) / FACTORS[sparse[2]], rel=0.01)
    cores = re.search(r'(\d+) cores at ([\d.]+) (GHz|MHz)', device.source)
    assert bool(cores) == ('Jetson' in device.name)
    if cores:
        clock_hz = float(cores[2]) * {'GHz': 1e9, 'MHz': 1e6}[cores[3]]
        assert device.float32_tflops == pytest.approx(2 * int(cores[1]) * clock_hz / 1e12, rel=0.02)


def test_half_precision_is_faster_and_takes_half_the_bytes():
    for device in DEVICES.values():
        assert device.flops_per_s('float32') < device.flops_per_s('float16')
        assert device.flops_per_s('float16') == device.flops_per_s('bfloat16')
        assert device.reserved_gib < device.memory_gib
    assert MATRIX_BYTES['float32'] == 2 * MATRIX_BYTES['bfloat16']


@pytest.mark.parametrize(
    ('name', 'gib', 'key'),
    [
        ('Orin', 61.4, 'agx-orin'),
        ('Orin', 29.8, 'agx-orin-32gb'),
        ('Orin', 15.3, 'orin-nx'),
        ('Orin', 7.4, 'orin-nano'),
        ('NVIDIA Thor', 122.8, 'thor'),
        ('NVIDIA H200', 139.8, 'h200'),
        ('NVIDIA H100 80GB HBM3', 79.1, 'h100'),
        ('NVIDIA GeForce RTX 4090', 23.6, 'rtx-4090'),
        ('NVIDIA L4', 22.0, 'l4'),
        ('NVIDIA L40S', 44.4, 'l40s'),
        ('NVIDIA A100-SXM4-80GB', 79.2, 'a100'),
        ('NVIDIA GeForce RTX 5090', 31.4, 'rtx-5090'),
        ('NVIDIA GeForce RTX 4090 Laptop GPU', 15.7, None),
        ('NVIDIA GeForce RTX 4090 D', 23.6, None),
        ('NVIDIA GeForce RTX 5090 D', 31.4, None),
        ('NVIDIA H100 PCIe', 79.1, None),
        ('NVIDIA H100 NVL', 93.1, None),
        ('NVIDIA H100 80GB HBM2e', 79.1, None),
        ('NVIDIA H100 80GB HBM3 MIG 7g.80gb', 79.1, None),
        ('NVIDIA H200 NVL', 139.8, None),
        ('NVIDIA A100 80GB PCIe', 79.2, None),
        ('NVIDIA A100-SXM4-40GB', 39.4, None),
        ('NVIDIA L40', 44.4, None),
        ('NVIDIA Thor', 61.4, 'thor-t4000'),
        ('NVIDIA GeForce RTX 3070', 7.8, None),
    ],
)
def test_a_driver_name_and_its_memory_find_the_device_or_none(name, gib, key):
    assert device_of_cuda(name, int(gib * GIB)) == (DEVICES[key] if key else None)


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


def test_a_cpu_is_measured_through_the_product_of_joined_layers_too(small, monkeypatch):
    called = []
    monkeypatch.setattr(
        products, 'one_pass', lambda device, dtype: lambda *given: called.append(given)
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


GPU = 'class/devfreq/17000000.gpu'
CORES = 'devices/system/cpu/cpufreq/policy0'


@pytest.fixture
def kernel(monkeypatch, tmp_path):
    """Write files of a /sys of its own; no nvpmodel on PATH."""
    tree = tmp_path / 'sys'
    tree.mkdir()
    monkeypatch.setattr(device_rates, '_SYS', tree)
    monkeypatch.setenv('PATH', str(tmp_path / 'bin'))

    def write(files: dict[str, str]) -> None:
        for name, text in files.items():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            (tree / name).write_text(text)

    return write


def make_nvpmodel(tmp_path: Path, script: str) -> None:
    tool = tmp_path / 'bin' / 'nvpmodel'
    tool.parent.mkdir()
    tool.write_text(f'#!/bin/sh\n{script}\n')
    tool.chmod(0o755)


def test_a_jetson_says_mode_clocks_and_temperatures(kernel, tmp_path):
    make_nvpmodel(tmp_path, 'echo "NV Power Mode: MAXN_SUPER"; echo 2')
    kernel(
        {
            f'{GPU}/cur_freq': '1020000000\n',
            f'{GPU}/min_freq': '306000000\n',
            f'{GPU}/max_freq': '1020000000\n',
            f'{CORES}/scaling_cur_freq': '1728000\n',
            f'{CORES}/scaling_max_freq': '1728000\n',
            'class/thermal/thermal_zone0/type': 'cpu-thermal\n',
            'class/thermal/thermal_zone0/temp': '48500\n',
            'class/thermal/thermal_zone1/type': 'gpu-thermal\n',
            'class/thermal/thermal_zone1/temp': '51250\n',
        }
    )
    found = power_state()
    assert found == {
        'power_mode': 'MAXN_SUPER 2',
        'clocks': {
            '17000000.gpu': {'now_mhz': 1020, 'least_mhz': 306, 'most_mhz': 1020},
            'policy0': {'now_mhz': 1728, 'most_mhz': 1728},
        },
        'celsius': {'cpu-thermal': 48.5, 'gpu-thermal': 51.25},
    }
    assert _power_lines({'before': found, 'after': found}) == [
        'power mode: MAXN_SUPER 2',
        'clocks after it: 17000000.gpu 1020 MHz of 1020, policy0 1728 MHz of 1728',
        'hottest: gpu-thermal 51 °C before, gpu-thermal 51 °C after',
    ]


def test_what_is_not_there_or_cannot_be_read_is_left_out(kernel, tmp_path):
    assert power_state() == {}
    make_nvpmodel(tmp_path, 'exit 1')
    kernel(
        {
            f'{GPU}/cur_freq': '',
            'class/thermal/thermal_zone0/type': 'cv0-thermal\n',
            'class/thermal/thermal_zone0/temp': 'off\n',
            'class/thermal/thermal_zone1/temp': '40000\n',
        }
    )
    assert power_state() == {}
    assert _power_lines({'before': {}, 'after': {}}) == []
