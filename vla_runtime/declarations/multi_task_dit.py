"""Multi-Task DiT of LeRobot: CLIP's images and prompt, and a transformer that denoises actions.

One family was trained to take noise away, the other on a flow.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated, Literal

import numpy as np

from vla_runtime.family.declaration import (
    Family,
    RowInput,
    no_inputs,
    prompt_inputs,
    states_input,
)
from vla_runtime.family.dimensions import (
    HistoryDims,
    Shown,
    VisionDims,
    check_heads,
    check_vision,
    depth_of,
    size,
)
from vla_runtime.family.flow_time import layer_rows, linear_rows, silu, time_code_rows
from vla_runtime.family.noise_schedule import NoiseScheduler
from vla_runtime.files.safetensors_reader import SafetensorsReader
from vla_runtime.processing.prompts import PromptLayout
from vla_runtime.types import later

# --------------------------------------------------------------------------------------------------
# The sizes of Multi-Task DiT: one dataclass, a preset for LeRobot's usual model. Pure numbers.

# How a flow is followed: Euler's step, or the classical Runge-Kutta step of four velocities.
Integrator = Literal['euler', 'rk4']


@dataclass(frozen=True)
class TextDims:
    """CLIP's text transformer (arXiv 2103.00020), for prompts of at most `positions` tokens."""

    width: Annotated[int, size('embedding.weight', axis=1)]
    depth: Annotated[int, depth_of('blocks')]
    num_heads: int
    mlp_dim: Annotated[int, size('blocks.0.mlp.fc1.weight')]
    positions: Annotated[int, size('position_embedding')]

    def __post_init__(self) -> None:
        check_heads('text', self)


