"""The ONNX Runtime backend: a bundle's ONNX files on the CPU, CUDA or TensorRT provider.

Imports neither PyTorch nor the networks. Inputs, outputs, keys and values live in buffers of the
provider's device, bound to the sessions; a schedule's buffers are made when it is first set, and
the last few schedules are kept. ONNX Runtime takes scratch memory from its own arena, which keeps
what it once took. One and two prompt rows are two sessions, and each provider holds the weights of
every session it has: a policy without guidance loads one. On a CUDA provider the runtime may place
single index operators on the CPU where it has no kernel for them; a missing provider is an error.

One thread may encode while another denoises (feature `overlap`): vision, prefix and expert are
sessions of their own, and what one thread binds or writes the other never touches. Jacobians and
flow times of single actions are not in the files, whose rows are prompts and not samples: those
features are PyTorch's alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from threading import local
from typing import get_args

import numpy as np

from vla_runtime.engines.onnx.files import PREFIX_OUTPUTS, Network, Precision, graph_path
from vla_runtime.engines.onnx.session import KIND_OF, Binding, Buffer, Placement, Session
from vla_runtime.engines.onnx.shapes import GraphShapes
from vla_runtime.engines.protocol import SLOTS, Feature, StepInputs
from vla_runtime.families.family import PolicyDims
from vla_runtime.families.pi.time_table import TimeTable
from vla_runtime.files.quotes import one_line

# Schedules (numbers of denoise steps) that are kept.
_SCHEDULES_KEPT = 4


class _Schedule:
    """The denoise steps: flow times, step size, time table and the plan's weights."""

    def __init__(self, times: np.ndarray, dt: float, table: np.ndarray, place: Placement) -> None:
        steps = len(times)
        self.steps = steps
        self.times = Buffer(place, (steps,), 'tensor(float)')
        self.times.write(np.asarray(times, dtype=np.float32))
        self.dt = Buffer(place, (), 'tensor(float)')
        self.dt.write(np.asarray(dt, dtype=np.float32))
        self.table = Buffer(place, table.shape, 'tensor(float)')
        self.table.write(table)
        self._place = place
        self.plan_weight: Buffer | None = None

    def write_plan_weight(self, plan_weight: np.ndarray) -> None:
        """(N, H)"""
        if self.plan_weight is None:
            self.plan_weight = Buffer(self._place, plan_weight.shape, 'tensor(float)')
        self.plan_weight.write(plan_weight)


class _Rows:
    """Sessions and buffers of one number of prompt rows, its prefix slots included."""

    def __init__(
        self, expert: Session, prefix: Session, image_tokens: Buffer, image_mask: Buffer
    ) -> None:
        self.expert = expert
        self.tokens = prefix.buffer('tokens')
        self.token_mask = prefix.buffer('token_mask')
        self.row_weight = expert.buffer('row_weight')
        self.velocity = expert.buffer('velocity')
        self.state = expert.buffer('state') if 'state' in expert.inputs else None
        self.encode: list[Binding] = []
        self.denoise: list[Binding] = []
        for _ in range(SLOTS):
            past = {name: prefix.buffer(name) for name in PREFIX_OUTPUTS}
            self.encode.append(
                self._encoding(prefix, past, image_tokens=image_tokens, image_mask=image_mask)
            )
            self.denoise.append(self._denoising(expert, past))

    def _encoding(self, prefix: Session, past: Mapping[str, Buffer], **images: Buffer) -> Binding:
        binding = prefix.binding()
        inputs = {**images, 'tokens': self.tokens, 'token_mask': self.token_mask}
        for name, buffer in inputs.items():
            binding.input(name, buffer)
        for name, buffer in past.items():
            binding.output(name, buffer)
        return binding

    def _denoising(self, expert: Session, past: Mapping[str, Buffer]) -> Binding:
        """What stays the same in every step; `OnnxEngine.step` binds the rest."""
        binding = expert.binding()
        for name, buffer in past.items():
            binding.input(name, buffer)
        binding.input('row_weight', self.row_weight)
        binding.output('velocity', self.velocity)
        if self.state is not None:
            binding.input('state', self.state)
        return binding


