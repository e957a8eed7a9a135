"""SmolVLA (arXiv 2506.01844): half of SmolVLM2 and an action expert that reads its keys."""

from __future__ import annotations

from vla_runtime.families.blocks.flow_time import ActionTimeTable
from vla_runtime.families.smolvla.dimensions import LIMITS, SMOLVLA, SmolVlaDims
from vla_runtime.family.declaration import Family, RowInput, no_inputs, prompt_inputs, state_input
from vla_runtime.family.performance_figures import Kernels, PerformanceFigures, vla_cpp_runs
from vla_runtime.processing.prompts import PromptLayout


def _prefix_inputs(dims: SmolVlaDims) -> dict[str, RowInput]:
    return prompt_inputs(dims) | state_input(dims)


_SMOLVLA_FIGURES = PerformanceFigures(
    kernels={
        'torch': Kernels(vision=142, prefix=381, step=362, inputs=8),
        'triton': Kernels(vision=142, prefix=399, step=140, inputs=8),
    },
    runs=vla_cpp_runs(
        {
            'agx-orin': (205.95, 109.44),
            'orin-nano': (509.60, 284.03),
            'rtx-3060': (99.31, 42.94),
            'rtx-5090': (49.6, 16.1),
        }
    ),
)

FAMILIES = (
    Family(
        name='smolvla',
        title='SmolVLA (arXiv 2506.01844)',
        head='flow',
        dims=SmolVlaDims,
        presets={'smolvla': SMOLVLA},
        limits=LIMITS,
        templates={'task_line': PromptLayout('{task}\n', bos=False)},
        prefix_inputs=_prefix_inputs,
        head_inputs=no_inputs,
        time_table=ActionTimeTable,
        cuts_padding=True,
        figures={'smolvla': _SMOLVLA_FIGURES},
    ),
)