@dataclass(frozen=True)
class TransformerDims:
    """A transformer over a chunk's actions, modulated by time and observation.

    `rotary_base` None: no rotary positions; `learned_positions` are added to the actions.
    """

    width: Annotated[int, size('blocks.0.mlp.fc1.weight', axis=1)]
    depth: Annotated[int, depth_of('blocks')]
    num_heads: int
    mlp_dim: Annotated[int, size('blocks.0.mlp.fc1.weight')]
    time_width: Annotated[int, size('time2.weight')]
    rotary_base: float | None = None
    learned_positions: Annotated[bool, Shown(lambda shape: 'position_embedding' in shape)] = False

    def __post_init__(self) -> None:
        check_heads('transformer', self)
        if self.rotary_base is not None and (self.width // self.num_heads) % 2:
            raise ValueError(
                f'transformer: heads of {self.width // self.num_heads} numbers; rotary positions '
                'turn pairs of them'
            )
        if self.rotary_base is not None and self.rotary_base <= 1.0:
            raise ValueError(
                f'transformer.rotary_base {self.rotary_base} where a number above 1 is expected'
            )
        if self.time_width % 2 or self.time_width < 4:
            raise ValueError(
                f'transformer.time_width {self.time_width} where an even number of at least 4 is '
                'expected'
            )

    @property
    def modulation(self) -> int:
        """Numbers that modulate one block: shift, scale and gate of attention and MLP."""
        return 6 * self.width

    @property
    def modulations(self) -> int:
        """Numbers that modulate all blocks."""
        return self.depth * self.modulation


@dataclass(frozen=True)
class DitDims(HistoryDims):
    """All that fixes a Multi-Task DiT policy, but for what it was trained to denoise.

    Attributes:
        vision: CLIP's vision transformer; its image is what is left after resize and crop.
        state_dim: measured state of a step.
        separate_encoders: every camera has a vision transformer of its own.
    """

    vision: VisionDims
    text: TextDims
    text_width: Annotated[int, size('text.projection.weight')]
    transformer: TransformerDims
    image: tuple[int, int]
    vocabulary: Annotated[int, size('text.embedding.weight')]
    prompt_length: int
    cameras: int
    observation_steps: int
    horizon: int
    real_horizon: int
    action_dim: Annotated[int, size('transformer.action_out.weight', stated='action dimensions')]
    state_dim: int
    resize: tuple[int, int] | None = None
    crop: tuple[int, int] | None = None
    separate_encoders: bool = later(False)

    def __post_init__(self) -> None:
        check_vision(self.vision)
        self.check_history()
        edge = self.vision.image_size
        if self.seen != (edge, edge):
            raise ValueError(
                f'vision.image_size {edge}, but resize and crop leave images of {self.seen}'
            )
        if self.prompt_length > self.text.positions:
            raise ValueError(
                f'prompt_length {self.prompt_length} where the text transformer has positions for '
                f'{self.text.positions} tokens'
            )

    @property
    def step_width(self) -> int:
        """Numbers of a step of the observation: state, images, prompt."""
        return self.state_dim + self.own_cameras * self.vision.width + self.text_width

    @property
    def prefix_length(self) -> int:
        """P: the images and the states of all steps, and the prompt."""
        return self.cameras + self.observation_steps + self.prompt_length


@dataclass(frozen=True)
class MultiTaskDitDims(DitDims):
    """A policy that was trained to take noise away, with the scheduler of its training."""

    scheduler: NoiseScheduler = field(kw_only=True)


@dataclass(frozen=True)
class MultiTaskDitFlowDims(DitDims):
    """A policy that was trained on a flow, which `integrator` follows in its steps."""

    integrator: Integrator = 'euler'

    @property
    def stages(self) -> tuple[float, ...]:
        """Places of a step whose flow times the transformer sees."""
        return (0.0,) if self.integrator == 'euler' else (0.0, 0.5, 1.0)


# LeRobot's usual sizes, on CLIP ViT-B/16, with two cameras and an arm of 7 numbers.
_USUAL = DitDims(
    vision=VisionDims(
        width=768, depth=12, num_heads=12, mlp_dim=3072, patch_size=16, image_size=224
    ),
    text=TextDims(width=512, depth=12, num_heads=8, mlp_dim=2048, positions=77),
    text_width=512,
    transformer=TransformerDims(
        width=512, depth=6, num_heads=8, mlp_dim=2048, time_width=256, rotary_base=10000.0
    ),
    image=(256, 256),
    crop=(224, 224),
    vocabulary=49408,
    prompt_length=77,
    cameras=4,
    observation_steps=2,
    horizon=32,
    real_horizon=24,
    action_dim=7,
    state_dim=7,
)
USUAL = MultiTaskDitDims(
    **vars(_USUAL),
    scheduler=NoiseScheduler('ddpm', 100, 'squaredcos_cap_v2', 1e-4, 0.02, clip=1.0),
)
USUAL_FLOW = MultiTaskDitFlowDims(**vars(_USUAL))


# --------------------------------------------------------------------------------------------------
# Time tables of Multi-Task DiT: what a time adds to the modulations, in numpy.

_erf = np.vectorize(math.erf, otypes=[np.float64])


class TransformerTimes:
    """Rows of the modulations by the training step (see `MultiTaskDit.time_conditioning`)."""

    def __init__(self, dims: DitDims, weights: SafetensorsReader) -> None:
        self._transformer, self._weights = dims.transformer, weights

    @property
    def width(self) -> int:
        return self._transformer.modulations

    def __call__(self, times: np.ndarray) -> np.ndarray:
        width = self._transformer.time_width
        seen = silu(self.features(times))
        parts = []
        for block in range(self._transformer.depth):
            weight = self._weights.read(f'transformer.blocks.{block}.modulation.weight')[:, :width]
            parts.append(linear_rows(seen, weight, np.zeros(len(weight), np.float32)))
        return np.concatenate(parts, axis=1)

    def features(self, times: np.ndarray) -> np.ndarray:
        """Return the time features (N, time_width) of training steps (N,)."""
        x = time_code_rows(times, self._transformer.time_width)
        for name in ('transformer.time1', 'transformer.time2'):
            x = gelu(layer_rows(x, self._weights, name))
        return x


class FlowTimes(TransformerTimes):
    """Rows of the modulations by the flow time, which the transformer counts from the noise on."""

    def __call__(self, times: np.ndarray) -> np.ndarray:
        return super().__call__(np.float32(1.0) - np.asarray(times, np.float32))


def gelu(x: np.ndarray) -> np.ndarray:
    """GELU in its exact form (arXiv 1606.08415), in float64."""
    wide = x.astype(np.float64)
    found: np.ndarray = (0.5 * wide * (1.0 + _erf(wide / math.sqrt(2.0)))).astype(np.float32)
    return found


# --------------------------------------------------------------------------------------------------


def _prefix_inputs(dims: DitDims) -> dict[str, RowInput]:
    return prompt_inputs(dims) | states_input(dims)


_TEMPLATES = {'clip': PromptLayout('{task}', closing='<|endoftext|>')}

FAMILIES = (
    Family(
        name='multi_task_dit',
        title='Multi-Task DiT (LeRobot)',
        head='diffusion',
        dims=MultiTaskDitDims,
        presets={'multi_task_dit': USUAL},
        templates=_TEMPLATES,
        prefix_inputs=_prefix_inputs,
        head_inputs=no_inputs,
        time_table=TransformerTimes,
        flow_steps=100,
    ),
    Family(
        name='multi_task_dit_flow',
        title='Multi-Task DiT, flow matching (LeRobot)',
        head='flow',
        dims=MultiTaskDitFlowDims,
        presets={'multi_task_dit_flow': USUAL_FLOW},
        templates=_TEMPLATES,
        prefix_inputs=_prefix_inputs,
        head_inputs=no_inputs,
        time_table=FlowTimes,
        flow_steps=100,
    ),
)
