"""Published memory, bandwidth and arithmetic rates of the devices that policies are served on.

Rates are dense: half of one with structured sparsity. Half precision has a quarter of sparse INT8
or an eighth of sparse FP4, as tensor cores scale; float32 is of the plain cores, as no network
here uses TF32. Nothing here was measured. Variants of a card share part of its name but not its
rates (an H100 PCIe has 756 of an H100 SXM's 989 TFLOPS and 2.0 of its 3.35 TB/s), so the driver's
whole name is looked up, as nvidia-smi prints it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

GIB = 2**30
# Bytes per number of the large matrices, by precision.
MATRIX_BYTES: Mapping[str, int] = {'float32': 4, 'float16': 2, 'bfloat16': 2, 'int8': 1}

# Memory that a policy cannot use: CUDA's context and libraries; on a Jetson, which shares memory
# with the system, also Linux, ROS 2, the camera drivers and the other nodes.
_CONTEXT_GIB = 1.0
_JETSON_GIB = 3.0


@dataclass(frozen=True)
class Device:
    """One device, from its maker's documents.

    Attributes:
        memory_gib: on a Jetson shared with the system.
        reserved_gib: part that a policy cannot use (an estimate).
        bandwidth_gb_s: 10^9 bytes a second.
        float32_tflops: plain cores.
        half_tflops: dense tensor cores, accumulated in float32. A GeForce does twice that in
            float16, as TensorRT may choose to.
        source: document with the figures.
        cuda_name: the driver's whole name.
    """

    name: str
    memory_gib: float
    reserved_gib: float
    bandwidth_gb_s: float
    float32_tflops: float
    half_tflops: float
    source: str
    cuda_name: str

    def flops_per_s(self, precision: str) -> float:
        """Operations a second in a precision of `MATRIX_BYTES`; 8 bits run twice as fast as 16."""
        if precision == 'float32':
            return 1e12 * self.float32_tflops
        return 1e12 * self.half_tflops * (2.0 if precision == 'int8' else 1.0)

    @property
    def bytes_per_s(self) -> float:
        return 1e9 * self.bandwidth_gb_s

    @property
    def shares_memory(self) -> bool:
        """True when the system uses the same memory."""
        return 'Jetson' in self.name

    def note(self, precision: str) -> str:
        """Return why a run in this precision may beat these rates; empty if none can."""
        if precision != 'float16' or 'GeForce' not in self.name:
            return ''
        return (
            'float16 accumulated in float16, as TensorRT may choose to, is twice as fast as this '
            'rate: what is bound by compute may take half as long'
        )


def _jetson(
    name: str,
    memory_gib: float,
    bandwidth_gb_s: float,
    float32_tflops: float,
    half_tflops: float,
    source: str,
    cuda_name: str = 'Orin',
) -> Device:
    return Device(
        f'NVIDIA Jetson {name}',
        memory_gib,
        _JETSON_GIB,
        bandwidth_gb_s,
        float32_tflops,
        half_tflops,
        source,
        cuda_name,
    )


def _card(
    name: str,
    memory_gib: float,
    bandwidth_gb_s: float,
    float32_tflops: float,
    half_tflops: float,
    source: str,
    cuda_name: str | None = None,
) -> Device:
    return Device(
        f'NVIDIA {name}',
        memory_gib,
        _CONTEXT_GIB,
        bandwidth_gb_s,
        float32_tflops,
        half_tflops,
        source,
        cuda_name or f'NVIDIA {name}',
    )


DEVICES: Mapping[str, Device] = {
    'orin-nano': _jetson(
        'Orin Nano 8GB (Super, 25 W)',
        8,
        102.0,
        2.1,
        16.7,
        'NVIDIA, Jetson Orin Nano Super Developer Kit datasheet: 67 sparse INT8 TOPS; 1024 cores '
        'at 1.02 GHz',
    ),
    'orin-nano-15w': _jetson(
        'Orin Nano 8GB (15 W)',
        8,
        68.0,
        1.28,
        10.0,
        'NVIDIA, Jetson Orin Nano Series datasheet: 40 sparse INT8 TOPS; 1024 cores at 625 MHz',
    ),
    'orin-nx': _jetson(
        'Orin NX 16GB (25 W)',
        16,
        102.4,
        1.88,
        15.0,
        'NVIDIA, Jetson Orin NX Series datasheet: 60 sparse INT8 TOPS of the GPU (100 with DLAs); '
        '1024 cores at 918 MHz',
    ),
    'agx-orin-32gb': _jetson(
        'AGX Orin 32GB',
        32,
        204.8,
        3.33,
        27.0,
        'NVIDIA, Jetson AGX Orin Series Technical Brief v1.2: 108 sparse INT8 TOPS of the GPU '
        '(200 with DLAs); 1792 cores at 930 MHz',
    ),
    'agx-orin': _jetson(
        'AGX Orin 64GB',
        64,
        204.8,
        5.3,
        42.5,
        'NVIDIA, Jetson AGX Orin Series Technical Brief v1.2: 170 sparse INT8 TOPS of the GPU '
        '(275 with DLAs); 2048 cores at 1.3 GHz',
    ),
    'thor-t4000': _jetson(
        'T4000',
        64,
        273.0,
        4.7,
        150.0,
        'NVIDIA, Jetson Thor Series datasheet: 1200 sparse FP4 TFLOPS; 1536 cores at 1.53 GHz',
        'NVIDIA Thor',
    ),
    'thor': _jetson(
        'AGX Thor (T5000)',
        128,
        273.0,
        8.06,
        258.75,
        'NVIDIA, Jetson Thor Series datasheet: 2070 sparse FP4 TFLOPS; 2560 cores at 1.57 GHz',
        'NVIDIA Thor',
    ),
    'l4': _card('L4', 24, 300.0, 30.3, 121.0, 'NVIDIA, L4 datasheet: 242 sparse FP16 TFLOPS'),
    'l40s': _card('L40S', 48, 864.0, 91.6, 362.05, 'NVIDIA, L40S datasheet'),
    'rtx-3060': _card(
        'GeForce RTX 3060',
        12,
        360.0,
        12.7,
        25.5,
        'NVIDIA, Ampere GA102 whitepaper: 512 FP16 operations with FP32 accumulate a clock and '
        'multiprocessor; 28 of them at 1.78 GHz',
    ),
    'rtx-4090': _card(
        'GeForce RTX 4090',
        24,
        1008.0,
        82.6,
        165.2,
        'NVIDIA, Ada GPU Architecture whitepaper, FP16 with FP32 accumulate',
    ),
    'rtx-5070': _card(
        'GeForce RTX 5070',
        12,
        672.0,
        30.9,
        61.7,
        'NVIDIA, RTX Blackwell GPU Architecture whitepaper, FP16 with FP32 accumulate',
    ),
    'rtx-5090': _card(
        'GeForce RTX 5090',
        32,
        1792.0,
        104.8,
        209.5,
        'NVIDIA, RTX Blackwell GPU Architecture whitepaper, FP16 with FP32 accumulate',
    ),
    'a100': _card(
        'A100-SXM4-80GB', 80, 2039.0, 19.5, 312.0, 'NVIDIA, A100 Tensor Core GPU datasheet'
    ),
    'h100': _card(
        'H100 SXM',
        80,
        3350.0,
        67.0,
        989.5,
        'NVIDIA, H100 Tensor Core GPU datasheet: 1979 sparse BF16 TFLOPS',
        # `NVIDIA H100 PCIe` and `NVIDIA H100 NVL` are other cards.
        'NVIDIA H100 80GB HBM3',
    ),
    'h200': _card(
        'H200 SXM',
        141,
        4800.0,
        67.0,
        989.5,
        'NVIDIA, H200 Tensor Core GPU datasheet: 1979 sparse BF16 TFLOPS',
        # `NVIDIA H200 NVL` is another card.
        'NVIDIA H200',
    ),
}


def device_of_cuda(name: str, total_bytes: int) -> Device | None:
    """Return the table's device of this driver name, or None.

    Jetsons of one generation share a name, so the nearest memory decides (the driver reports a
    little less than is fitted). A device that shares both counts as the one in the table: an Orin
    NX 8GB as an Orin Nano 8GB, a lower power mode as the highest.
    """
    found = total_bytes / GIB
    same = [device for device in DEVICES.values() if device.cuda_name == name]
    near = [device for device in same if abs(device.memory_gib - found) < 0.25 * device.memory_gib]
    # Of equals the first wins: it has today's clocks.
    return min(near, key=lambda device: abs(device.memory_gib - found), default=None)
