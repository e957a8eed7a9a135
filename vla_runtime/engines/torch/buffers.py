"""What the torch engine keeps on the device: prompt rows with their prefix slots, and schedules."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from vla_runtime.engines.protocol import MAX_SAMPLES
from vla_runtime.engines.torch.cuda_graph import GraphedWork
from vla_runtime.families.family import PolicyDims
from vla_runtime.families.pi.flow_policy import PiNetwork


class PrefixSlot:
    """The keys, values and mask of one encoded prefix of R rows."""

    def __init__(
        self, dims: PolicyDims, rows: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        language = dims.language
        past = (language.depth, rows, language.num_kv_heads, dims.prefix_length, language.head_dim)
        self.past_key = torch.zeros(past, dtype=dtype, device=device)
        self.past_value = torch.zeros(past, dtype=dtype, device=device)
        self.prefix_mask = torch.zeros(rows, dims.prefix_length, dtype=torch.bool, device=device)


class RowBuffers:
    """The buffers of one number of prompt rows, its prefix slots included."""

    def __init__(
        self, dims: PolicyDims, rows: int, slots: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.tokens = torch.zeros(rows, dims.prompt_length, dtype=torch.long, device=device)
        self.token_mask = torch.zeros(rows, dims.prompt_length, dtype=torch.bool, device=device)
        self.slots = [PrefixSlot(dims, rows, device, dtype) for _ in range(slots)]
        self.row_weight = torch.zeros(rows, device=device)
        self.state = torch.zeros(rows, dims.state_dim, device=device) if dims.state_dim else None
        self.velocity = torch.zeros(
            rows * MAX_SAMPLES, dims.horizon, dims.action_dim, device=device
        )


class Variant(NamedTuple):
    """Everything that makes the denoise loop another piece of work (and another CUDA graph)."""

    rows: int = 1
    slot: int = 0
    samples: int = 1
    jacobian: bool = False
    action_time: bool = False


class Schedule:
    """The denoise steps: flow times, step size and the time table."""

    @torch.inference_mode(False)
    @torch.no_grad()
    def __init__(
        self, times: np.ndarray, dt: float, network: PiNetwork, device: torch.device
    ) -> None:
        # Outside inference mode, because the Jacobian's backward pass keeps rows of the table.
        self.times = torch.tensor(times, dtype=torch.float32, device=device)
        self.dt = torch.tensor(dt, dtype=torch.float32, device=device)
        # Row by row, so that a row depends on its time alone and not on how many times were asked
        # for at once (matrix products round differently for other batch sizes).
        self.table = torch.cat([network.time_conditioning(t[None]) for t in self.times])
        # Of an action that is known: flow time 0.
        self.clean = network.time_conditioning(torch.zeros(1, device=device))
        horizon = network.dims.horizon
        self.plan_weight = torch.zeros(len(times), 1, horizon, 1, device=device)
        self.denoise: dict[Variant, GraphedWork] = {}
