"""Memory that a policy needs on a device, and the least time of every phase, on paper.

Roofline model (Williams et al., CACM 2009): a phase takes at least its operations at the device's
rate, and its bytes at the bandwidth. No real run reaches the floor. A prediction for PyTorch on
CUDA adds a fixed cost a kernel; products and attention that fill few multiprocessors take longer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from vla_runtime.engines.free_memory import LOAD_RESERVE_BYTES
from vla_runtime.engines.protocol import SLOTS
from vla_runtime.family.counts import PolicyCounts, Work
from vla_runtime.family.performance_figures import Kernels
from vla_tools.performance.devices import GIB, MATRIX_BYTES, Device

_FLOAT32 = 4


@dataclass(frozen=True)
class Rates:
    """Peak rates of a device; `flops_per_s` is of matrix products in the precision at hand."""

    flops_per_s: float
    bytes_per_s: float
    source: str


@dataclass(frozen=True)
class Floor:
    """Least time of some work; `bound`: `compute`, `memory`, or `mostly` and the longest phase."""

    milliseconds: float
    bound: str


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes that serving a policy takes.

    Attributes:
        weights: all loaded ones. PyTorch loads the text table; other backends map it on the
            host.
        past: keys and values of all prefix slots, for every built number of rows.
        prepared: keys and values as PyTorch's denoise steps read them, at most as much again;
            none without fused modules.
        activations: of the prefix's widest operation, an estimate.
        reserve: also requested at load, not part of the total.
    """

    weights: int
    past: int
    prepared: int
    activations: int
    reserve: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.past + self.prepared + self.activations


def published_rates(device: Device, precision: str) -> Rates:
    """Return a device's rates from the table."""
    source = '; '.join(filter(None, (device.source, device.note(precision))))
    return Rates(device.flops_per_s(precision), device.bytes_per_s, source)


def floor(work: Work, rates: Rates) -> Floor:
    """Return the least time of this work at these rates."""
    seconds = work.least_time_s(rates.flops_per_s, rates.bytes_per_s)
    computes = work.flops / rates.flops_per_s >= work.bytes / rates.bytes_per_s
    return Floor(seconds * 1e3, 'compute' if computes else 'memory')


def phase_floors(
    counts: PolicyCounts, rates: Rates, *, precision: str, rows: int, steps: int, views: int
) -> dict[str, Floor]:
    """Least times of one inference, phase by phase.

    `precision`: of the large matrices, a key of `MATRIX_BYTES`; `rows`: prompt rows, 2 under
    guidance; `views`: cameras with a new image at a miss. Returns `vision` (one view), `prefix`,
    `step` (one run of the head), `denoise` (all runs), and the sums `miss` (every phase) and `hit`
    (denoise).
    """
    size = MATRIX_BYTES[precision]
    step = counts.step[rows].work(size)
    floors = {
        'vision': floor(counts.vision.work(size), rates),
        'prefix': floor(counts.prefix[rows].work(size), rates),
        'step': floor(step, rates),
        'denoise': floor(step * (steps * counts.passes), rates),
    }
    vision, prefix, denoise = (
        floors[phase].milliseconds for phase in ('vision', 'prefix', 'denoise')
    )
    slowest = max(
        ('vision', vision * views), ('prefix', prefix), ('denoise', denoise), key=lambda p: p[1]
    )
    floors['miss'] = Floor(views * vision + prefix + denoise, f'mostly {slowest[0]}')
    floors['hit'] = Floor(denoise, floors['denoise'].bound)
    return floors


def miss_shares(floors: Mapping[str, Floor], views: int) -> dict[str, float]:
    """Return the fractions of `vision` (all views), `prefix` and `denoise` in a miss."""
    times = {phase: floors[phase].milliseconds for phase in ('vision', 'prefix', 'denoise')}
    times['vision'] *= views
    return {phase: time / floors['miss'].milliseconds for phase, time in times.items()}


def memory_need(counts: PolicyCounts, backend: str, *, precision: str, rows: int) -> MemoryNeed:
    """Return the device memory that serving a policy takes.

    PyTorch and a TensorRT engine hold one set of weights for all numbers of rows; ONNX Runtime has
    a prefix and an expert for each, with their own copies. All share scratch memory, but each ONNX
    Runtime session keeps its own. PyTorch's further tens of megabytes a camera on CUDA are not
    counted.

    Args:
        backend: `torch`, `onnxruntime` or `tensorrt`.
        precision: of the large matrices, a key of `MATRIX_BYTES`.
        rows: most prompt rows; 1 to this are built.
    """
    size, built = MATRIX_BYTES[precision], range(1, rows + 1)
    at_once = sum(built) if backend == 'onnxruntime' else rows
    pairs = len(built) if backend == 'onnxruntime' else 1
    past = SLOTS * sum(counts.prefix[count].past for count in built) * size
    return MemoryNeed(
        weights=weight_bytes(counts, size)
        if backend == 'torch'
        else engine_weight_bytes(counts, size, pairs),
        past=past,
        prepared=past if backend == 'torch' else 0,
        activations=at_once * counts.widest * size,
        reserve=LOAD_RESERVE_BYTES if backend == 'tensorrt' else 0,
    )


def engine_weight_bytes(counts: PolicyCounts, matrix_bytes: int, pairs: int) -> int:
    """Bytes of the weights in the vision engine and in `pairs` prefix and expert engines.

    Parameters that no engine reads are left out, such as those of the time table.
    """
    vision, prefix, expert = _engine_weights(counts, matrix_bytes)
    return vision + pairs * (prefix + expert)


def largest_engine_bytes(counts: PolicyCounts, matrix_bytes: int) -> int:
    """Bytes of the weights in the largest engine; it is the same for every number of rows."""
    return max(_engine_weights(counts, matrix_bytes))


def _engine_weights(counts: PolicyCounts, matrix_bytes: int) -> tuple[int, int, int]:
    """Weight bytes of the vision, prefix and expert engines; the text table is the host's."""
    vision, prefix, expert = (
        network.held_bytes(matrix_bytes) - network.hosted * matrix_bytes
        for network in (counts.vision, counts.prefix[1], counts.step[1])
    )
    return vision, prefix, expert


def weight_bytes(counts: PolicyCounts, matrix_bytes: int = _FLOAT32) -> int:
    """Bytes of all parameters: `matrix_bytes` a number in large matrices, else float32."""
    return counts.matrices * matrix_bytes + counts.others * _FLOAT32 + counts.packed


def fits(need: MemoryNeed, device: Device) -> bool:
    """Return whether this would be loaded, in the device's memory less what the table reserves."""
    return need.total + need.reserve <= (device.memory_gib - device.reserved_gib) * GIB


# About what a kernel takes that is too small to fill a GPU. On an H200 each kernel of a denoise
# step adds 4.1 µs to its least time with operators, 4.4 in Triton (benchmark/results/gpu.json).
SECONDS_A_KERNEL = 4e-6


# Precisions that kernels were counted in; others have other casts, masks and scales.
COUNTED_PRECISIONS = ('bfloat16', 'float16')


def predicted_ms(
    floors: Mapping[str, Floor], kernels: Kernels, *, views: int, steps: int
) -> dict[str, float]:
    """Return the predicted milliseconds of each phase, from `phase_floors` of one prompt row.

    `views`: cameras with a new image at a miss.
    """
    return {
        phase: floors[phase].milliseconds + 1e3 * SECONDS_A_KERNEL * count
        for phase, count in kernels.phases(views=views, steps=steps).items()
    }
