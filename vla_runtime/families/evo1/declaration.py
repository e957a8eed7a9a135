"""Evo-1 (arXiv 2511.04555): InternVL3 and a cross-attention head, 0.78 billion parameters."""

from __future__ import annotations

from vla_runtime.families.evo1.dimensions import EVO1, LIMITS, Evo1Dims
from vla_runtime.families.evo1.time_table import TimeRows
from vla_runtime.family.declaration import Family, RowInput, no_inputs, prompt_inputs, state_input
from vla_runtime.family.performance_figures import PerformanceFigures, vla_cpp_runs
from vla_runtime.processing.prompt_layout import PromptLayout

# InternVL3's text around a user's images.
PROMPT = PromptLayout(
    '{images}{task}',
    image='Image-{number}: <img>{tokens}</img>\n',
    bos=False,
    special=('<img>', '</img>'),
    lerobot_task='stripped',
)


def _prefix_inputs(dims: Evo1Dims) -> dict[str, RowInput]:
    return prompt_inputs(dims) | state_input(dims)


_EVO1_FIGURES = PerformanceFigures(
    runs=vla_cpp_runs(
        {
            'agx-orin': (996.05, 696.21),
            'orin-nano': (3551.56, 2667.63),
            'rtx-3060': (486.74, 348.75),
            'rtx-5090': (55.2, 17.8),
        }
    )
)

FAMILIES = (
    Family(
        name='evo1',
        title='Evo-1 (arXiv 2511.04555)',
        head='flow',
        dims=Evo1Dims,
        presets={'evo1': EVO1},
        limits=LIMITS,
        templates={'after_images': PROMPT},
        prefix_inputs=_prefix_inputs,
        head_inputs=no_inputs,
        time_table=TimeRows,
        noise='uniform',
        figures={'evo1': _EVO1_FIGURES},
    ),
)
