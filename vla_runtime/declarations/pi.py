"""pi0 (arXiv 2410.24164) and pi0.5 (arXiv 2504.16054): PaliGemma and an action expert."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np

from vla_runtime.family.declaration import Family, no_inputs, prompt_inputs, state_input
from vla_runtime.family.dimensions import (
    DecoderDims,
    Part,
    VisionDims,
    check_stacks,
    check_vision,
    size,
)
from vla_runtime.family.flow_time import ActionTimeTable, layer_rows, silu, time_embedding
from vla_runtime.family.performance_figures import Kernels, PerformanceFigures, vla_cpp_runs
from vla_runtime.files.safetensors_reader import SafetensorsReader
from vla_runtime.processing.prompts import PromptLayout

# --------------------------------------------------------------------------------------------------
# The sizes of pi0 and pi0.5: one dataclass, presets for the published models. Pure numbers.


@dataclass(frozen=True)
class PiDims:
    """All that fixes the shapes of a pi0 or pi0.5 policy.

    The expert shares depth, heads and head_dim with the language model, because one attention runs
    over the keys of both. `state_dim` is that of pi0's state token; 0 for pi0.5.
    """

    vision: VisionDims
    language: DecoderDims
    expert: Annotated[DecoderDims, Part('expert.', kv_heads_of='language')]
    vocabulary: Annotated[int, size('language.embedding.weight')]
    cameras: int
    prompt_length: int
    horizon: int
    action_dim: Annotated[int, size('action_in.weight', axis=1, stated='action dimensions')]
    state_dim: Annotated[
        int, size('state_projection.weight', axis=1, absent=0, stated='state dimensions')
    ] = 0

    def __post_init__(self) -> None:
        check_vision(self.vision)
        check_stacks(self.language, self.expert)

    @property
    def image_size(self) -> int:
        return self.vision.image_size

    @property
    def prefix_length(self) -> int:
        """P: image tokens of all cameras, then prompt tokens."""
        return self.cameras * self.vision.tokens + self.prompt_length


_SO400M = VisionDims(
    width=1152, depth=27, num_heads=16, mlp_dim=4304, patch_size=14, image_size=224
)
_GEMMA_2B = DecoderDims(
    width=2048, depth=18, mlp_dim=16384, num_heads=8, num_kv_heads=1, head_dim=256
)
_GEMMA_300M = replace(_GEMMA_2B, width=1024, mlp_dim=4096)

PI05 = PiDims(
    vision=_SO400M,
    language=_GEMMA_2B,
    expert=_GEMMA_300M,
    vocabulary=257152,
    cameras=3,
    prompt_length=200,
    horizon=50,
    action_dim=32,
)
PI0 = replace(PI05, prompt_length=48, state_dim=32)


# --------------------------------------------------------------------------------------------------
# The expert's time conditioning in numpy, equal to `FlowNetwork.time_conditioning`: one row a flow
# time.


class Pi05TimeTable:
    """pi0.5's time table: every norm's modulation, in the order in which they run."""

    def __init__(self, dims: PiDims, weights: SafetensorsReader) -> None:
        self._width, self._weights = dims.expert.width, weights
        norms = [
            f'blocks.{i}.{norm}'
            for i in range(dims.expert.depth)
            for norm in ('input_norm', 'post_norm')
        ]
        self._modulations = [f'expert.{norm}.modulation' for norm in (*norms, 'norm')]

    @property
    def width(self) -> int:
        return sum(self._weights.shape(f'{name}.weight')[0] for name in self._modulations)

    def __call__(self, times: np.ndarray) -> np.ndarray:
        embedded = time_embedding(times, self._width)
        for name in ('time_in', 'time_out'):
            embedded = silu(layer_rows(embedded, self._weights, name))
        return np.concatenate(
            [layer_rows(embedded, self._weights, name) for name in self._modulations], axis=1
        )


# --------------------------------------------------------------------------------------------------

_LINE = PromptLayout('{task}\n')

_PI05_FIGURES = PerformanceFigures(
    kernels={
        'torch': Kernels(vision=306, prefix=339, step=412, inputs=8),
        'triton': Kernels(vision=306, prefix=338, step=155, inputs=8),
    },
    runs=vla_cpp_runs({'rtx-5090': (56.1, 11.4)}),
)
_PI0_FIGURES = PerformanceFigures(
    runs=vla_cpp_runs(
        {
            'agx-orin': (580.22, 177.96),
            'orin-nano': (1484.75, 300.92),
            'rtx-3060': (261.58, 49.94),
            'rtx-5090': (52.1, 11.6),
        }
    )
)

FAMILIES = (
    Family(
        name='pi05',
        title='pi0.5 (arXiv 2504.16054)',
        head='flow',
        dims=PiDims,
        presets={'pi05': PI05},
        templates={
            # openpi and LeRobot. The state is not in the prompts of every checkpoint: LeRobot then
            # writes `pi05`, openpi (`discrete_state_input=False`, as in pi05_libero) `pi0`.
            'pi05_state': PromptLayout(
                'Task: {task}, State: {state};\n{tag}Action: ', lerobot_task='cleaned'
            ),
            'pi05': PromptLayout('Task: {task};\n{tag}Action: ', lerobot_task='cleaned'),
            'pi0': _LINE,
        },
        prefix_inputs=prompt_inputs,
        head_inputs=no_inputs,
        time_table=Pi05TimeTable,
        cuts_padding=True,
        figures={'pi05': _PI05_FIGURES},
    ),
    Family(
        name='pi0',
        title='pi0 (arXiv 2410.24164)',
        head='flow',
        dims=PiDims,
        presets={'pi0': PI0},
        templates={'pi0': _LINE},
        prefix_inputs=prompt_inputs,
        head_inputs=state_input,
        time_table=ActionTimeTable,
        cuts_padding=True,
        figures={'pi0': _PI0_FIGURES},
    ),
)
