"""The ONNX Runtime backend: a bundle's ONNX files on the CPU, CUDA or TensorRT provider.

Imports neither PyTorch nor the networks. All tensors live in buffers of the provider's device,
bound to the sessions; the last few schedules are kept. ONNX Runtime takes scratch memory from its
own arena, which never shrinks. One and two prompt rows are separate sessions, each with its own
copy of the weights: a policy without guidance loads one. On a CUDA provider the runtime may place
single index operators on the CPU; a missing provider is an error.

One thread may encode while another denoises (feature `overlap`): the sessions are separate, and
the two threads bind and write different buffers. The files hold no Jacobian and no flow times of
single actions, and their rows are prompts of one request.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from threading import local
from typing import Any

import numpy as np

from vla_runtime.bundle.onnx_files import IMAGE_INPUTS, SCHEDULER_INPUTS, STEP_INPUTS, TEXT_INPUT
from vla_runtime.engines.onnx.graphs import Graphs, load_graphs
from vla_runtime.engines.onnx.session import Binding, Buffer, Placement, Session
from vla_runtime.engines.protocol import (
    FEATURES,
    SLOTS,
    DenoiseLoop,
    Feature,
    StepInputs,
    count_rows,
    input_named,
)
from vla_runtime.engines.schedules import Schedules, schedule_key
from vla_runtime.engines.token_embedding import TokenEmbedding
from vla_runtime.family.declaration import PolicyDims, image_sizes
from vla_runtime.family.listing import find_family, read_time_table
from vla_runtime.family.step_schedule import step_rows


class _Schedule:
    """Device buffers of a schedule: how the steps move, time table and the plan's weights.

    The expert's bindings are kept: binding anew takes a tenth of a small policy's step.
    """

    def __init__(
        self,
        times: np.ndarray,
        dt: float,
        updates: np.ndarray | None,
        table: np.ndarray,
        place: Placement,
    ) -> None:
        steps = len(times)
        self.steps = steps
        # Inputs with a row for each step, by name, and those that all steps share.
        self._rows: dict[str, Buffer] = {}
        self._shared: dict[str, Buffer] = {}
        if updates is None:
            self._rows['t'] = Buffer(place, (steps,), 'tensor(float)')
            self._rows['t'].write(np.asarray(times, dtype=np.float32))
            self._shared['dt'] = Buffer(place, (), 'tensor(float)')
            self._shared['dt'].write(np.asarray(dt, dtype=np.float32))
        else:
            self._rows['update'] = Buffer(place, updates.shape, 'tensor(float)')
            self._rows['update'].write(updates)
        self._table = Buffer(place, table.shape, 'tensor(float)')
        self._table.write(table)
        self._place = place
        self._plan_weight: Buffer | None = None
        self.bindings: dict[tuple[int, int, int, int], Binding] = {}

    def write_plan_weight(self, plan_weight: np.ndarray) -> None:
        """Copy the plan's weight per denoise step and action, (N, H), to the device."""
        if self._plan_weight is None:
            self._plan_weight = Buffer(self._place, plan_weight.shape, 'tensor(float)')
        self._plan_weight.write(plan_weight)

    def write_noise(self, step_noise: np.ndarray | None) -> None:
        """Copy the noise of every step, (N, H, A), to the device; None: steps draw none."""
        if step_noise is None:
            return
        if 'step_noise' not in self._rows:
            self._rows['step_noise'] = Buffer(self._place, step_noise.shape, 'tensor(float)')
        self._rows['step_noise'].write(step_noise)

    def bind(self, binding: Binding, index: int) -> None:
        assert self._plan_weight is not None, 'load_step_inputs comes first'
        row = (1, self._table.shape[1])
        binding.input_row('time_conditioning', row, self._table, index)
        for name, buffer in self._rows.items():
            # The graph's noise is that of one chunk.
            one = (1,) if name == 'step_noise' else ()
            binding.input_row(name, (*one, *buffer.shape[1:]), buffer, index)
        for name, buffer in self._shared.items():
            binding.input(name, buffer)
        weights = (1, self._plan_weight.shape[1], 1)
        binding.input_row('plan_weight', weights, self._plan_weight, index)