class _Ran(local):
    """What a thread has run and not waited for; another one's work is none of its business."""

    def __init__(self) -> None:
        self._bindings: dict[int, Binding] = {}

    def run(self, binding: Binding) -> None:
        binding.run()
        self._bindings[id(binding)] = binding

    def wait(self) -> None:
        for binding in self._bindings.values():
            binding.wait()
        self._bindings.clear()


class OnnxEngine:
    """Vision, prefix and expert of one policy in ONNX Runtime (see `engine.PolicyEngine`).

    Args:
        family, dims: what the files are.
        folder: of the bundle.
        device: `cpu`, `cuda`, `cuda:N`, `tensorrt` or `tensorrt:N`.
        precision: that the files were exported in; it is checked, not chosen here.
        max_rows: most prompt rows that will be asked for (2 for guidance).

    Raises:
        ValueError: a provider, file or precision that is not to be had here, or files that do not
            fit the dimensions.
    """

    features: frozenset[Feature] = frozenset({'overlap'})
    slots = SLOTS

    def __init__(
        self,
        family: str,
        dims: PolicyDims,
        folder: Path,
        *,
        device: str,
        precision: str,
        max_rows: int,
    ) -> None:
        self.dims = dims
        self.max_rows = max_rows
        self._place = place = Placement.of(device)

        self._table = TimeTable(family, dims, folder / 'weights.safetensors')

        def session(network: Network, rows: int = 1) -> Session:
            loaded = Session(graph_path(folder, network, rows), place)
            shapes = GraphShapes(dims, rows, precision, self._table.width)
            _check_graph(loaded, network, shapes)
            return loaded

        # The smallest first: what does not fit is told before the others are loaded.
        expert = session('expert')
        vision = session('vision')
        self._pixels = vision.buffer('pixels')
        tokens = (dims.cameras, dims.vision.tokens, dims.language.width)
        self._image_tokens = Buffer(place, tokens, 'tensor(float)')
        self._image_tokens.write(np.zeros(tokens, dtype=np.float32))
        self._image_mask = Buffer(place, (dims.cameras,), 'tensor(bool)')
        self._vision = vision.binding()
        self._vision.input('pixels', self._pixels)
        self._rows = {
            rows: _Rows(
                expert if rows == 1 else session('expert', rows),
                session('prefix', rows),
                self._image_tokens,
                self._image_mask,
            )
            for rows in range(1, max_rows + 1)
        }
        # A step reads one and writes the other.
        self._x = [expert.buffer('x'), expert.buffer('x_next')]
        self._plan = expert.buffer('plan')
        for rows in self._rows.values():
            for binding in rows.denoise:
                binding.input('plan', self._plan)
        self._current = 0
        self._prefix = (1, 0)
        self._ran = _Ran()
        self._schedules: dict[tuple[float, ...], _Schedule] = {}
        self._schedule: _Schedule | None = None

    @property
    def cuda_graph(self) -> Mapping[str, str]:
        return dict.fromkeys(('vision', 'prefix', 'denoise'), 'eager')

    def set_schedule(self, times: np.ndarray, dt: float) -> None:
        key = (*map(float, times), dt)
        schedule = self._schedules.pop(key, None)
        if schedule is None:
            schedule = _Schedule(times, dt, self._table(times), self._place)
        self._schedules[key] = self._schedule = schedule
        if len(self._schedules) > _SCHEDULES_KEPT:
            del self._schedules[next(iter(self._schedules))]

    def encode_image(self, camera: int, pixels: np.ndarray) -> None:
        self._pixels.write(pixels)
        shape = (1, *self._image_tokens.shape[1:])
        self._vision.output_row('image_tokens', shape, self._image_tokens, camera)
        self._ran.run(self._vision)

    def encode_prefix(
        self, image_mask: np.ndarray, tokens: np.ndarray, token_mask: np.ndarray, slot: int = 0
    ) -> None:
        rows = self._rows[tokens.shape[0]]
        self._image_mask.write(image_mask)
        rows.tokens.write(tokens)
        rows.token_mask.write(token_mask)
        self._ran.run(rows.encode[slot])

    def use_prefix(self, rows: int, slot: int = 0) -> None:
        self._prefix = (rows, slot)

    def load_step_inputs(self, inputs: StepInputs) -> None:
        if inputs.jacobian or inputs.clean_actions or inputs.x.ndim != 2:
            raise ValueError(
                "backend 'onnxruntime' has none of the features jacobian, action_time and samples; "
                'use backend torch'
            )
        schedule, rows = self._require_schedule(), self._rows[self._prefix[0]]
        self.write_x(inputs.x)
        self._plan.write(inputs.plan)
        schedule.write_plan_weight(inputs.plan_weight)
        rows.row_weight.write(inputs.row_weight)
        if rows.state is not None:
            if inputs.state is None:
                raise ValueError('this policy has a state token: StepInputs.state is missing')
            rows.state.write(inputs.state)

    def step(self, index: int) -> None:
        schedule, (rows, slot) = self._require_schedule(), self._prefix
        assert schedule.plan_weight is not None, 'load_step_inputs comes first'
        binding = self._rows[rows].denoise[slot]
        binding.input('x', self._x[self._current])
        binding.input_row('time_conditioning', (1, schedule.table.shape[1]), schedule.table, index)
        binding.input_row('t', (), schedule.times, index)
        binding.input('dt', schedule.dt)
        binding.input_row('plan_weight', (1, self.dims.horizon, 1), schedule.plan_weight, index)
        self._current = 1 - self._current
        binding.output('x_next', self._x[self._current])
        self._ran.run(binding)

    def run_steps(self) -> None:
        for index in range(self._require_schedule().steps):
            self.step(index)

    def read_x(self) -> np.ndarray:
        return self._x[self._current].read()[0]

    def write_x(self, x: np.ndarray) -> None:
        self._x[self._current].write(x)

    def read_velocity(self) -> np.ndarray:
        return self._rows[self._prefix[0]].velocity.read()

    def synchronize(self) -> None:
        self._ran.wait()

    def close(self) -> None:
        names = (
            '_vision',
            '_rows',
            '_x',
            '_plan',
            '_pixels',
            '_image_tokens',
            '_image_mask',
            '_ran',
        )
        for name in names:
            setattr(self, name, None)
        self._schedules, self._schedule = {}, None

    def _require_schedule(self) -> _Schedule:
        if self._schedule is None:
            raise RuntimeError('set_schedule must be called before denoising')
        return self._schedule


