"""Parts of a torch engine that compiled ones may replace, and inputs to try them on.

The inputs are random, of a seed, and stand in the engine's own buffers. First all tokens of the
prompts are valid, then half of them, as in most prompts; on those the parts are timed.

Invariants:
- no form of a network runs in a shape that was not compared here;
- whatever is compared, the operators are what it is compared with;
- after an error, of whatever kind, the engine runs as it did before, and nothing of the trial stays
  laid out or captured.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from vla_runtime.engines.bounds import BOUNDS
from vla_runtime.engines.torch import cuda_graph
from vla_runtime.engines.torch.buffers import Schedule, Variant
from vla_runtime.engines.torch.compilation import Compilation, Key, Outputs, Part
from vla_runtime.engines.torch.compiler import Compiled
from vla_runtime.engines.torch.cuda_graph import Capturer, Work
from vla_runtime.engines.torch.triton_layers import FORM, compare_layers, triton_layers
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
def compile_networks(
    engine: TorchEngine, word: str, precision: str, *, action_times: bool = False
) -> None:
    """Compile networks of an engine that has run nothing yet, and choose those that run compiled.

    Args:
        engine: engine whose `torch_compile` and `why_compiled` are set here.
        word: one of `torch_compile.WORDS`, not `none`.
        precision: precision of the engine's matrices, for the bound.
        action_times: actions may have flow times of their own (`rtc_mode: hard_prefix`); without,
            the layers of such steps run in PyTorch's operators.
    """
    taken: list[str] = []
    with _trial_of(engine) as trial:
        if tries_triton(word) and _takes_triton(trial, word, precision, action_times):
            taken = [TRITON]
        if networks_of(word):
            compiled = _compiled_networks(trial, word, precision)
            if 'denoise' in compiled:
                # Other steps run as in a load of these networks alone, which a replay is.
                engine._layers.clear()
                taken = []
            taken += compiled
    engine.torch_compile, engine.why_compiled = word_of(taken), '; '.join(trial.reasons)


def _takes_triton(trial: _Trial, word: str, precision: str, action_times: bool) -> bool:
    """Choose between the head's operators and Triton kernels; arguments of `compile_networks`."""
    engine = trial.engine
    obstacle = _triton_obstacle(engine, word)
    if precision == 'fp8':
        obstacle = obstacle or 'fp8 keeps its own products'
    if obstacle:
        if word != AUTO:
            logger.warning("torch_compile 'triton': %s; PyTorch's operators run", obstacle)
            trial.reasons.append(f'denoise eager ({obstacle})')
        return False
    logger.warning(
        'torch_compile: compiling Triton kernels. The first time on a machine this takes some ten '
        'seconds.'
    )
    compilation = Compilation(
        [*trial.denoise_parts(action_times)],
        engine._layers,
        triton_layers,
        BOUNDS[precision].tensor,
        form=FORM,
        inspect=partial(compare_layers, engine),
        says_more='please report it, with the GPU and the version of Triton',
    )
    return bool(trial.choose(compilation, word))


def _compiled_networks(trial: _Trial, word: str, precision: str) -> list[str]:
    """Choose between networks as they run now and compiled ones; return those that run compiled."""
    engine, wanted = trial.engine, networks_of(word)
    logger.warning(
        'torch_compile: compiling %s. The first time on a machine this takes minutes.',
        ', '.join(wanted),
    )
    parts = [part for part in trial.parts() if part.key[0] in wanted]
    present = {'denoise': FORM} if engine._layers else {}
    bound = BOUNDS[precision].tensor
    compilation = Compilation(parts, engine._compiled, Compiled, bound, present=present)
    return trial.choose(compilation, word)


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


@contextmanager
def _trial_of(engine: TorchEngine) -> Iterator[_Trial]:
    """Let nothing of a trial stay laid out, and after an error no other form of a network."""
    capture, synchronize = _measured_as_it_runs(engine)
    capturer = engine._capturers['denoise']
    # A capture that fails while forms are tried must not keep the engine from capturing later.
    engine._capturers['denoise'] = Capturer('denoise', None)
    try:
        yield _Trial(engine, capture, synchronize)
    except BaseException:
        engine._compiled.clear()
        engine._layers.clear()
        raise
    finally:
        engine._capturers['denoise'] = capturer
        engine._laid_out = {}
        engine._fused.expert_type = type(engine._fused).expert_type
        engine._variant = Variant()
        # The engine's own streams do not wait for the one that trials run on.
        synchronize()


