"""The PyTorch backend, on CPU or CUDA.

Inputs, outputs, keys and values live in buffers allocated at load; what the steps over a slot share
is allocated when the slot is first denoised over, a schedule's buffers when it is first set; the
last few schedules are kept. On CUDA the whole denoise loop is one captured graph, as are vision,
prefix and what is laid out for the steps; a schedule's graphs, one for each `Variant`, are captured
when first run. Every camera, the prefix and the denoise loop have a CUDA stream each. On a CPU
PyTorch takes scratch memory inside each operator and gives it back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vla_runtime.engines.graphed_work import GraphedWork, Work
from vla_runtime.engines.protocol import (
    FEATURES,
    SLOTS,
    DenoiseLoop,
    Feature,
    PrefixSlot,
    StepInputs,
    count_rows,
    input_named,
)
from vla_runtime.engines.schedules import Schedules, schedule_key
from vla_runtime.engines.torch.buffers import (
    PreparedPrefix,
    RequestBatch,
    RowBuffers,
    Schedule,
    Variant,
)
from vla_runtime.engines.torch.cuda_graph import (
    CudaStreams,
    capturers_of,
    captures_graphs,
    vision_of,
)
from vla_runtime.engines.triton_option import OFF
from vla_runtime.family.declaration import Family, PolicyDims, RowInput, image_sizes
from vla_runtime.models.base.flow_network import FlowNetwork
from vla_runtime.models.base.flow_step import DenoiseStep, JacobianDenoiseStep
from vla_runtime.models.blocks.layers import batch_of
from vla_runtime.models.shapes.traced_shapes import trace_shapes

# --- Lengths at which a prompt is encoded where shapes are static


# Prompts of a sentence alone, with the state of a few joints, and with a long state.
LENGTHS = (48, 96, 200)
Inputs = Mapping[str, RowInput]


def inputs_by_length(family: Family, dims: PolicyDims, static_shapes: bool) -> tuple[Inputs, ...]:
    """Return the prefix's inputs at each length, shortest first; the last are the policy's own."""
    own = family.prefix_inputs(dims)
    if not (static_shapes and family.cuts_padding):
        return (own,)
    whole: Any = dims
    shorter = [length for length in LENGTHS if length < whole.prompt_length]
    return (*(family.prefix_inputs(replace(whole, prompt_length=n)) for n in shorter), own)


def shortest(lengths: Sequence[Inputs], rows: Mapping[str, np.ndarray]) -> int:
    """Return the index of the first length that cuts off no valid token of any row.

    `rows` are inputs at the full length, (R, …) each; booleans mark valid tokens.
    """
    for index, inputs in enumerate(lengths[:-1]):
        masks = [(rows[name], one.shape[0]) for name, one in inputs.items() if one.kind == 'bool']
        if not any(mask[:, length:].any() for mask, length in masks):
            return index
    return len(lengths) - 1


def cut(rows: Mapping[str, Tensor], inputs: Inputs) -> dict[str, Tensor]:
    """Return views of the rows (R, …) in the shapes of these inputs."""
    return {
        name: rows[name][(slice(None), *(slice(size) for size in one.shape))]
        for name, one in inputs.items()
    }


def write_padded(tensor: Tensor, buffer: Tensor) -> None:
    """Copy into the front of a buffer that is longer along some axes; zeros follow."""
    for axis, size in enumerate(tensor.shape):
        if size < buffer.shape[axis]:
            # What an earlier prompt left behind may be NaN, and zero times NaN is NaN.
            buffer.narrow(axis, size, buffer.shape[axis] - size).zero_()
            buffer = buffer.narrow(axis, 0, size)
    buffer.copy_(tensor)


# --------------------------------------------------------------------------------------------------


class TorchEngine:
    """Vision, prefix and expert of one policy in PyTorch (see `protocol.PolicyEngine`).

    Args:
        network: network with its weights, in its final precision, which the engine joins; of one
            that another engine has joined the weights alone are used.
        max_rows: most prompt rows that will be asked for (2 for guidance).
        use_cuda_graphs: ignored on a CPU.
    """

    backend = 'torch'
    features: frozenset[Feature] = FEATURES[backend]

    def __init__(
        self, network: FlowNetwork, *, max_rows: int = 2, use_cuda_graphs: bool = True
    ) -> None:
        network = network.twin() if network.is_joined else network
        network = network.eval().requires_grad_(False)
        network.fold_constants()
        self.dims = dims = network.dims
        self.max_rows = max_rows
        self._device = device = next(network.parameters()).device
        self._shapes = trace_shapes(network)
        self._network = network
        static_shapes = captures_graphs(device)
        network.join(static_shapes)
        self._denoise_step = DenoiseStep(network)
        # With gradients, layer by layer.
        self._jacobian_step = JacobianDenoiseStep(network)
        # By shape of the step: class of the head's layers where it is not the joined network's own.
        self._layers: dict[Variant, Any] = {}
        self.triton, self.why_triton = OFF, ''
        self._capturers = capturers_of(device, use_cuda_graphs and static_shapes, dims.cameras)
        self._sizes = image_sizes(dims)
        # Of each camera.
        self._pixels = [torch.zeros(1, 3, *size, device=device) for size in self._sizes]
        # Of each session.
        self._image_tokens: list[Tensor] = []
        self._image_mask = torch.zeros(dims.cameras, dtype=torch.bool, device=device)
        chunk = (dims.horizon, dims.action_dim)
        self._noise = torch.zeros(1, *chunk, device=device)
        self._x = torch.zeros_like(self._noise)
        self._plan = torch.zeros(1, *chunk, device=device)
        self._clean = torch.zeros(dims.horizon, 1, dtype=torch.bool, device=device)
        self._buffers = {
            r: RowBuffers(network, self._shapes, r, device) for r in range(1, max_rows + 1)
        }
        # By length of the prompt, shortest first.
        self._prefix_inputs = inputs_by_length(network.family, dims, static_shapes)
        # Number of times that each slot was written.
        self._encodings: dict[PrefixSlot, int] = {}
        # By place and class of the layers; only the denoising stream reads and writes them.
        self._prepared: dict[tuple[PrefixSlot, Any], PreparedPrefix] = {}
        # By number of rows of each request, and of requests: their prefixes side by side.
        self._gathered: dict[tuple[int, int], PreparedPrefix] = {}
        # Whether so many requests together keep their bits, where that was tried.
        self._exact: dict[tuple[int, int], bool] = {}
        # Settings of the denoise loop, with the rows and slot that it denoises over.
        self._variant = Variant()
        self._schedules: Schedules[Schedule] = Schedules(Schedule.free)
        # Of each session, by camera.
        self._vision: list[list[GraphedWork]] = []
        self._prefix: dict[PrefixSlot, list[GraphedWork]] = {}
        self.open_session()
        # Last: they begin when everything above is complete.
        self._streams = CudaStreams(device, dims.cameras) if device.type == 'cuda' else None

    @property
    def cuda_graph(self) -> Mapping[str, str]:
        return {
            'vision': self._vision_status,
            'prefix': self._prefix[self._place][-1].status,
            'denoise': self._denoise.status if self._schedules.current else 'eager',
            **self._together_status,
        }

    @property
    def _together_status(self) -> dict[str, str]:
        schedule = self._schedules.current
        batches = () if schedule is None else schedule.batches.values()
        works = [batch.work for batch in batches if batch.work is not None]
        return {'together': works[-1].status} if works else {}

    @property
    def _vision_status(self) -> str:
        """Status of all cameras that were seen: of one whose capture failed, if there is one."""
        found = [vision.status for of_session in self._vision for vision in of_session]
        good = 'captured' if 'captured' in found else 'eager'
        return next((status for status in found if status not in ('captured', 'eager')), good)

    def captures(self, loop: DenoiseLoop) -> bool:
        place = loop.rows, loop.slot
        if any(prefix.captures for prefix in self._prefix[place]):
            return True
        variant = Variant(*place, loop.jacobian, loop.action_time)
        if not self._capturers['denoise'].active:
            return False
        if loop.alone:
            prepared = self._prepared.get(self._layout(variant))
            return not variant.jacobian and (prepared is None or prepared.captures)
        works = (
            schedule.denoise.get(variant)
            for schedule in self._schedules.kept
            if len(schedule.times) == loop.steps
        )
        # What the steps share is laid out, and its graph captured, before theirs.
        return all(work is None or work.captures for work in works)

    def set_schedule(self, times: np.ndarray, dt: float, updates: np.ndarray | None = None) -> None:
        with self._denoising():
            self._schedules.use(
                schedule_key(times, dt, updates),
                lambda: Schedule(times, dt, updates, self._network, self._device),
            )

    @property
    def session_bytes(self) -> int:
        slots = (of_rows.slots[:SLOTS] for of_rows in self._buffers.values())
        past = [tensor for held in slots for slot in held for tensor in slot.values()]
        return sum(tensor.nbytes for tensor in (self._image_tokens[0], *past))

    def open_session(self) -> int:
        session, tokens = len(self._image_tokens), (len(self._sizes), *self._shapes.image_tokens)
        try:
            image_tokens = torch.zeros(tokens, device=self._device)
            slots = {rows: buffers.make_slots() for rows, buffers in self._buffers.items()}
        except torch.cuda.OutOfMemoryError as error:
            raise ValueError(
                f"device '{self._device}': no memory for session {session + 1}; serve fewer robots "
                f'at once (--max-sessions), or end what else uses the GPU: {error}'
            ) from error
        self._image_tokens.append(image_tokens)
        self._vision.append(
            [
                self._graphed(vision_of(camera), partial(self._run_vision, camera, session))
                for camera in range(len(self._sizes))
            ]
        )
        for rows, buffers in self._buffers.items():
            buffers.slots += slots[rows]
            for slot in range(session * SLOTS, (session + 1) * SLOTS):
                self._encodings[rows, slot] = 0
                self._prefix[rows, slot] = [
                    self._graphed('prefix', partial(self._run_prefix, rows, slot, length))
                    for length in range(len(self._prefix_inputs))
                ]
        if self._device.type == 'cuda':
            # The streams of vision and prefix do not wait for the one that zeros were written in.
            torch.cuda.synchronize(self._device)
        return session

    @torch.inference_mode()
    def encode_image(self, place: int, pixels: np.ndarray) -> None:
        session, camera = divmod(place, len(self._sizes))
        with self._vision_stream(camera):
            self._pixels[camera].copy_(torch.from_numpy(pixels)[None])
            self._vision[session][camera].run()

    @torch.inference_mode()
    def encode_prefix(
        self, image_mask: np.ndarray, rows: Mapping[str, np.ndarray], slot: int = 0
    ) -> None:
        count = count_rows(rows)
        with self._encoding((count, slot)):
            self._image_mask.copy_(torch.from_numpy(image_mask))
            _copy(rows, self._buffers[count].prefix_inputs)
            # All of them now: a longer prompt later shall not wait for a capture.
            for prefix in self._prefix[count, slot]:
                prefix.prepare()
            self._prefix[count, slot][shortest(self._prefix_inputs, rows)].run()
            self._encodings[count, slot] += 1

    def use_prefix(self, rows: int, slot: int = 0) -> None:
        self._variant = self._variant._replace(rows=rows, slot=slot)

    @torch.inference_mode()
    def load_step_inputs(self, inputs: StepInputs) -> None:
        with self._denoising():
            schedule, rows = self._schedules.require(), self._buffers[self._variant.rows]
            self._variant = self._variant._replace(
                jacobian=inputs.jacobian, action_time=inputs.clean_actions > 0
            )
            self._noise.copy_(torch.from_numpy(inputs.x)[None])
            self._x.copy_(self._noise)
            self._plan.copy_(torch.from_numpy(inputs.plan)[None])
            self._clean.fill_(False)
            self._clean[: inputs.clean_actions] = True
            schedule.plan_weight.copy_(torch.from_numpy(inputs.plan_weight)[:, None, :, None])
            schedule.write_noise(inputs.step_noise)
            rows.row_weight.copy_(torch.from_numpy(inputs.row_weight))
            _copy(inputs.rows, rows.head_inputs)

    @torch.inference_mode()
    def step(self, index: int) -> None:
        with self._denoising(self._place):
            self._prepare_slot()
            self._run_step(self._schedules.require(), self._variant, index)

    @torch.inference_mode()
    def run_steps(self) -> None:
        with self._denoising(self._place):
            self._prepare_slot()
            self._denoise.run()

    def read_x(self) -> np.ndarray:
        with self._denoising():
            return self._x[0].cpu().numpy().copy()

    @torch.inference_mode()
    def write_x(self, x: np.ndarray) -> None:
        with self._denoising():
            self._x.copy_(torch.from_numpy(x)[None])

    def read_velocity(self) -> np.ndarray:
        with self._denoising():
            return self._buffers[self._variant.rows].velocity.cpu().numpy().copy()

    def denoise_together(
        self, places: Sequence[PrefixSlot], inputs: Sequence[StepInputs]
    ) -> tuple[list[np.ndarray], int]:
        if captures_graphs(self._device):
            return self._replay_together(places, inputs), len(places)
        key = places[0][0], len(places)
        exact = self._exact.get(key)
        if exact is not False:
            found = self._join_and_run(places, inputs)
        if not exact:
            alone = [self._run_alone(*one) for one in zip(places, inputs, strict=True)]
        if exact is None:
            # The first time of so many: whether products of their rows keep each row's bits.
            # A chunk that is no number says nothing against them.
            same = partial(np.array_equal, equal_nan=True)
            self._exact[key] = exact = all(map(same, found, alone))
        return (found, len(places)) if exact else (alone, 1)

    def _run_alone(self, place: PrefixSlot, inputs: StepInputs) -> np.ndarray:
        self.use_prefix(*place)
        self.load_step_inputs(inputs)
        self.run_steps()
        return self.read_x()

    @torch.inference_mode()
    def _join_and_run(
        self, places: Sequence[PrefixSlot], inputs: Sequence[StepInputs]
    ) -> list[np.ndarray]:
        """Run the steps over prefixes that are read where they lie."""
        schedule = self._schedules.require()
        batch = self._batch(schedule, places[0][0], len(places))
        batch.load(inputs)
        own = type(self._network).expert_type
        prepared = [self._prepare(place, own).value for place in places]
        axes = {name: tensor.row_axis for name, tensor in self._shapes.past.items()}
        with batch_of(len(places)):
            self._run_together(schedule, batch, self._network.join_prefixes(prepared, axes))
        return list(batch.x.numpy().copy())

    @torch.inference_mode()
    def _replay_together(
        self, places: Sequence[PrefixSlot], inputs: Sequence[StepInputs]
    ) -> list[np.ndarray]:
        """Replay the steps over prefixes that are copied beside each other.

        There is a graph for each power of two; the first request fills what is left.
        """
        schedule, rows = self._schedules.require(), places[0][0]
        count = 1 << (len(places) - 1).bit_length()
        filled = [*places, *[places[0]] * (count - len(places))]
        with self._denoising(*places):
            batch = self._batch(schedule, rows, count)
            batch.load(inputs)
            past = self._gather(filled)
            if batch.work is None:
                work = partial(self._run_together, schedule, batch, past)
                batch.work = self._graphed('together', work)
            batch.work.run()
            return list(batch.x[: len(places)].cpu().numpy().copy())

    def _batch(self, schedule: Schedule, rows: int, count: int) -> RequestBatch:
        if (rows, count) not in schedule.batches:
            schedule.batches[rows, count] = RequestBatch(
                self._network, len(schedule.times), rows, count, self._device
            )
        return schedule.batches[rows, count]

    def _run_together(self, schedule: Schedule, batch: RequestBatch, past: Any) -> None:
        batch.x.copy_(batch.noise)
        for index in range(len(schedule.times)):
            x_next, _ = self._denoise_step(
                batch.x,
                past,
                schedule.conditioning[index],
                *schedule.moves(index, batch),
                batch.row_weight,
                batch.plan,
                batch.plan_weight[index],
                batch.head_inputs,
            )
            batch.x.copy_(x_next)

    def _gather(self, places: Sequence[PrefixSlot]) -> Any:
        """Copy the prefixes in these slots beside each other, where a graph reads them."""
        key = rows, count = places[0][0], len(places)
        if key not in self._gathered:
            past = self._shapes.past_buffers(rows * count, self._device)
            self._network.expert_type = type(self._network).expert_type
            prepared = PreparedPrefix(self._network, past, self._capturers['together'])
            self._gathered[key] = prepared
        prepared = self._gathered[key]
        for name, tensor in self._shapes.past.items():
            parts = prepared.past[name].split(rows, dim=tensor.row_axis)
            for part, (_, slot) in zip(parts, places, strict=True):
                part.copy_(self._buffers[rows].slots[slot][name])
        prepared.lay_out()
        return prepared.value

    def synchronize(self) -> None:
        if self._streams is not None:
            self._streams.synchronize()

    def close(self) -> None:
        if self._streams is not None:
            torch.cuda.synchronize(self._device)
        # Graphs first: they replay on the addresses of everything below.
        self._schedules.clear()
        for name in ('_vision', '_pixels', '_prefix', '_capturers', '_buffers'):
            setattr(self, name, None)
        for name in ('_prepared', '_gathered', '_layers', '_image_tokens'):
            setattr(self, name, {})
        for name in ('_network', '_denoise_step', '_jacobian_step'):
            setattr(self, name, None)
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                setattr(self, name, None)
        if self._device.type == 'cuda':
            torch.cuda.empty_cache()

    def _vision_stream(self, camera: int) -> AbstractContextManager[None]:
        return nullcontext() if self._streams is None else self._streams.vision(camera)

    def _encoding(self, place: PrefixSlot) -> AbstractContextManager[None]:
        return nullcontext() if self._streams is None else self._streams.encode(place)

    def _denoising(self, *places: PrefixSlot) -> AbstractContextManager[None]:
        return nullcontext() if self._streams is None else self._streams.denoise(*places)

    @property
    def _place(self) -> PrefixSlot:
        return self._variant.rows, self._variant.slot

    def _graphed(self, network: str, work: Work) -> GraphedWork:
        return GraphedWork(work, self._capturers[network])

    @property
    def _denoise(self) -> GraphedWork:
        schedule, variant = self._schedules.require(), self._variant
        if variant not in schedule.denoise:
            work = partial(self._run_steps, schedule, variant)
            schedule.denoise[variant] = self._graphed('denoise', work)
        return schedule.denoise[variant]

    def _run_vision(self, camera: int, session: int = 0) -> None:
        (encoded,) = self._network.vision(self._pixels[camera])
        # A smaller image's tokens come first; the zeros behind them stay.
        self._image_tokens[session][camera, : len(encoded)].copy_(encoded)

    def _run_prefix(self, count: int, slot: int, length: int) -> None:
        rows, inputs = self._buffers[count], self._prefix_inputs[length]
        prefix, image_tokens = rows.slots[slot], self._image_tokens[slot // SLOTS]
        # A GPU reads the weights once for all rows. A CPU's cache holds the activations of one row
        # only, so two rows together take longer than one after the other.
        together = count if self._device.type == 'cuda' else 1
        for first in range(0, count, together):
            part = slice(first, first + together)
            of_part = {name: tensor[part] for name, tensor in rows.prefix_inputs.items()}
            past = self._network.prefix(image_tokens, self._image_mask, **cut(of_part, inputs))
            for name, tensor in past.items():
                axis = self._shapes.past[name].row_axis
                write_padded(tensor, prefix[name].narrow(axis, first, tensor.shape[axis]))

    def _run_steps(self, schedule: Schedule, variant: Variant) -> None:
        # From the noise buffer, so that running twice (warm-up before a capture) changes nothing.
        self._x.copy_(self._noise)
        for index in range(len(schedule.times)):
            self._run_step(schedule, variant, index)

    def _run_step(self, schedule: Schedule, variant: Variant, index: int) -> None:
        rows = self._buffers[variant.rows]
        past: Any = rows.slots[variant.slot]
        denoise_step: DenoiseStep = self._jacobian_step
        if not variant.jacobian:
            denoise_step, past = self._denoise_step, self._prepared[self._layout(variant)].value
        x_next, velocity = denoise_step(
            self._x,
            past,
            self._conditioning(schedule, variant, index),
            *schedule.moves(index),
            rows.row_weight,
            self._plan,
            schedule.plan_weight[index],
            rows.head_inputs,
        )
        self._x.copy_(x_next)
        rows.velocity.copy_(velocity)

    def _prepare_slot(self) -> None:
        # With gradients the plain modules run, over the slot as it is.
        if not self._variant.jacobian:
            self._prepare(*self._layout(self._variant))

    def _prepare(self, place: PrefixSlot, layers: Any) -> PreparedPrefix:
        """Return what the steps over a slot are laid out in, laid out anew where it was written."""
        if (place, layers) not in self._prepared:
            past = self._buffers[place[0]].slots[place[1]]
            self._network.expert_type = layers
            self._prepared[place, layers] = PreparedPrefix(
                self._network, past, self._capturers['denoise']
            )
        prepared = self._prepared[place, layers]
        prepared.follow(self._encodings[place])
        return prepared

    def _layout(self, variant: Variant) -> tuple[PrefixSlot, Any]:
        """Return the key of what a variant's steps are laid out in: slot and layers."""
        own = type(self._network).expert_type
        layers = self._layers.get(variant._replace(slot=0), own)
        return (variant.rows, variant.slot), layers

    def _conditioning(self, schedule: Schedule, variant: Variant, index: int) -> Any:
        if not (variant.action_time or variant.jacobian):
            return schedule.conditioning[index]
        row = schedule.table[index : index + 1]
        if variant.action_time:
            row = torch.where(self._clean, schedule.clean, row)[None]
        return row if variant.jacobian else self._network.split_conditioning(row)


def _copy(given: Mapping[str, np.ndarray], buffers: Mapping[str, Tensor]) -> None:
    for name, buffer in buffers.items():
        buffer.copy_(torch.from_numpy(input_named(name, given)))
