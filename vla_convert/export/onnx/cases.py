"""Seeded inputs that exported networks are compared on, and PyTorch's outputs for them.

Prompts have real lengths, and one fills its row; there are hidden cameras, guidance scales and
committed plans. A `single` head gets zero noise, no guidance and no plan. PyTorch computes in
float32, one network at a time, so that memory never holds the weights of vision, prefix and head
together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vla_convert.export.onnx.export import meta_network
from vla_convert.export.onnx.ternary import GivenCodes
from vla_convert.export.onnx.weights import BundleWeights
from vla_convert.export.receipt import SEED
from vla_runtime.bundle.onnx_files import ANSWER_INPUTS, LOGITS, ROWS, TOKENS
from vla_runtime.bundle.schema import WEIGHTS_FILE, BundleSpec
from vla_runtime.engines.recorded_cases import Case, write_cases
from vla_runtime.engines.token_embedding import TokenEmbedding
from vla_runtime.family.declaration import (
    PolicyDims,
    RowInput,
    image_sizes,
    language_dims,
    scheduler_of,
)
from vla_runtime.family.listing import find_family
from vla_runtime.family.step_schedule import StepSchedule, stage_times
from vla_runtime.inference.denoise import flow_times, usual_schedule
from vla_runtime.inference.real_time_chunking import plan_weights, scheduler_plan_weights
from vla_runtime.inference.runner import chunk_noise, step_noise
from vla_runtime.inference.settings import row_weights
from vla_runtime.models.base.flow_step import DenoiseStep
from vla_runtime.models.base.token_network import TokenNetwork
from vla_runtime.models.shapes.traced_shapes import Part, parameters_of, trace_shapes
from vla_runtime.processing.tokenizer import Tokenizer

# --- Passes of a `tokens` head: the first are compared one by one, from the reference's tokens; the
# last over drawn keys and values, as an answer of hundreds of tokens would take hours.

# Most passes of an answer that follow one another.
_PASSES = 16

Feed = dict[str, np.ndarray]


class PassOfCase(NamedTuple):
    """One pass of a case: its inputs, and the logits (R, vocabulary) that PyTorch gave."""

    feed: Feed
    logits: np.ndarray


def compute_answer(network: TokenNetwork, case: Case) -> None:
    """Add `answer`, `logits`, `answer_key` and `answer_value` to a case with its past.

    A position after the compared passes adds `far_place`, `far_token` and `far_logits`.
    """
    past = {name: torch.from_numpy(array) for name, array in case.past.items()}
    key, value = network.answer_places(past)
    passes = min(_PASSES, network.dims.answer_length - 1)
    random = torch.Generator().manual_seed(SEED)
    for cache in (key, value):
        cache[passes:] = torch.randn(cache[passes:].shape, generator=random)

    def read(token: Tensor, place: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return network.read_token(token[:, None], torch.tensor(place), past, key, value)

    tokens, logits = [], [past[LOGITS]]
    for place in range(passes):
        tokens.append(logits[-1].argmax(dim=-1))
        found, _, key[place], value[place] = read(tokens[-1], place)
        logits.append(found)
    reference = {
        'answer': torch.stack(tokens) if tokens else torch.zeros(0, case.rows, dtype=torch.int64),
        LOGITS: torch.stack(logits),
        **dict(zip(ANSWER_INPUTS, (key, value), strict=True)),
    }
    far = len(key) - 1
    if far >= passes:
        token = logits[-1].argmax(dim=-1)
        reference |= {
            'far_place': torch.tensor(far),
            'far_token': token,
            'far_logits': read(token, far)[0],
        }
    case.reference |= {name: tensor.numpy() for name, tensor in reference.items()}


def pass_inputs(
    token: np.ndarray,
    place: int,
    past: Mapping[str, np.ndarray],
    answer: Mapping[str, np.ndarray],
    table: TokenEmbedding | None,
) -> Feed:
    """Inputs of a graph of one pass.

    `token` (R,) int64 is at `place` in the answer; `past` is the prefix's output; `answer` has
    keys and values by the names of `ANSWER_INPUTS`; a `table` of text embeddings is for graphs
    that take its rows.
    """
    tokens: Mapping[str, np.ndarray] = {TOKENS: token[:, None]}
    if table is not None:
        tokens = table.replace_tokens(tokens)
    seen = {name: array for name, array in past.items() if name != LOGITS}
    return {**tokens, 'place': np.array(place), **seen, **answer}


def passes_of(case: Case, table: TokenEmbedding | None) -> Iterator[PassOfCase]:
    """Every compared pass alone, over PyTorch's own keys and values."""
    reference = case.reference
    answer = {name: reference[name] for name in ANSWER_INPUTS}
    for place, token in enumerate(reference['answer']):
        feed = pass_inputs(token, place, case.past, answer, table)
        yield PassOfCase(feed, reference[LOGITS][place + 1])
    if 'far_place' in reference:
        place, token = int(reference['far_place']), reference['far_token']
        yield PassOfCase(
            pass_inputs(token, place, case.past, answer, table), reference['far_logits']
        )


