"""The table of devices: rates follow from what its sources say, and drivers' names find them."""

from __future__ import annotations

import re

import pytest

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
