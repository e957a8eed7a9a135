"""The seeded inputs that exported networks are compared on, and what PyTorch makes of them.

Prompts of several lengths (each row its own), hidden cameras, guidance scales and committed plans.
PyTorch computes in float32 whatever the files' precision, one network at a time: the weights of
vision, prefix and expert are never in memory together.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from vla_runtime.bundle.schema import BundleSpec
from vla_runtime.engines.onnx.files import PREFIX_OUTPUTS, ROWS
from vla_runtime.export.onnx.export import meta_network
from vla_runtime.export.onnx.weights import BundleWeights
from vla_runtime.export.receipt import SEED
from vla_runtime.families.engine_networks import ExpertStep, PrefixEncoder
from vla_runtime.inference.denoise import flow_times
from vla_runtime.inference.guidance import row_weights
from vla_runtime.inference.noise import chunk_noise
from vla_runtime.inference.real_time_chunking import plan_weights

# Guidance scale, and how the chunk is tied to a plan, of each case of one number of rows.
_SETTINGS = ((1.5, None), (2.5, 'exp'), (1.0, 'linear'))
# Size of the change that the gain is measured with.
_NUDGE = 1e-4
_PARTS = {
    'vision': ('vision.',),
    'prefix': ('language.',),
    'expert': ('expert.', 'action_', 'state_', 'time_'),
}


@dataclass
class Case:
    """One inference: inputs, and PyTorch's outputs as they are computed.

    Attributes:
        words: what is particular about it, for the receipt.
        pixels: (V, 3, S, S); image_mask: (V,); tokens, token_mask: (R, L).
        x: (1, H, A) noise; row_weight: (R,); plan: (1, H, A); plan_weight: (N, 1, H, 1).
        state: (R, S) for pi0.
        reference: `image_tokens` (V, N, W); `past_key`, `past_value` (layers, R, kv_heads, P, D);
            `prefix_mask` (R, P); `trace`, x before every step and after the last,
            (N + 1, 1, H, A); `velocity` (N, R, H, A); `gain` (), how many times a small change of
            the noise is larger in the chunk.
    """

    words: dict[str, object]
    pixels: np.ndarray
    image_mask: np.ndarray
    tokens: np.ndarray
    token_mask: np.ndarray
    x: np.ndarray
    row_weight: np.ndarray
    plan: np.ndarray
    plan_weight: np.ndarray
    state: np.ndarray | None
    reference: dict[str, np.ndarray] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        return len(self.tokens)


def seeded_cases(spec: BundleSpec) -> list[Case]:
    """The inputs for this policy's shapes, the same every time."""
    random = np.random.default_rng(SEED)
    return [
        _case(spec, random, rows, number, *_SETTINGS[number])
        for rows in ROWS
        for number in range(len(_SETTINGS))
    ]