# Guidance scale and plan schedule of each case; repeated for each number of rows.
_SETTINGS = ((1.5, None), (2.5, 'exp'), (1.0, 'linear'))
# Standard deviation of the change of the noise that the gain is measured with.
_NUDGE = 1e-4
# Edge of the blocks of one colour that images are made of. It divides no usual patch, of 7, 8, 14,
# 16 or 32 pixels, and is smaller, so that the pixels of a patch differ along rows and columns.
_BLOCK = 5
# Tokens of a real prompt: a short task, and one with a state of many joints.
_REAL_PROMPTS = (8, 64)


def seeded_cases(folder: Path, spec: BundleSpec) -> list[Case]:
    """The inputs for this policy's shapes, the same every time."""
    random = np.random.default_rng(SEED)
    first = _first_token(folder, spec)
    return [
        _case(spec, random, rows, number, first, *_SETTINGS[number])
        for rows in ROWS
        for number in range(len(_SETTINGS))
    ]


def record_cases(folder: Path, spec: BundleSpec, cases: list[Case] | None = None) -> None:
    """Write the cases of a bundle's networks into its `onnx/`, before it is sealed.

    `cases` have PyTorch's outputs; None: compute them.
    """
    if cases is None:
        cases = seeded_cases(folder, spec)
        reference = Reference(spec, BundleWeights(folder / WEIGHTS_FILE))
        reference.image_tokens(cases)
        reference.prefixes(cases)
        reference.chunks(cases)
    write_cases(folder, cases, {'torch': str(torch.__version__), 'seed': SEED})


def _first_token(folder: Path, spec: BundleSpec) -> int | None:
    """Token that stands in front of every prompt of this policy; None without one."""
    if spec.prompt is None or spec.tokenizer is None:
        return None
    layout = find_family(spec.family).layout(spec.prompt, spec.dims)
    if not layout.bos:
        return None
    return Tokenizer.load(folder / spec.tokenizer).bos


