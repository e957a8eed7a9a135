"""Device buffers of the torch engine: prompt rows with prefix slots, layouts and schedules."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vla_runtime.engines.graphed_work import GraphedWork
from vla_runtime.engines.protocol import MAX_SAMPLES
from vla_runtime.engines.torch.cuda_graph import Capturer
from vla_runtime.families.flow_network import FlowNetwork
from vla_runtime.families.traced_shapes import TracedShapes, row_tensors
from vla_runtime.family.step_schedule import stage_times


class RowBuffers:
    """Buffers for one number of prompt rows, with its prefix slots.

    `slots` has the prefix's outputs by name; `row_weight` is (R,), `velocity`
    (R * MAX_SAMPLES, H, A).
    """

    def __init__(
        self,
        network: FlowNetwork,
        shapes: TracedShapes,
        rows: int,
        slots: int,
        device: torch.device,
    ) -> None:
        family, dims = network.family, network.dims
        self.prefix_inputs = row_tensors(family.prefix_inputs(dims), rows, device)
        self.head_inputs = row_tensors(family.head_inputs(dims), rows, device)
        self.slots = [shapes.past_buffers(rows, device) for _ in range(slots)]
        self.row_weight = torch.zeros(rows, device=device)
        self.velocity = torch.zeros(
            rows * MAX_SAMPLES, dims.horizon, dims.action_dim, device=device
        )


class PreparedPrefix:
    """Data shared by the denoise steps over one slot; laid out again after the slot changes.

    Graphs keep its addresses, so it is made once, for one number of rows and samples, in the stream
    of the denoise loop's capturer. `value` is what the network's `velocity` takes as `past`.
    """

    def __init__(
        self, network: FlowNetwork, past: Mapping[str, Tensor], samples: int, capturer: Capturer
    ) -> None:
        self.value: Any = network.prepare_prefix(past, samples)
        work = partial(network.prepare_prefix, past, samples, self.value)
        # By default there is nothing to lay out, and an empty graph to capture.
        self._again = None if self.value is past else GraphedWork(work, capturer)
        self._encoding: int | None = None

    @property
    def captures(self) -> bool:
        return self._again is not None and self._again.captures

    def follow(self, encoding: int) -> None:
        """Lay the slot out if it has been written since (`encoding` counts that)."""
        if self._again is not None and encoding != self._encoding:
            self._again.run()
        self._encoding = encoding


class Variant(NamedTuple):
    """Settings of the denoise loop; each combination has a CUDA graph of its own."""

    rows: int = 1
    slot: int = 0
    samples: int = 1
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
            self._noise = torch.zeros(len(times), MAX_SAMPLES, *chunk, device=device)
        self.plan_weight = torch.zeros(len(times), 1, horizon, 1, device=device)
        self.denoise: dict[Variant, GraphedWork] = {}

    def write_noise(self, step_noise: np.ndarray | None, samples: int) -> None:
        """Copy the noise of every step, (N, H, A) or (N, samples, H, A); None: they draw none."""
        if self._updates is not None and step_noise is not None:
            by_sample = step_noise.reshape(len(step_noise), samples, *step_noise.shape[-2:])
            self._noise[:, :samples].copy_(torch.from_numpy(by_sample))

    def moves(self, index: int, samples: int) -> tuple[Tensor, Tensor]:
        """Return what says how a step moves x: time and step, or update and noise."""
        if self._updates is None:
            return self.times[index], self.dt
        return self._updates[index], self._noise[index, :samples]