class PrefixRows:
    """Bindings and buffers of the prefix for one number of prompt rows.

    `past` has, per slot, the prefix's outputs by name, and `encode` the run that writes them; both
    are empty before `open_session`.
    """

    def __init__(self, prefix: Session) -> None:
        self._session = prefix
        self.prefix_inputs = {
            name: prefix.buffer(name) for name in prefix.inputs if name not in IMAGE_INPUTS
        }
        self.past: list[dict[str, Buffer]] = []
        self.encode: list[Binding] = []

    def make_slots(self) -> list[dict[str, Buffer]]:
        """Return slots of one more session, which are not in `past` yet."""
        return [
            {name: self._session.buffer(name) for name in self._session.outputs}
            for _ in range(SLOTS)
        ]

    def open_session(
        self, slots: list[dict[str, Buffer]], image_tokens: Buffer, image_mask: Buffer
    ) -> None:
        images = dict(zip(IMAGE_INPUTS, (image_tokens, image_mask), strict=True))
        self.past += slots
        self.encode += [self._encoding(past, images) for past in slots]

    def _encoding(self, past: Mapping[str, Buffer], images: Mapping[str, Buffer]) -> Binding:
        binding = self._session.binding()
        for name, buffer in {**images, **self.prefix_inputs}.items():
            binding.input(name, buffer)
        for name, buffer in past.items():
            binding.output(name, buffer)
        return binding


class _Rows(PrefixRows):
    """The same with those of the denoise steps."""

    def __init__(self, expert: Session, prefix: Session) -> None:
        super().__init__(prefix)
        self._expert = expert
        shared = ('x', *prefix.outputs, *STEP_INPUTS, *SCHEDULER_INPUTS)
        self.head_inputs = {
            name: expert.buffer(name) for name in expert.inputs if name not in shared
        }
        self.row_weight = expert.buffer('row_weight')
        self.velocity = expert.buffer('velocity')

    def denoising(self, slot: int) -> Binding:
        """Bind what is the same in every step over the prefix in this slot."""
        binding = self._expert.binding()
        for name, buffer in {**self.past[slot], **self.head_inputs}.items():
            binding.input(name, buffer)
        binding.input('row_weight', self.row_weight)
        binding.output('velocity', self.velocity)
        return binding