def _case(
    spec: BundleSpec,
    random: np.random.Generator,
    rows: int,
    number: int,
    beta: float,
    schedule: str | None,
) -> Case:
    dims = spec.dims
    size, chunk = dims.vision.image_size, (1, dims.horizon, dims.action_dim)
    image_mask = np.ones(dims.cameras, dtype=bool)
    if number == 1 and dims.cameras > 1:
        image_mask[-1] = False
    # The first prompt fills its row; the others are padded, each row differently.
    lengths = random.integers(2, dims.prompt_length + 1, rows)
    if number == 0:
        lengths[0] = dims.prompt_length
    weight = np.zeros((spec.denoise_steps, dims.horizon), dtype=np.float32)
    if schedule:
        weight = plan_weights(
            flow_times(spec.denoise_steps),
            schedule=schedule,  # type: ignore[arg-type]
            delay=max(1, dims.horizon // 8),
            execution_horizon=max(1, dims.horizon // 2),
            horizon=dims.horizon,
            maximum=10.0,
        )
    return Case(
        words={
            'rows': rows,
            'prompt_tokens': [int(length) for length in lengths],
            'cameras_hidden': int((~image_mask).sum()),
            'beta': beta if rows == 2 else None,
            'plan': schedule,
        },
        pixels=random.uniform(-1, 1, (dims.cameras, 3, size, size)).astype(np.float32),
        image_mask=image_mask,
        tokens=random.integers(0, dims.vocabulary, (rows, dims.prompt_length)),
        token_mask=np.arange(dims.prompt_length) < lengths[:, None],
        x=chunk_noise(SEED, number, chunk[1:])[None],
        row_weight=row_weights(beta if rows == 2 else None),
        plan=random.normal(0, 0.5, chunk).astype(np.float32),
        plan_weight=weight[:, None, :, None],
        state=random.normal(size=(rows, dims.state_dim)).astype(np.float32)
        if dims.state_dim
        else None,
    )


class Reference:
    """PyTorch's float32 networks, one at a time.

    Args:
        spec: of the policy.
        weights: its weights.safetensors.
    """

    def __init__(self, spec: BundleSpec, weights: BundleWeights) -> None:
        self._spec = spec
        self._weights = weights
        self._network = meta_network(spec, torch.float32)

    def image_tokens(self, cases: list[Case]) -> None:
        """Add `image_tokens` to every case."""
        with self._loaded('vision'):
            for case in cases:
                tokens = [self._network.vision(torch.from_numpy(p)[None]) for p in case.pixels]
                case.reference['image_tokens'] = torch.cat(tokens).numpy()

    def prefixes(self, cases: list[Case]) -> None:
        """Add `past_key`, `past_value` and `prefix_mask`."""
        encoder = PrefixEncoder(self._network)
        with self._loaded('prefix'):
            for case in cases:
                outputs = encoder(
                    torch.from_numpy(case.reference['image_tokens']),
                    torch.from_numpy(case.image_mask),
                    torch.from_numpy(case.tokens),
                    torch.from_numpy(case.token_mask),
                )
                for name, value in zip(PREFIX_OUTPUTS, outputs, strict=True):
                    case.reference[name] = value.numpy()

    def chunks(self, cases: list[Case]) -> np.ndarray:
        """Add `trace`, `velocity` and `gain`; returns the time table (N, C)."""
        times = torch.tensor(flow_times(self._spec.denoise_steps), dtype=torch.float32)
        with self._loaded('expert'):
            table = torch.cat([self._network.time_conditioning(t[None]) for t in times])
            for case in cases:
                trace, velocity = self._denoise(case, times, table, torch.from_numpy(case.x))
                nudge = np.random.default_rng(SEED).normal(0, _NUDGE, case.x.shape)
                nudged, _ = self._denoise(
                    case, times, table, torch.from_numpy((case.x + nudge).astype(np.float32))
                )
                moved = (nudged[-1] - trace[-1]).abs().max()
                case.reference['trace'] = trace.numpy()
                case.reference['velocity'] = velocity.numpy()
                case.reference['gain'] = moved.numpy() / np.abs(nudge).max()
        return table.numpy()

    def _denoise(
        self, case: Case, times: Tensor, table: Tensor, x: Tensor
    ) -> tuple[Tensor, Tensor]:
        """x before every step and after the last, and all velocities, from one noise."""
        step = ExpertStep(self._network)
        past = [torch.from_numpy(case.reference[name]) for name in PREFIX_OUTPUTS]
        own = [torch.from_numpy(array) for array in (case.row_weight, case.plan)]
        state = None if case.state is None else torch.from_numpy(case.state)
        dt = torch.tensor(-1.0 / len(times))
        trace, velocities = [x], []
        for k, t in enumerate(times):
            weight = torch.from_numpy(case.plan_weight[k])
            x, velocity = step(x, *past, table[k : k + 1], t, dt, *own, weight, state)
            trace.append(x)
            velocities.append(velocity)
        return torch.stack(trace), torch.stack(velocities)

    @contextmanager
    def _loaded(self, part: str) -> Iterator[None]:
        """The numbers of one network, for as long as they are needed."""
        names = [name for name in self._weights.names if name.startswith(_PARTS[part])]
        self._assign({name: self._weights.read(name) for name in names})
        try:
            with torch.inference_mode():
                yield
        finally:
            empty = {name: torch.empty(self._weights.shape(name), device='meta') for name in names}
            self._assign(empty)

    def _assign(self, tensors: dict[str, Tensor]) -> None:
        self._network.load_state_dict(tensors, assign=True, strict=False)
