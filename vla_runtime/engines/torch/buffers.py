"""Device buffers of the torch engine: rows with prefix slots, layouts, schedules and batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vla_runtime.engines.graphed_work import GraphedWork
from vla_runtime.engines.protocol import SLOTS, StepInputs, input_named
from vla_runtime.engines.torch.cuda_graph import Capturer
from vla_runtime.family.step_schedule import stage_times
from vla_runtime.models.base.flow_network import FlowNetwork
from vla_runtime.models.shapes.traced_shapes import TracedShapes, row_tensors


class RowBuffers:
    """Buffers for one number of prompt rows, with its prefix slots.

    `slots` has the prefix's outputs by name; `row_weight` is (R,), `velocity` (R, H, A).
    """

    def __init__(
        self, network: FlowNetwork, shapes: TracedShapes, rows: int, device: torch.device
    ) -> None:
        family, dims = network.family, network.dims
        self.prefix_inputs = row_tensors(family.prefix_inputs(dims), rows, device)
        self.head_inputs = row_tensors(family.head_inputs(dims), rows, device)
        self.slots: list[dict[str, Tensor]] = []
        self._make_slot = partial(shapes.past_buffers, rows, device)
        self.row_weight = torch.zeros(rows, device=device)
        self.velocity = torch.zeros(rows, dims.horizon, dims.action_dim, device=device)

    def make_slots(self) -> list[dict[str, Tensor]]:
        """Return slots of one more session, which are not in `slots` yet."""
        return [self._make_slot() for _ in range(SLOTS)]


class PreparedPrefix:
    """Data shared by the denoise steps over one slot; laid out again after the slot changes.

    Graphs keep its addresses, so it is made once, for one number of rows, in the stream of the
    denoise loop's capturer. `value` is what the network's `velocity` takes as `past`.
    """

    def __init__(
        self, network: FlowNetwork, past: Mapping[str, Tensor], capturer: Capturer
    ) -> None:
        self.past = past
        self.value: Any = network.prepare_prefix(past)
        work = partial(network.prepare_prefix, past, self.value)
        # By default there is nothing to lay out, and an empty graph to capture.
        self._again = None if self.value is past else GraphedWork(work, capturer)
        self._encoding: int | None = None

    @property
    def captures(self) -> bool:
        return self._again is not None and self._again.captures

    def follow(self, encoding: int) -> None:
        """Lay the slot out if it has been written since (`encoding` counts that)."""
        if encoding != self._encoding:
            self.lay_out()
        self._encoding = encoding

    def lay_out(self) -> None:
        if self._again is not None:
            self._again.run()


class Variant(NamedTuple):
    """Settings of the denoise loop; each combination has a CUDA graph of its own."""

    rows: int = 1
    slot: int = 0
    jacobian: bool = False
    action_time: bool = False


class Schedule:
    """Device buffers of a schedule: how the steps move, and the time table."""

    @torch.inference_mode(False)
    @torch.no_grad()
    def __init__(
        self,
        times: np.ndarray,
        dt: float,
        updates: np.ndarray | None,
        network: FlowNetwork,
        device: torch.device,
    ) -> None:
        # Outside inference mode, because the Jacobian's backward pass keeps rows of the table.
        self.times = torch.tensor(times, dtype=torch.float32, device=device)
        self.dt = torch.tensor(dt, dtype=torch.float32, device=device)
        # Row by row: products round differently for other batch sizes.
        seen = torch.tensor(
            stage_times(network.dims, times, dt), dtype=torch.float32, device=device
        )
        self.table = torch.cat(
            [
                torch.cat([network.time_conditioning(t[None]) for t in of_step], dim=1)
                for of_step in seen
            ]
        )
        # Conditioning of a known action: flow time 0.
        clean = network.time_conditioning(torch.zeros(1, device=device))
        self.clean = clean.repeat(1, seen.shape[1])
        # As the network's head takes them.
        self.conditioning = [
            network.split_conditioning(self.table[i : i + 1]) for i in range(len(times))
        ]
        horizon = network.dims.horizon
        self._updates: Tensor | None = None
        if updates is not None:
            chunk = (horizon, network.dims.action_dim)
            self._updates = torch.tensor(updates, dtype=torch.float32, device=device)
            self._noise = torch.zeros(len(times), 1, *chunk, device=device)
        self.plan_weight = torch.zeros(len(times), 1, horizon, 1, device=device)
        self.denoise: dict[Variant, GraphedWork] = {}
        # By number of rows of each request, and of requests.
        self.batches: dict[tuple[int, int], RequestBatch] = {}

    def free(self) -> None:
        """Let go of the graphs, which hold the network and this schedule."""
        self.denoise.clear()
        self.batches.clear()

    def write_noise(self, step_noise: np.ndarray | None) -> None:
        """Copy the noise of every step, (N, H, A); None: they draw none."""
        if self._updates is not None and step_noise is not None:
            self._noise.copy_(torch.from_numpy(step_noise)[:, None])

    def moves(self, index: int, batch: RequestBatch | None = None) -> tuple[Tensor, Tensor]:
        """Return what says how a step moves x: time and step, or update and noise."""
        if self._updates is None:
            return self.times[index], self.dt
        noise = self._noise if batch is None else batch.step_noise
        return self._updates[index], noise[index]


class RequestBatch:
    """Inputs of the steps of Q requests of R rows each, over one schedule of N steps.

    Attributes:
        noise, x, plan: (Q, H, A); row_weight: (Q, R); plan_weight: (N, Q, H, 1).
        step_noise: (N, Q, H, A).
        head_inputs: by name, (Q * R, …) each, request by request.
        work: the denoise loop over them, where it is captured.
    """

    def __init__(
        self, network: FlowNetwork, steps: int, rows: int, requests: int, device: torch.device
    ) -> None:
        dims = network.dims
        chunk = (requests, dims.horizon, dims.action_dim)
        zeros = partial(torch.zeros, device=device)
        self.noise, self.x, self.plan = (zeros(*chunk) for _ in range(3))
        self.row_weight = zeros(requests, rows)
        self.plan_weight = zeros(steps, requests, dims.horizon, 1)
        self.step_noise = zeros(steps, *chunk)
        head = network.family.head_inputs(dims)
        self.head_inputs = row_tensors(head, requests * rows, device)
        self.work: GraphedWork | None = None

    def load(self, inputs: Sequence[StepInputs]) -> None:
        """Copy the requests' inputs; those of the first fill what is left of the batch."""
        filled = [*inputs, *[inputs[0]] * (len(self.x) - len(inputs))]

        def stacked(arrays: Sequence[np.ndarray], axis: int = 0) -> Tensor:
            return torch.from_numpy(np.stack(arrays, axis=axis))

        self.noise.copy_(stacked([one.x for one in filled]))
        self.plan.copy_(stacked([one.plan for one in filled]))
        self.row_weight.copy_(stacked([one.row_weight for one in filled]))
        self.plan_weight.copy_(stacked([one.plan_weight for one in filled], axis=1)[..., None])
        for name, buffer in self.head_inputs.items():
            given = [input_named(name, one.rows) for one in filled]
            buffer.copy_(torch.from_numpy(np.concatenate(given)))
        if inputs[0].step_noise is not None:
            noises = [one.step_noise for one in filled if one.step_noise is not None]
            self.step_noise.copy_(stacked(noises, axis=1))
