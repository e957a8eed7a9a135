"""Receipt of a comparison with PyTorch; errors and bounds are those of `engines.recorded_cases`."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from vla_convert.checkpoints.folder_facts import ExportError
from vla_runtime.bundle.onnx_files import QUANTISED, Precision
from vla_runtime.engines.recorded_cases import BOUNDS, BoundBy, chunk_bound

# Seed of the compared inputs.
SEED = 20
# Name of the time table among the compared files.
TIME_TABLE = 'time table'


class VerificationError(ExportError):
    """Files that differ from the PyTorch modules; the message names the tensors."""


@dataclass(frozen=True)
class Comparison:
    """One tensor against the reference, over several cases."""

    file: str
    tensor: str
    max_error: float
    mean_error: float
    bound: float

    @classmethod
    def of(
        cls, file: str, tensor: str, errors: list[tuple[float, float]], precision: str
    ) -> Comparison:
        """From the largest and mean error of every case; the time table is always float32."""
        largest, mean = np.array(errors).T
        bound = BOUNDS['float32' if file == TIME_TABLE else precision].tensor
        return cls(file, tensor, float(largest.max()), float(mean.mean()), bound)

    @property
    def passed(self) -> bool:
        # NaN fails.
        return bool(self.max_error <= self.bound)


@dataclass(frozen=True)
class ChunkComparison:
    """One whole chunk against the reference.

    `file` gave it (`engines` for TensorRT) with `graphs`, in words; `growth`: largest error after
    each step.
    """

    file: str
    graphs: str
    case: int
    gain: float
    max_error: float
    mean_error: float
    bound: float
    bound_by: BoundBy
    growth: list[float] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        file: str,
        graphs: str,
        case: int,
        gain: float,
        error: tuple[float, float],
        growth: list[float],
        precision: str,
    ) -> ChunkComparison:
        """From the largest and mean error of the chunk."""
        return cls(file, graphs, case, gain, *error, *chunk_bound(precision, gain), growth)

    @property
    def passed(self) -> bool:
        return bool(self.max_error <= self.bound)

    @property
    def bound_fraction(self) -> float:
        """The largest error as a fraction of the case's own bound; infinite for NaN."""
        fraction = self.max_error / self.bound
        return fraction if fraction == fraction else float('inf')


@dataclass(frozen=True)
class ActionError:
    """Error of all chunks in one action, in its unit on the robot."""

    name: str
    unit: str
    max_error: float
    mean_error: float


@dataclass(frozen=True)
class Receipt:
    """Record of a comparison: cases, errors and notes."""

    precision: Precision
    device: str
    cases: list[dict[str, object]]
    tensors: list[Comparison]
    chunks: list[ChunkComparison]
    notes: list[str]
    actions: list[ActionError] = field(default_factory=list)

    @property
    def failures(self) -> list[str]:
        """A line for everything beyond its bound."""
        lines = [
            f"{item.file}: tensor '{item.tensor}' differs from PyTorch by {item.max_error:.3g} "
            f'(mean {item.mean_error:.3g}); the bound for '
            f'{"float32" if item.file == TIME_TABLE else self.precision} is {item.bound:g}'
            for item in self.tensors
            if not item.passed
        ]
        return lines + [
            f'{item.graphs}: the chunk of case {item.case} differs from PyTorch by '
            f'{item.max_error:.3g} (mean {item.mean_error:.3g}); the bound for {self.precision} is '
            f'{item.bound:.3g}{_why(item)}'
            for item in self.chunks
            if not item.passed
        ]

    def figures(self) -> dict[str, Any]:
        """Return cases, errors and bounds, in the form that every receipt shares."""
        return {
            'seed': SEED,
            'errors': "absolute; divided by the reference's largest number where above 1",
            'bounds': asdict(BOUNDS[self.precision]),
            'bound_by': "'precision': a chunk's own bound; 'gain': that times its gain; 'ceiling': "
            'the largest, whatever the gain',
            'notes': self.notes,
            'cases': self.cases,
            'tensors': [asdict(item) for item in self.tensors],
            'chunks': [asdict(item) for item in self.chunks],
            'actions': [asdict(item) for item in self.actions],
        }


def left_out_of_int8(precision: Precision, beside: Precision) -> list[str]:
    """Return the note of a receipt in 8 bits on the products that are not; empty for others."""
    if precision not in QUANTISED:
        return []
    return [f'matrix products that {precision} leaves out are in {beside}']


def _why(item: ChunkComparison) -> str:
    if item.bound_by == 'gain':
        return f', with its gain of {item.gain:.3g}'
    if item.bound_by == 'ceiling':
        return (
            f', the largest that is accepted: the policy itself makes a change of the noise '
            f'{item.gain:.3g} times larger'
        )
    return ''
