"""ACT (arXiv 2304.13705): action chunking with a transformer, without language."""

from __future__ import annotations

from vla_runtime.families.act.dimensions import ACT, LIMITS, ActDims
from vla_runtime.family.declaration import Family, NoTimes, no_inputs, state_input

FAMILIES = (
    Family(
        name='act',
        title='ACT (arXiv 2304.13705)',
        head='single',
        dims=ActDims,
        presets={'act': ACT},
        limits=LIMITS,
        templates={},
        prefix_inputs=state_input,
        head_inputs=no_inputs,
        time_table=NoTimes,
    ),
)
