"""Performance figures of a published size, kept beside its family's declaration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

_REPORT = 'github.com/VinRobotics/vla.cpp, eval/reports/report-{}.md (LIBERO-Object, May 2026)'
_README = 'github.com/VinRobotics/vla.cpp, README.md (vla-bench, August 2026)'
_VLA_CPP_SOURCES = {
    'agx-orin': _REPORT.format('agx-orin'),
    'orin-nano': _REPORT.format('orin-nano'),
    'rtx-3060': _REPORT.format('rtx-3060'),
    'rtx-5090': _README,
}


@dataclass(frozen=True)
class Kernels:
    """Kernels that a GPU launches for one inference of one prompt row.

    Attributes:
        vision: of one view.
        step: of one denoise step.
        inputs: those that prepare a chunk's denoise steps, once a chunk.
    """

    vision: int
    prefix: int
    step: int
    inputs: int

    def phases(self, *, views: int, steps: int) -> dict[str, int]:
        """Return the kernels of each phase, under the names of `roofline.phase_floors`."""
        denoise = steps * self.step + self.inputs
        return {
            'vision': self.vision,
            'prefix': self.prefix,
            'step': self.step,
            'denoise': denoise,
            'miss': views * self.vision + self.prefix + denoise,
            'hit': denoise,
        }


@dataclass(frozen=True)
class PublishedRun:
    """An inference with new images and one prompt row, measured by the authors of another runtime.

    Views, precision and kernels are theirs: the milliseconds only bound what can be expected.

    Attributes:
        runtime: name of the other runtime.
        device: key of `performance.devices.DEVICES`.
        total_ms: time of the server, without its transport.
        vision_ms: time of the vision towers, all views.
        source: repository and file that published it.
    """

    runtime: str
    device: str
    total_ms: float
    vision_ms: float
    source: str


@dataclass(frozen=True)
class PerformanceFigures:
    """Figures of one published size; empty ones where nothing is known.

    Attributes:
        kernels: kernels of the fused modules with attention without a mask and products with
            epilogues (counted by `benchmark/kernels.py`), by what runs the expert's layers:
            `torch` (PyTorch's operators) or `triton` (Triton kernels). Widths do not matter.
    """

    kernels: Mapping[str, Kernels] = field(default_factory=dict)
    runs: tuple[PublishedRun, ...] = ()

    def runs_on(self, device: str) -> tuple[PublishedRun, ...]:
        """Return the published runs on a device, a key of `performance.devices.DEVICES`."""
        return tuple(run for run in self.runs if run.device == device)


def vla_cpp_runs(times: Mapping[str, tuple[float, float]]) -> tuple[PublishedRun, ...]:
    """Return the runs that the authors of vla.cpp published: device to (total, vision) in ms."""
    return tuple(
        PublishedRun('vla.cpp', device, total, vision, _VLA_CPP_SOURCES[device])
        for device, (total, vision) in times.items()
    )
