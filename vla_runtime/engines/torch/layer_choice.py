"""Choice between PyTorch's operators and another form of the head's layers, at load.

Invariants:
- the other form runs only in the shapes of the denoise step that are compared here, and only if it
  gave what the operators give, within the bounds of `verify`, in all of them;
- nothing is compiled after load;
- where it cannot be compiled, or raises anything else, the operators run, and one warning says why.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from vla_runtime.engines.graphed_work import Work
from vla_runtime.engines.recorded_cases import error_of
from vla_runtime.engines.torch.buffers import Variant
from vla_runtime.engines.torch.cuda_graph import Capture
from vla_runtime.files.quotes import one_line

logger = logging.getLogger(__name__)

Outputs = Mapping[str, Tensor]
FORM = 'in Triton kernels'
# Characters of an error's first line that stand in the reason.
_ERROR_LENGTH = 200
_NO_REMEDY = 'please report it, with the GPU and the version of Triton'
_TRITON = "install Triton for this PyTorch and GPU ('pip install triton')"
# What the text of an error has, and what mends it.
_REMEDIES = (
    ('working triton', _TRITON),
    ("no module named 'triton'", _TRITON),
    ('active driver', 'Triton needs a CUDA device'),
    ('python.h', "install Python's headers ('apt install python3-dev')"),
    ('c compiler', "install a C compiler ('apt install gcc')"),
)


@dataclass(frozen=True)
class ShapedStep:
    """The denoise step in one shape.

    Attributes:
        work: runs the form that stands under the shape, else the operators; reads and writes
            buffers of the engine.
        outputs: returns copies of what `work` wrote, by name.
    """

    shape: Variant
    work: Work
    outputs: Callable[[], Outputs]


class LayerChoice:
    """Compares and chooses a form of the head's layers.

    Args:
        steps: every shape of the denoise step that the form may run in.
        layers: class of the layers by shape, where it is not the operators'; empty until `choose`.
        make: returns the class of the layers in the other form.
        bound: largest error, in units of the operators' largest number where that is above 1.
        inspect: returns what is wrong with a step whose outputs are within the bound, else ''.

    Attributes:
        fault: reason why the form must not run; empty where it may.
        failure: error of the form, where it raised one.
    """

    def __init__(
        self,
        steps: Sequence[ShapedStep],
        layers: dict[Variant, Any],
        make: Callable[[], Any],
        bound: float,
        inspect: Callable[[ShapedStep, Any], str] = lambda step, form: '',
    ) -> None:
        self._steps, self._layers = steps, layers
        self._make, self._bound, self._inspect = make, bound, inspect
        self._form: Any = None
        self.fault = self.failure = ''

    def compare(self) -> None:
        """Compare all steps on the inputs that are in the buffers; the first time compiles them."""
        for step in self._steps:
            step.work()
            expected = step.outputs()
            if self.fault:
                continue
            try:
                fault = self._fault_of(step, expected)
            except Exception as error:
                # Of any kind: compilers and drivers raise what they like.
                self._fail('cannot be compiled', error)
                continue
            if fault:
                self.fault = f'{FORM} {fault}'

    def capture(self, capture: Capture | None) -> None:
        """Capture all steps once as the engine will, where it does, unless something is wrong."""
        if capture is None or self.fault:
            return
        for step in self._steps:
            try:
                with self._in_form(step):
                    capture(step.work)
            except Exception as error:
                self._fail('cannot be captured', error)
                return

    def choose(self) -> bool:
        """Leave in `layers` what is to run, and return whether that is the other form."""
        if self.failure:
            logger.warning(
                "triton: %s; PyTorch's operators run. %s. %s",
                self.fault,
                remedy(self.failure),
                self.failure.strip()[:500],
            )
        if not self.fault:
            self._layers.update({step.shape: self._form for step in self._steps})
        return not self.fault

    def describe(self) -> str:
        if self.fault:
            error = one_line(self.failure.strip().partition('\n')[0], _ERROR_LENGTH)
            return f'denoise eager ({": ".join(filter(None, (self.fault, error)))})'
        return f'denoise {FORM}'

    def _fail(self, fault: str, error: Exception) -> None:
        self.fault, self.failure = fault, f'{type(error).__name__}: {error}'

    def _fault_of(self, step: ShapedStep, expected: Outputs) -> str:
        if self._form is None:
            self._form = self._make()
        with self._in_form(step):
            step.work()
            error = largest_error(step.outputs(), expected)
        if not error <= self._bound:
            return f'differs by {error:.1e}, bound {self._bound:.0e}'
        return self._inspect(step, self._form)

    @contextmanager
    def _in_form(self, step: ShapedStep) -> Iterator[None]:
        try:
            self._layers[step.shape] = self._form
            yield
        finally:
            self._layers.pop(step.shape, None)


def largest_error(found: Outputs, expected: Outputs) -> float:
    """Return the largest error of any tensor; infinite where a number is NaN."""
    errors = [0.0]
    for name, reference in expected.items():
        error, _ = error_of(_array(found[name]), _array(reference))
        # NaN is no error that could be compared.
        errors.append(math.inf if math.isnan(error) else error)
    return max(errors)


def remedy(error: str) -> str:
    text = error.lower()
    return next((what for word, what in _REMEDIES if word in text), _NO_REMEDY)


def _array(tensor: Tensor) -> np.ndarray:
    array: np.ndarray = tensor.float().cpu().numpy()
    return array