def _check_graph(session: Session, network: Network, shapes: GraphShapes) -> None:
    """Inputs and outputs are those of the network in the dimensions of policy.yaml.

    Raises:
        ValueError: another graph, precision, kind or shape.
    """
    parts = (
        ('input', session.inputs, shapes.inputs(network)),
        ('output', session.outputs, shapes.outputs(network)),
    )
    for what, found, expected in parts:
        if set(found) != set(expected):
            raise ValueError(
                f'{session.path}: is not the graph of {network}: its {what}s are '
                f'{_listed(found)} where {_listed(expected)} are expected; export the bundle again'
            )
    for what, found, expected in parts:
        for name, (kind, shape) in expected.items():
            found_kind = KIND_OF.get(found[name].type, found[name].type)
            if name in ('past_key', 'past_value') and found_kind in get_args(Precision):
                _check_precision(session.path, found_kind, shapes.precision)
            if (found_kind, found[name].shape) != (kind, list(shape)):
                raise ValueError(
                    f"{session.path}: {what} '{name}' is {found_kind} {found[name].shape}, but the "
                    f'dimensions in policy.yaml make it {kind} {list(shape)}; export the bundle '
                    'again'
                )


def _check_precision(path: Path, found: str, asked: str) -> None:
    if found != asked:
        raise ValueError(
            f"precision '{asked}' was asked for, but the files in {path.parent} were exported in "
            f'{found}; set precision to {found}, or export with --onnx-precision {asked}'
        )


def _listed(names: Iterable[str]) -> str:
    return one_line(', '.join(names), 200)