def _case(
    spec: BundleSpec,
    random: np.random.Generator,
    rows: int,
    number: int,
    first: int | None,
    beta: float,
    schedule: str | None,
) -> Case:
    family, dims = find_family(spec.family), spec.dims
    chunk = (1, dims.horizon, dims.action_dim)
    image_mask = np.ones(dims.cameras, dtype=bool)
    if number == 1 and dims.cameras > 1:
        image_mask[-1] = False
    lengths = _prompt_lengths(spec, random, rows, number)
    weight = np.zeros((spec.denoise_steps, dims.horizon), dtype=np.float32)
    x = chunk_noise(SEED, number, chunk[1:], kind=family.noise)[None]
    guidance, spread = beta if rows == 2 else None, 0.5
    single = not family.takes_steps
    if single:
        # It runs once, from zeros, without plan and guidance; of two rows the first counts.
        x, schedule, spread = np.zeros_like(x), None, 0.0
        guidance = 1.0 if rows == 2 else None
    if schedule:
        overlap: dict[str, Any] = {
            'schedule': schedule,
            'delay': max(1, dims.horizon // 8),
            'execution_horizon': max(1, dims.horizon // 2),
            'horizon': dims.horizon,
            'maximum': 10.0,
        }
        if family.has_scheduler:
            weight = scheduler_plan_weights(spec.denoise_steps, **overlap)
        else:
            weight = plan_weights(flow_times(spec.denoise_steps), **overlap)
    added = np.zeros(0, np.float32)
    if family.has_scheduler:
        scheduler, steps = scheduler_of(dims), spec.denoise_steps
        further = step_noise(SEED, number, scheduler.draws(steps) - 1, chunk[1:])
        added = scheduler.step_noise(np.concatenate([x, further])[None], steps)
    return Case(
        words={
            'rows': rows,
            'prompt_tokens': None if lengths is None else [int(length) for length in lengths],
            'cameras_hidden': int((~image_mask).sum()),
            'beta': None if single else guidance,
            'plan': schedule,
        },
        images=[_image(random, *size) for size in image_sizes(dims)],
        image_mask=image_mask,
        prefix_inputs=_draw(family.prefix_inputs(dims), dims, rows, lengths, first, random),
        x=x,
        row_weight=row_weights(guidance),
        plan=random.normal(0, spread, chunk).astype(np.float32),
        plan_weight=weight[:, None, :, None],
        step_noise=added,
        head_inputs=_draw(family.head_inputs(dims), dims, rows, lengths, first, random),
    )


def _image(random: np.random.Generator, height: int, width: int) -> np.ndarray:
    """Draw blocks of random colours, which compress well in a recording."""
    coarse = (3, -(-height // _BLOCK), -(-width // _BLOCK))
    colours = random.integers(0, 256, coarse, dtype=np.uint8)
    return np.kron(colours, np.ones((1, _BLOCK, _BLOCK), np.uint8))[:, :height, :width]


def _prompt_lengths(
    spec: BundleSpec, random: np.random.Generator, rows: int, number: int
) -> np.ndarray | None:
    """Draw the length of each row's prompt; None for a policy without language."""
    if spec.prompt is None:
        return None
    most = language_dims(spec.dims).prompt_length
    # The first prompt fills its row; the others are padded, each row differently.
    shortest, longest = (min(length, most) for length in _REAL_PROMPTS)
    lengths = random.integers(shortest, longest + 1, rows)
    if number == 0:
        lengths[0] = most
    return lengths


def _draw(
    inputs: Mapping[str, RowInput],
    dims: PolicyDims,
    rows: int,
    lengths: np.ndarray | None,
    first: int | None,
    random: np.random.Generator,
) -> dict[str, np.ndarray]:
    """Draw a family's inputs; integers are tokens, and masks those of the prompts' lengths."""
    drawn: dict[str, np.ndarray] = {}
    for name, given in inputs.items():
        shape = (rows, *given.shape)
        if given.kind == 'int64':
            drawn[name] = random.integers(0, language_dims(dims).vocabulary, shape)
            if first is not None:
                drawn[name][:, 0] = first
        elif given.kind == 'bool':
            assert lengths is not None
            drawn[name] = np.arange(shape[-1]) < lengths[:, None]
        else:
            drawn[name] = random.normal(size=shape).astype(np.float32)
    return drawn


class Reference:
    """PyTorch's float32 networks, one at a time."""

    def __init__(self, spec: BundleSpec, weights: BundleWeights) -> None:
        self._spec = spec
        self._weights = weights
        self._network = meta_network(spec, torch.float32)
        shapes = trace_shapes(self._network)
        self._image_tokens = shapes.image_tokens
        self._parts = parameters_of(self._network, shapes)
        self._network.requires_grad_(False)
        self._row_axes = {name: tensor.row_axis for name, tensor in shapes.past.items()}

    def image_tokens(self, cases: list[Case]) -> None:
        """Add `image_tokens` to every case."""
        with self._loaded('vision'):
            for case in cases:
                found = [self._network.vision(torch.from_numpy(p)[None]) for p in case.pixels]
                tokens = torch.zeros(len(found), *self._image_tokens)
                for camera, (of_image,) in enumerate(found):
                    tokens[camera, : len(of_image)] = of_image
                case.reference['image_tokens'] = tokens.numpy()

    def prefixes(self, cases: list[Case]) -> None:
        """Add `past` to every case."""
        with self._loaded('prefix'):
            for case in cases:
                past = self._network.prefix(
                    torch.from_numpy(case.reference['image_tokens']),
                    torch.from_numpy(case.image_mask),
                    **_tensors(case.prefix_inputs),
                )
                case.past = {name: value.numpy() for name, value in past.items()}
                case.row_axes = self._row_axes

    def image_with_codes(self, pixels: np.ndarray, codes: GivenCodes) -> np.ndarray:
        """Image tokens (N, W) of an image (3, height, width), from a graph's codes."""
        with self._loaded('vision'), codes:
            (tokens,) = self._network.vision(torch.from_numpy(pixels)[None])
        return tokens.numpy()

    def prefix_with_codes(self, case: Case, codes: GivenCodes) -> dict[str, np.ndarray]:
        """Outputs of the prefix from a graph's codes."""
        with self._loaded('prefix'), codes:
            past = self._network.prefix(
                torch.from_numpy(case.reference['image_tokens']),
                torch.from_numpy(case.image_mask),
                **_tensors(case.prefix_inputs),
            )
        return {name: value.numpy() for name, value in past.items()}

    def chunks(self, cases: list[Case]) -> np.ndarray:
        """Add `trace`, `velocity` and `gain`, or the answer; return the time table (N, S * C)."""
        spec, family = self._spec, find_family(self._spec.family)
        schedule = usual_schedule(family, spec.dims, spec.denoise_steps)
        with self._loaded('head', 'time'):
            if isinstance(self._network, TokenNetwork):
                for case in cases:
                    compute_answer(self._network, case)
                return self._network.time_conditioning(torch.ones(1)).numpy()
            times = stage_times(spec.dims, schedule.times, schedule.dt)
            table = torch.cat([self._step_row(of_step) for of_step in times])
            for case in cases:
                trace, velocity = self._denoise(case, schedule, table, torch.from_numpy(case.x))
                nudge = np.random.default_rng(SEED).normal(0, _NUDGE, case.x.shape)
                nudged, _ = self._denoise(
                    case, schedule, table, torch.from_numpy((case.x + nudge).astype(np.float32))
                )
                moved = (nudged[-1] - trace[-1]).abs().max()
                case.reference['trace'] = trace.numpy()
                case.reference['velocity'] = velocity.numpy()
                case.reference['gain'] = moved.numpy() / np.abs(nudge).max()
        return table.numpy()

    @contextmanager
    def time_table(self) -> Iterator[Callable[[np.ndarray], np.ndarray]]:
        """Give a function from flow times (N,) to rows of the time table (N, C)."""

        def rows(times: np.ndarray) -> np.ndarray:
            rounded = torch.from_numpy(times.astype(np.float32))
            return self._network.time_conditioning(rounded).numpy()

        with self._loaded('time'):
            yield rows

    def _step_row(self, times: np.ndarray) -> Tensor:
        """Row (1, S * C) of the S times of a step, each computed by itself."""
        rounded = torch.tensor(times, dtype=torch.float32)
        return torch.cat([self._network.time_conditioning(t[None]) for t in rounded], dim=1)

    def _denoise(
        self, case: Case, schedule: StepSchedule, table: Tensor, x: Tensor
    ) -> tuple[Tensor, Tensor]:
        """x before every step and after the last, and all velocities, from one noise."""
        step = DenoiseStep(self._network)
        past, rows = _tensors(case.past), _tensors(case.head_inputs)
        own = [torch.from_numpy(array) for array in (case.row_weight, case.plan)]
        trace, velocities = [x], []
        for k in range(len(schedule.times)):
            weight = torch.from_numpy(case.plan_weight[k])
            moves = (torch.from_numpy(value) for value in moves_of(case, schedule, k).values())
            x, velocity = step(x, past, table[k : k + 1], *moves, *own, weight, rows)
            trace.append(x)
            velocities.append(velocity)
        return torch.stack(trace), torch.stack(velocities)

    @contextmanager
    def _loaded(self, *parts: Part) -> Iterator[None]:
        """Load the weights of these parts of the network while the context is open."""
        names = set().union(*(self._parts[part] for part in parts))
        self._assign({name: self._weights.read(name) for name in names})
        try:
            with torch.inference_mode():
                yield
        finally:
            empty = {name: torch.empty(self._weights.shape(name), device='meta') for name in names}
            self._assign(empty)

    def _assign(self, tensors: dict[str, Tensor]) -> None:
        self._network.load_state_dict(tensors, assign=True, strict=False)


def moves_of(case: Case, schedule: StepSchedule, k: int) -> dict[str, np.ndarray]:
    """Inputs that say how step k moves x, by the names of the expert's graph, in its order."""
    if schedule.updates is not None:
        return {'update': schedule.updates[k], 'step_noise': case.step_noise[k]}
    return {
        't': np.asarray(schedule.times[k], np.float32),
        'dt': np.asarray(schedule.dt, np.float32),
    }


def _tensors(arrays: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
    return {name: torch.from_numpy(array) for name, array in arrays.items()}