class _Vision:
    """Vision network of one image size; `tokens` is (N, W) of its image tokens."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.pixels = session.buffer('pixels')
        self.tokens: tuple[int, ...] = tuple(session.outputs['image_tokens'].shape[1:])

    def binding(self, image_tokens: Buffer, camera: int) -> Binding:
        """Bind a camera's place among all image tokens; a smaller image's tokens come first."""
        binding = self._session.binding()
        binding.input('pixels', self.pixels)
        binding.output_row('image_tokens', (1, *self.tokens), image_tokens, camera)
        return binding


class Ran(local):
    """Bindings that this thread has run and not waited for; each thread has its own."""

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
    """Vision, prefix and expert of one policy in ONNX Runtime (see `protocol.PolicyEngine`).

    Args:
        device: `cpu`, `cuda`, `cuda:N`, `tensorrt` or `tensorrt:N`.
        precision: precision of the export; it is checked, not chosen here.
        max_rows: most prompt rows that will be asked for (2 for guidance).

    Raises:
        ValueError: a provider, file or precision that is not available, or files that do not fit
            the dimensions.
    """

    backend = 'onnxruntime'
    features: frozenset[Feature] = FEATURES[backend]

    def __init__(
        self,
        family: str,
        dims: PolicyDims,
        folder: Path,
        *,
        device: str,
        precision: str,
        max_rows: int,
        threads: int | None = None,
    ) -> None:
        self.dims = dims
        self.max_rows = max_rows
        self._place = place = Placement.of(device)

        declared = find_family(family)
        self._table = read_time_table(family, dims, folder / 'weights.safetensors')
        graphs = load_graphs(
            folder,
            place,
            declared,
            dims,
            self._table.width,
            precision,
            range(1, max_rows + 1),
            threads,
        )
        hosted = TEXT_INPUT in graphs.prefix[1].inputs
        self._token_embedding = TokenEmbedding.of(folder, precision) if hosted else None
        self._vision = {size: _Vision(session) for size, session in graphs.vision.items()}
        self._sizes = image_sizes(dims)
        # Of each session: image tokens, and the runs that write them by camera.
        self._image_tokens: list[Buffer] = []
        self._encode_image: list[list[Binding]] = []
        self._image_mask = Buffer(place, (dims.cameras,), 'tensor(bool)')
        self._prefix = (1, 0)
        self._ran = Ran()
        self._make_head(graphs)
        self.open_session()

    @property
    def session_bytes(self) -> int:
        slots = (rows.past[:SLOTS] for rows in self._rows.values())
        past = [buffer for held in slots for slot in held for buffer in slot.values()]
        return sum(buffer.size for buffer in (self._image_tokens[0], *past))

    def open_session(self) -> int:
        session = len(self._image_tokens)
        tokens = (self.dims.cameras, *max(vision.tokens for vision in self._vision.values()))
        try:
            image_tokens = Buffer(self._place, tokens, 'tensor(float)')
            slots = {count: rows.make_slots() for count, rows in self._rows.items()}
        except Exception as error:  # ONNX Runtime's errors share no base class
            raise ValueError(
                f"device '{self._place.device}': no memory for session {session + 1}; serve fewer "
                f'robots at once (--max-sessions), or end what else uses the memory: {error}'
            ) from error
        image_tokens.write(np.zeros(tokens, dtype=np.float32))
        self._image_tokens.append(image_tokens)
        self._encode_image.append(
            [
                self._vision[size].binding(image_tokens, camera)
                for camera, size in enumerate(self._sizes)
            ]
        )
        for count, rows in self._rows.items():
            rows.open_session(slots[count], image_tokens, self._image_mask)
        return session

    def _make_head(self, graphs: Graphs) -> None:
        self._rows: Mapping[int, Any] = {
            rows: _Rows(graphs.expert[rows], prefix) for rows, prefix in graphs.prefix.items()
        }
        expert = graphs.expert[1]
        # A step reads one and writes the other.
        self._x = [expert.buffer('x'), expert.buffer('x_next')]
        self._plan = expert.buffer('plan')
        self._current = 0
        self._schedules: Schedules[_Schedule] = Schedules()

    @property
    def cuda_graph(self) -> Mapping[str, str]:
        return dict.fromkeys(('vision', 'prefix', 'denoise'), 'eager')

    def captures(self, loop: DenoiseLoop) -> bool:
        return False

    def set_schedule(self, times: np.ndarray, dt: float, updates: np.ndarray | None = None) -> None:
        self._schedules.use(
            schedule_key(times, dt, updates),
            lambda: _Schedule(
                times, dt, updates, step_rows(self._table, self.dims, times, dt), self._place
            ),
        )

    def encode_image(self, place: int, pixels: np.ndarray) -> None:
        session, camera = divmod(place, len(self._sizes))
        self._vision[self._sizes[camera]].pixels.write(pixels)
        self._ran.run(self._encode_image[session][camera])

    def encode_prefix(
        self, image_mask: np.ndarray, rows: Mapping[str, np.ndarray], slot: int = 0
    ) -> None:
        held = self._rows[count_rows(rows)]
        if self._token_embedding is not None:
            rows = self._token_embedding.replace_tokens(rows)
        self._image_mask.write(image_mask)
        for name, buffer in held.prefix_inputs.items():
            buffer.write(input_named(name, rows))
        self._ran.run(held.encode[slot])

    def use_prefix(self, rows: int, slot: int = 0) -> None:
        self._prefix = (rows, slot)

    def load_step_inputs(self, inputs: StepInputs) -> None:
        if inputs.jacobian or inputs.clean_actions:
            raise ValueError(
                "backend 'onnxruntime' has neither of the features jacobian and action_time; use "
                'backend torch'
            )
        schedule, rows = self._schedules.require(), self._rows[self._prefix[0]]
        self.write_x(inputs.x)
        self._plan.write(inputs.plan)
        schedule.write_plan_weight(inputs.plan_weight)
        schedule.write_noise(inputs.step_noise)
        rows.row_weight.write(inputs.row_weight)
        for name, buffer in rows.head_inputs.items():
            buffer.write(input_named(name, inputs.rows))

    def step(self, index: int) -> None:
        bindings = self._schedules.require().bindings
        key = (*self._prefix, index, self._current)
        if key not in bindings:
            bindings[key] = self._bind_step(*key)
        self._current = 1 - self._current
        self._ran.run(bindings[key])

    def _bind_step(self, rows: int, slot: int, index: int, current: int) -> Binding:
        binding = self._rows[rows].denoising(slot)
        self._schedules.require().bind(binding, index)
        binding.input('plan', self._plan)
        binding.input('x', self._x[current])
        binding.output('x_next', self._x[1 - current])
        return binding

    def run_steps(self) -> None:
        for index in range(self._schedules.require().steps):
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
        for name in vars(self):
            if name not in ('dims', 'max_rows', '_place'):
                setattr(self, name, None)
