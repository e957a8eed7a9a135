"""Trial of the head's layers in Triton kernels on a torch engine, and inputs for it.

The inputs are random, of a seed, in the engine's own buffers; all tokens of the prompts are valid,
then half of them. After an error the engine runs as before the trial, of which nothing stays laid
out or captured.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from vla_runtime.engines.recorded_cases import BOUNDS
from vla_runtime.engines.torch import cuda_graph
from vla_runtime.engines.torch.buffers import Schedule, Variant
from vla_runtime.engines.torch.cuda_graph import Capturer
from vla_runtime.engines.torch.layer_choice import LayerChoice, Outputs, ShapedStep
from vla_runtime.engines.triton_option import OFF, ON
from vla_runtime.models.blocks.layer_comparison import ComparedExpert, LayerError, worst_fault

if TYPE_CHECKING:
    from vla_runtime.engines.torch.engine import TorchEngine

logger = logging.getLogger(__name__)

_SEED = 20
# Every vocabulary is larger.
_TOKENS = 256


@torch.inference_mode()
def choose_layers(engine: TorchEngine, precision: str, *, action_times: bool = False) -> None:
    """Take Triton kernels, where they can run, for an engine that has run nothing yet.

    Args:
        precision: precision of the engine's matrices, for the bound.
        action_times: actions may have flow times of their own (`rtc_mode: hard_prefix`); without,
            the layers of such steps run in PyTorch's operators.
    """
    obstacle = _obstacle(engine)
    if obstacle:
        logger.warning("triton 'on': %s; PyTorch's operators run", obstacle)
        engine.triton, engine.why_triton = OFF, f'denoise eager ({obstacle})'
        return
    logger.warning(
        'triton: compiling kernels. The first time on a machine this takes some ten seconds.'
    )
    with _trial_of(engine) as trial:
        choice = LayerChoice(
            [*trial.shaped_steps(action_times)],
            engine._layers,
            triton_layers,
            BOUNDS[precision].tensor,
            inspect=partial(compare_layers, engine),
        )
        for whole in (True, False):
            trial.fill(whole)
            choice.compare()
        choice.capture(trial.capture)
        engine.triton = ON if choice.choose() else OFF
        engine.why_triton = choice.describe()


def _obstacle(engine: TorchEngine) -> str:
    """Return why the head's layers cannot run in Triton kernels here; empty where they can."""
    if engine._network.expert_type is None:
        return "this family's head has no Triton kernels"
    # Triton's interpreter is for tests: nobody gains by it.
    if engine._device.type != 'cuda' and not os.environ.get('TRITON_INTERPRET'):
        return f'its kernels run on device cuda, and this is {engine._device.type}'
    return ''


def _capture_of(engine: TorchEngine) -> cuda_graph.Capture | None:
    """Return how the engine captures its denoise loop; None where it does not."""
    capturing = engine._capturers['denoise'].active
    return cuda_graph.CudaGraphCapture(engine._device) if capturing else None


@contextmanager
def _trial_of(engine: TorchEngine) -> Iterator[_Trial]:
    """Let nothing of a trial stay laid out, and after an error no other form of the layers."""
    capturer, capture = engine._capturers['denoise'], _capture_of(engine)
    # A capture that fails while forms are tried must not keep the engine from capturing later.
    engine._capturers['denoise'] = Capturer('denoise', None)
    try:
        yield _Trial(engine, capture)
    except BaseException:
        engine._layers.clear()
        raise
    finally:
        engine._capturers['denoise'] = capturer
        engine._prepared = {}
        engine._network.expert_type = type(engine._network).expert_type
        engine._variant = Variant()
        # The engine's own streams do not wait for the one that trials run on.
        if engine._device.type == 'cuda':
            torch.cuda.synchronize(engine._device)


class _Trial:
    """Reads and writes the buffers of an engine, past its protocol."""

    def __init__(self, engine: TorchEngine, capture: cuda_graph.Capture | None) -> None:
        self._engine, self.capture = engine, capture
        self._schedule = Schedule(np.array([1.0, 0.5]), -0.5, None, engine._network, engine._device)

    def shaped_steps(self, action_times: bool) -> Iterator[ShapedStep]:
        """Return the denoise step in every shape that it is run with by default."""
        for rows in self._engine._buffers:
            for own in (False, True)[: 1 + action_times]:
                variant = Variant(rows, action_time=own)
                yield ShapedStep(
                    variant, partial(self._steps, variant), partial(self._velocity, rows)
                )

    def fill(self, whole: bool) -> None:
        """Write the same inputs each time; without `whole` half of each prompt is valid."""
        engine, generator = self._engine, torch.Generator().manual_seed(_SEED)
        engine._image_mask.fill_(True)
        # No number of tokens lies between all known actions, so that none passes for another.
        steps = torch.arange(engine.dims.horizon)
        engine._clean.copy_(torch.isin(steps, steps.square())[:, None])
        inputs = [*engine._pixels, engine._noise, engine._plan, self._schedule.plan_weight]
        for count, rows in engine._buffers.items():
            # No two alike, so that none passes for another; their sum is 1, as that of guidance.
            weights = torch.arange(1.0, count + 1)
            rows.row_weight.copy_(weights / weights.sum())
            inputs += [*rows.prefix_inputs.values(), *rows.head_inputs.values()]
        for tensor in inputs:
            tensor.copy_(_random(tensor, generator, whole))
        for camera in range(len(engine._sizes)):
            engine._run_vision(camera)
        for count in engine._buffers:
            engine._run_prefix(count, 0, len(engine._prefix_inputs) - 1)
            engine._encodings[count, 0] += 1

    def _steps(self, variant: Variant) -> None:
        """Denoise over a slot, prepared once more where the trial has written it."""
        engine = self._engine
        engine._variant = variant
        engine._prepare_slot()
        engine._run_steps(self._schedule, variant)

    def _velocity(self, rows: int) -> Outputs:
        engine = self._engine
        velocity = engine._buffers[rows].velocity[:rows]
        return {'x': engine._x[:1].clone(), 'velocity': velocity.clone()}


def _random(like: Tensor, generator: torch.Generator, whole: bool) -> Tensor:
    """Random numbers, tokens, or a mask of a whole or half a prompt, in the shape of a buffer."""
    if like.dtype == torch.bool:
        length = like.shape[-1]
        return (torch.arange(length) < (length if whole else (length + 1) // 2)).expand(like.shape)
    if like.dtype == torch.int64:
        return torch.randint(_TOKENS, like.shape, generator=generator)
    return torch.rand(like.shape, generator=generator) * 2 - 1


if TYPE_CHECKING:
    from vla_runtime.engines.torch.engine import TorchEngine


def compare_layers(engine: TorchEngine, step: ShapedStep, form: Any) -> str:
    """Run a step with each layer in both forms and in float32.

    The engine has laid out nothing but its trial inputs; `form` is the layers' class in Triton.

    Returns the worst layer whose Triton kernels are further from float32 than rounding explains;
    else ''.
    """
    errors: list[LayerError] = []
    prepared = engine._prepared
    engine._layers[step.shape], engine._prepared = partial(ComparedExpert, form, errors), {}
    try:
        step.work()
    finally:
        del engine._layers[step.shape]
        engine._prepared = prepared
    return worst_fault(errors)


def triton_layers() -> Any:
    """Return the class that takes the place of `JoinedExpert` (ImportError: no usable Triton)."""
    from vla_runtime.models.triton.expert import TritonExpert

    return TritonExpert