class _Trial:
    """Reads and writes the buffers of an engine, past its protocol.

    Args:
        engine: engine that has run nothing yet.
        capture, synchronize: as `_measured_as_it_runs` returns them.

    Attributes:
        reasons: why each form was taken or not, in words.
    """

    def __init__(
        self, engine: TorchEngine, capture: cuda_graph.Capture | None, synchronize: Work
    ) -> None:
        self.engine, self._measured = engine, (capture, synchronize)
        self.reasons: list[str] = []
        self._schedule = Schedule(np.array([1.0, 0.5]), -0.5, engine._fused, engine._device)
        self._whole = True
        # Image tokens of the operators, which the prefix is tried on.
        self._views = engine._image_tokens.clone()

    def choose(self, compilation: Compilation, word: str) -> list[str]:
        """Compare, measure and choose; return the networks for which a compiled form is taken.

        Args:
            compilation: compilation of parts of this trial.
            word: as of `compile_networks`.
        """
        layers: Mapping[Key, Any] = dict(self.engine._layers)
        # Compared with the operators, and timed beside what runs now.
        self.engine._layers.clear()
        for whole in (True, False):
            self.fill(whole)
            compilation.compare()
        self.engine._layers.update(layers)
        compilation.measure(*self._measured)
        found, reason = compilation.choose(word)
        self.reasons.append(reason)
        return found

    def parts(self) -> Iterator[Part]:
        """Return every network in every shape that it is run with by default."""
        engine, network = self.engine, self.engine._network
        for size in dict.fromkeys(engine._sizes):
            camera = engine._sizes.index(size)
            work = partial(engine._run_vision, camera)
            yield Part(('vision', size), network.vision, work, partial(self._tokens, camera))
        # On a CPU the rows of a prefix run one by one.
        for rows in engine._buffers if engine._device.type == 'cuda' else (1,):
            for length in range(len(engine._prefix_inputs)):
                work = partial(engine._run_prefix, rows, 0, length)
                past = partial(self._past, rows)
                yield Part(('prefix', (rows, length)), network.prefix, work, past)
        yield from self.denoise_parts()

    def denoise_parts(self, action_times: bool = False) -> Iterator[Part]:
        """Return the denoise steps in every shape that they are run with by default.

        Args:
            action_times: also those in which actions have flow times of their own.
        """
        for rows in self.engine._buffers:
            for own in (False, True)[: 1 + action_times]:
                variant = Variant(rows, action_time=own)
                work, step = partial(self._steps, variant), DenoiseStep(self.engine._network)
                yield Part(('denoise', variant), step, work, partial(self._velocity, rows))

    def fill(self, whole: bool) -> None:
        """Write the same inputs each time; without `whole` half of each prompt is valid."""
        self._whole = whole
        engine, generator = self.engine, torch.Generator().manual_seed(_SEED)
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
        self._views.copy_(engine._image_tokens)
        for count in engine._buffers:
            engine._run_prefix(count, 0, len(engine._prefix_inputs) - 1)
            engine._encodings[count, 0] += 1

    def _steps(self, variant: Variant) -> None:
        """Denoise over a slot, laid out once more where the trial has written it."""
        engine = self.engine
        engine._variant = variant
        engine._lay_out()
        engine._run_steps(self._schedule, variant)

    def _tokens(self, camera: int) -> Outputs:
        """Return what vision wrote; puts that of the operators back, which the prefix reads."""
        tokens = self.engine._image_tokens[camera]
        found = {'image_tokens': tokens.clone()}
        tokens.copy_(self._views[camera])
        return found

    def _past(self, rows: int) -> Outputs:
        """Return the encoded prefix, and the velocity over it.

        At hidden tokens, which there are none of in a whole prompt, networks may write anything.
        """
        slot = self.engine._buffers[rows].slots[0] if self._whole else {}
        self.engine._encodings[rows, 0] += 1
        self._steps(Variant(rows))
        return {**{name: part.clone() for name, part in slot.items()}, **self._velocity(rows)}

    def _velocity(self, rows: int) -> Outputs:
        engine = self.engine
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
