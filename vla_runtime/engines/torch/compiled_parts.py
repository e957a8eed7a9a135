"""Parts of a torch engine that compiled ones may replace, and inputs to try them on.

The inputs are random, of a seed, and stand in the engine's own buffers. First all tokens of the
prompts are valid, then half of them, as in most prompts; on those the parts are timed.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from vla_runtime.engines.bounds import BOUNDS
from vla_runtime.engines.torch import cuda_graph
from vla_runtime.engines.torch.buffers import Schedule, Variant
from vla_runtime.engines.torch.compilation import Compilation, Outputs, Part
from vla_runtime.engines.torch.compiler import Compiled
from vla_runtime.engines.torch.cuda_graph import Work
from vla_runtime.engines.torch.triton_layers import FORM, HeadLayers, triton_layers
from vla_runtime.engines.torch_compile import (
    AUTO,
    TRITON,
    networks_of,
    tries_triton,
    word_of,
)
from vla_runtime.families.flow_step import DenoiseStep

if TYPE_CHECKING:
    from vla_runtime.engines.torch.engine import TorchEngine

logger = logging.getLogger(__name__)

_SEED = 20
# Every vocabulary is larger.
_TOKENS = 256


@torch.inference_mode()
def compile_networks(engine: TorchEngine, word: str, precision: str) -> None:
    """Compile networks of an engine that has run nothing yet, and choose those that run compiled.

    Args:
        engine: engine whose `torch_compile` and `why_compiled` are set here.
        word: one of `torch_compile.WORDS`, not `none`.
        precision: precision of the engine's matrices, for the bound.
    """
    trial, bound = _Trial(engine), BOUNDS[precision].tensor
    taken: list[str] = []
    reasons: list[str] = []

    def choose(parts: list[Part], *arguments: Any) -> list[str]:
        """Compare, measure and choose; return the networks for which a compiled form is taken."""
        compilation = Compilation(parts, *arguments)
        for whole in (True, False):
            trial.fill(whole)
            compilation.compare()
        compilation.measure(*_measured_as_it_runs(engine))
        found, reason = compilation.choose(word)
        reasons.append(reason)
        return found

    obstacle = _triton_obstacle(engine, word)
    if tries_triton(word) and obstacle and word != AUTO:
        logger.warning("torch_compile 'triton': %s; PyTorch's operators run", obstacle)
        reasons.append(f'denoise eager ({obstacle})')
    elif tries_triton(word) and not obstacle:
        logger.warning(
            'torch_compile: compiling Triton kernels. The first time on a machine this takes some '
            'ten seconds.'
        )
        layers = HeadLayers(engine)
        inspect = layers.compare_layers
        if choose([*trial.denoise_parts()], layers, triton_layers, bound, FORM, inspect):
            taken.append(TRITON)
    wanted = networks_of(word)
    if wanted:
        logger.warning(
            'torch_compile: compiling %s. The first time on a machine this takes minutes.',
            ', '.join(wanted),
        )
        parts = [part for part in trial.parts() if part.key[0] in wanted]
        compiled = choose(parts, engine._compiled, Compiled, bound)
        taken = [*compiled, *(TRITON for _ in taken if 'denoise' not in compiled)]
    engine.torch_compile, engine.why_compiled = word_of(taken), '; '.join(reasons)
    engine.use_prefix(1)


def _triton_obstacle(engine: TorchEngine, word: str) -> str:
    """Return why the head's layers cannot run in Triton kernels here; empty where they can."""
    if engine._fused.expert_type is None:
        return "this family's head has no Triton kernels"
    # Triton's interpreter is for tests: nobody gains by it.
    if engine._device.type != 'cuda' and (word == AUTO or not os.environ.get('TRITON_INTERPRET')):
        return f'its kernels run on device cuda, and this is {engine._device.type}'
    return ''


def _measured_as_it_runs(engine: TorchEngine) -> tuple[cuda_graph.Capture | None, Work]:
    """Return how the engine captures its denoise loop, and how to wait for its device."""
    device = engine._device
    capturing = engine._capturers['denoise'].active
    capture = cuda_graph.CudaGraphCapture(device) if capturing else None
    if device.type == 'cuda':
        return capture, partial(torch.cuda.synchronize, device)
    return capture, lambda: None


class _Trial:
    """Reads and writes the buffers of an engine, past its protocol."""

    def __init__(self, engine: TorchEngine) -> None:
        self._engine = engine
        self._schedule = Schedule(np.array([1.0, 0.5]), -0.5, engine._fused, engine._device)
        self._schedule.plan_weight.fill_(0.5)
        self._whole = True

    def parts(self) -> Iterator[Part]:
        """Return every network in every shape that it is run with by default."""
        engine, network = self._engine, self._engine._network
        for size in engine._pixels:
            work = partial(engine._run_vision, size)
            yield Part(('vision', size), network.vision, work, partial(self._tokens, size))
        # On a CPU the rows of a prefix run one by one.
        for rows in engine._buffers if engine._device.type == 'cuda' else (1,):
            for length in range(len(engine._prefix_inputs)):
                work = partial(engine._run_prefix, rows, 0, length)
                past = partial(self._past, rows)
                yield Part(('prefix', (rows, length)), network.prefix, work, past)
        yield from self.denoise_parts()

    def denoise_parts(self) -> Iterator[Part]:
        """Return the denoise steps in every shape that they are run with by default."""
        engine, network = self._engine, self._engine._network
        for rows in engine._buffers:
            variant = Variant(rows)
            work = partial(engine._run_steps, self._schedule, variant)
            step = DenoiseStep(network)
            yield Part(('denoise', variant), step, work, partial(self._velocity, rows))

    def fill(self, whole: bool) -> None:
        """Write the same inputs each time; without `whole` half of each prompt is valid."""
        self._whole = whole
        engine, generator = self._engine, torch.Generator().manual_seed(_SEED)
        engine._image_mask.fill_(True)
        inputs = [*engine._pixels.values(), engine._noise, engine._plan]
        for rows in engine._buffers.values():
            rows.row_weight.fill_(1 / len(rows.row_weight))
            inputs += [*rows.prefix_inputs.values(), *rows.head_inputs.values()]
        for tensor in inputs:
            tensor.copy_(_random(tensor, generator, whole))
        for camera, size in enumerate(engine._sizes):
            engine._run_vision(size)
            (encoded,) = engine._encoded[size]
            engine._image_tokens[camera, : len(encoded)].copy_(encoded)
        for count in engine._buffers:
            engine._run_prefix(count, 0, len(engine._prefix_inputs) - 1)
            self._lay_out(count)

    def _lay_out(self, rows: int) -> None:
        self._engine._encodings[rows, 0] += 1
        self._engine.use_prefix(rows)
        self._engine._lay_out()

    def _tokens(self, size: tuple[int, int]) -> Outputs:
        return {'image_tokens': self._engine._encoded[size].clone()}

    def _past(self, rows: int) -> Outputs:
        """Return the encoded prefix, and the velocity over it.

        At hidden tokens, which there are none of in a whole prompt, networks may write anything.
        """
        slot = self._engine._buffers[rows].slots[0] if self._whole else {}
        self._lay_out(rows)
        self._engine._run_steps(self._schedule, Variant(rows))
        return {**{name: part.clone() for name, part in slot.items()}, **self._velocity(rows)}

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
