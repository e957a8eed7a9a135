"""The PyTorch backend, on CPU or CUDA.

Inputs, outputs, keys and values live in buffers allocated at load; a schedule's buffers are
allocated when it is first set, and the last few schedules are kept. On CUDA the whole denoise loop
is one captured graph over them, as are vision and prefix; a schedule's graph is captured when it is
first run. On a CPU PyTorch takes scratch memory inside each operator and gives it back.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from vla_runtime.dimensions import PolicyDims
from vla_runtime.engines.cuda_graph import Capturer, CudaGraphCapture, GraphedWork, Work
from vla_runtime.engines.engine import StepInputs
from vla_runtime.models import policy_network
from vla_runtime.models.engine_modules import ExpertStep, PrefixEncoder
from vla_runtime.models.flow_policy import FlowPolicy
from vla_runtime.models.layers import matrix_names

# Schedules (numbers of denoise steps) that are kept, each with its table and its graphs.
_SCHEDULES_KEPT = 4
_NETWORKS = ('vision', 'prefix', 'denoise')
PRECISIONS = {
    'float32': torch.float32,
    'bfloat16': torch.bfloat16,
    'float16': torch.float16,
}


class _Rows:
    """The buffers of one number of prompt rows."""

    def __init__(
        self, dims: PolicyDims, rows: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        language = dims.language
        past = (language.depth, rows, language.num_kv_heads, dims.prefix_length, language.head_dim)
        self.tokens = torch.zeros(rows, dims.prompt_length, dtype=torch.long, device=device)
        self.token_mask = torch.zeros(rows, dims.prompt_length, dtype=torch.bool, device=device)
        self.past_key = torch.zeros(past, dtype=dtype, device=device)
        self.past_value = torch.zeros(past, dtype=dtype, device=device)
        self.prefix_mask = torch.zeros(rows, dims.prefix_length, dtype=torch.bool, device=device)
        self.row_weight = torch.zeros(rows, device=device)
        self.state = torch.zeros(rows, dims.state_dim, device=device) if dims.state_dim else None
        self.velocity = torch.zeros(rows, dims.horizon, dims.action_dim, device=device)


class _Schedule:
    """The denoise steps: flow times, step size and the time table."""

    def __init__(
        self, times: np.ndarray, dt: float, network: FlowPolicy, device: torch.device
    ) -> None:
        self.times = torch.tensor(times, dtype=torch.float32, device=device)
        self.dt = torch.tensor(dt, dtype=torch.float32, device=device)
        # Row by row, so that a row depends on its time alone and not on how many times were asked
        # for at once (matrix products round differently for other batch sizes).
        self.table = torch.cat([network.time_conditioning(t[None]) for t in self.times])
        horizon = network.dims.horizon
        self.plan_weight = torch.zeros(len(times), 1, horizon, 1, device=device)
        # Of each number of prompt rows.
        self.denoise: dict[int, GraphedWork] = {}


class TorchEngine:
    """Vision, prefix and expert of one policy in PyTorch (see `engine.PolicyEngine`).

    Args:
        network: with weights, on `device`, in its final precision; used for inference only.
        max_rows: most prompt rows that will be asked for (2 for guidance).
        use_cuda_graphs: capture graphs; ignored on a CPU.
    """

    def __init__(
        self, network: FlowPolicy, *, max_rows: int = 2, use_cuda_graphs: bool = True
    ) -> None:
        network = network.eval().requires_grad_(False)
        self.dims = dims = network.dims
        self.max_rows = max_rows
        self._network = network
        self._prefix_encoder = PrefixEncoder(network)
        self._expert_step = ExpertStep(network)
        self._device = device = network.action_in.weight.device
        dtype = network.language.embedding.weight.dtype
        graphs = use_cuda_graphs and device.type == 'cuda'
        capture = CudaGraphCapture(device) if graphs else None
        self._capturers = {name: Capturer(name, capture) for name in _NETWORKS}

        vision = dims.vision
        self._pixels = torch.zeros(1, 3, vision.image_size, vision.image_size, device=device)
        self._encoded = torch.zeros(1, vision.tokens, dims.language.width, device=device)
        self._image_tokens = torch.zeros(
            dims.cameras, vision.tokens, dims.language.width, device=device
        )
        self._image_mask = torch.zeros(dims.cameras, dtype=torch.bool, device=device)
        self._noise = torch.zeros(1, dims.horizon, dims.action_dim, device=device)
        self._x = torch.zeros_like(self._noise)
        self._plan = torch.zeros_like(self._noise)
        self._buffers = {r: _Rows(dims, r, device, dtype) for r in range(1, max_rows + 1)}
        self._rows = 1
        self._schedules: dict[tuple[float, ...], _Schedule] = {}
        self._schedule: _Schedule | None = None
        self._vision = self._graphed('vision', self._run_vision)
        self._prefix = {
            r: self._graphed('prefix', partial(self._run_prefix, r)) for r in self._buffers
        }

    @classmethod
    def load(
        cls,
        family: str,
        dims: PolicyDims,
        weights: Path,
        *,
        device: str,
        precision: str,
        max_rows: int,
        use_cuda_graphs: bool,
    ) -> TorchEngine:
        """Build the network from a bundle's weights file, straight onto the device.

        Args:
            family, dims: what the weights are.
            weights: safetensors file with the network's own parameter names, any float dtype.
            device: `cpu`, `cuda` or `cuda:N`.
            precision: a key of `PRECISIONS`.
            max_rows, use_cuda_graphs: as for the constructor.

        Raises:
            ValueError: unknown device or precision, no CUDA here, not enough memory, or weights
                that do not fit the dimensions.
        """
        if precision not in PRECISIONS:
            raise ValueError(
                f"precision '{precision}' is unknown; known are: {', '.join(PRECISIONS)}"
            )
        target = _device(device)
        with torch.device('meta'):
            network = policy_network(family, dims)
        try:
            # One tensor at a time in its final dtype: never a second copy of all weights.
            matrices = matrix_names(network)
            with safe_open(weights, framework='pt', device=str(target)) as file:
                state = {
                    name: file.get_tensor(name).to(
                        PRECISIONS[precision] if name in matrices else torch.float32
                    )
                    for name in file.keys()  # noqa: SIM118  (safe_open is no mapping)
                }
            _assign_weights(network, state, weights)
            return cls(network, max_rows=max_rows, use_cuda_graphs=use_cuda_graphs)
        except RuntimeError as error:
            if 'memory' not in str(error):
                raise
            raise ValueError(
                f"device '{device}': not enough memory for {weights} in {precision} and its "
                f'buffers; choose a smaller precision or another device. {error}'
            ) from error

    @property
    def cuda_graph(self) -> Mapping[str, str]:
        return {
            'vision': self._vision.status,
            'prefix': self._prefix[self._rows].status,
            'denoise': self._denoise.status if self._schedule else 'eager',
        }

    @torch.inference_mode()
    def set_schedule(self, times: np.ndarray, dt: float) -> None:
        key = (*map(float, times), dt)
        schedule = self._schedules.pop(key, None)
        if schedule is None:
            schedule = _Schedule(times, dt, self._network, self._device)
            for rows in self._buffers:
                work = partial(self._run_steps, schedule, rows)
                schedule.denoise[rows] = self._graphed('denoise', work)
        self._schedules[key] = self._schedule = schedule
        if len(self._schedules) > _SCHEDULES_KEPT:
            del self._schedules[next(iter(self._schedules))]

    @torch.inference_mode()
    def encode_image(self, camera: int, pixels: np.ndarray) -> None:
        self._pixels.copy_(torch.from_numpy(pixels)[None])
        self._vision()
        self._image_tokens[camera].copy_(self._encoded[0])

    @torch.inference_mode()
    def encode_prefix(
        self, image_mask: np.ndarray, tokens: np.ndarray, token_mask: np.ndarray
    ) -> None:
        self._rows = tokens.shape[0]
        rows = self._buffers[self._rows]
        self._image_mask.copy_(torch.from_numpy(image_mask))
        rows.tokens.copy_(torch.from_numpy(tokens))
        rows.token_mask.copy_(torch.from_numpy(token_mask))
        self._prefix[self._rows]()

    def use_prefix(self, rows: int) -> None:
        self._rows = rows

    @torch.inference_mode()
    def load_step_inputs(self, inputs: StepInputs) -> None:
        schedule, rows = self._require_schedule(), self._buffers[self._rows]
        self._noise.copy_(torch.from_numpy(inputs.x)[None])
        self._x.copy_(self._noise)
        self._plan.copy_(torch.from_numpy(inputs.plan)[None])
        schedule.plan_weight.copy_(torch.from_numpy(inputs.plan_weight)[:, None, :, None])
        rows.row_weight.copy_(torch.from_numpy(inputs.row_weight))
        if rows.state is not None:
            if inputs.state is None:
                raise ValueError('this policy has a state token: StepInputs.state is missing')
            rows.state.copy_(torch.from_numpy(inputs.state))

    @torch.inference_mode()
    def step(self, index: int) -> None:
        self._run_step(self._require_schedule(), self._rows, index)

    @torch.inference_mode()
    def run_steps(self) -> None:
        self._denoise()

    def read_x(self) -> np.ndarray:
        return self._x[0].cpu().numpy().copy()

    def read_velocity(self) -> np.ndarray:
        return self._buffers[self._rows].velocity.cpu().numpy().copy()

    def synchronize(self) -> None:
        if self._device.type == 'cuda':
            torch.cuda.synchronize(self._device)

    def close(self) -> None:
        # Graphs first: they replay on the addresses of everything below.
        for name in ('_vision', '_prefix', '_schedule', '_schedules', '_capturers', '_buffers'):
            setattr(self, name, None)
        for name in ('_network', '_prefix_encoder', '_expert_step'):
            setattr(self, name, None)
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                setattr(self, name, None)
        if self._device.type == 'cuda':
            torch.cuda.empty_cache()

    def _graphed(self, network: str, work: Work) -> GraphedWork:
        return GraphedWork(work, self._capturers[network])

    @property
    def _denoise(self) -> GraphedWork:
        return self._require_schedule().denoise[self._rows]

    def _require_schedule(self) -> _Schedule:
        if self._schedule is None:
            raise RuntimeError('set_schedule must be called before denoising')
        return self._schedule

    def _run_vision(self) -> None:
        self._encoded.copy_(self._network.vision(self._pixels))

    def _run_prefix(self, count: int) -> None:
        rows = self._buffers[count]
        past_key, past_value, prefix_mask = self._prefix_encoder(
            self._image_tokens, self._image_mask, rows.tokens, rows.token_mask
        )
        rows.past_key.copy_(past_key)
        rows.past_value.copy_(past_value)
        rows.prefix_mask.copy_(prefix_mask)

    def _run_steps(self, schedule: _Schedule, count: int) -> None:
        # From the noise buffer, so that running twice (warm-up before a capture) changes nothing.
        self._x.copy_(self._noise)
        for index in range(len(schedule.times)):
            self._run_step(schedule, count, index)

    def _run_step(self, schedule: _Schedule, count: int, index: int) -> None:
        rows = self._buffers[count]
        x_next, velocity = self._expert_step(
            self._x,
            rows.past_key,
            rows.past_value,
            rows.prefix_mask,
            schedule.table[index : index + 1],
            schedule.times[index],
            schedule.dt,
            rows.row_weight,
            self._plan,
            schedule.plan_weight[index],
            rows.state,
        )
        self._x.copy_(x_next)
        rows.velocity.copy_(velocity)


def _assign_weights(network: FlowPolicy, state: Mapping[str, Tensor], weights: Path) -> None:
    try:
        network.load_state_dict(state, assign=True)
    except RuntimeError as error:
        raise ValueError(
            f'{weights}: does not fit the dimensions in policy.yaml: {error}'
        ) from error


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device '{name}' is unknown; use cpu, cuda or cuda:N") from error
    if device.type not in ('cpu', 'cuda') or (device.type == 'cpu' and device.index):
        raise ValueError(f"device '{name}' is not supported; use cpu, cuda or cuda:N")
    if device.type == 'cuda':
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if count <= (device.index or 0):
            raise ValueError(
                f"device '{name}': PyTorch {torch.__version__} sees {count} CUDA devices here; "
                'check the driver (nvidia-smi) and that PyTorch is a CUDA build, or use cpu'
            )
    return device
