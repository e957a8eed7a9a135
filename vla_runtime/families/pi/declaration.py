"""pi0 (arXiv 2410.24164) and pi0.5 (arXiv 2504.16054): PaliGemma and an action expert."""

from __future__ import annotations

from vla_runtime.families.blocks.dimensions import LIMITS
from vla_runtime.families.blocks.flow_time import ActionTimeTable
from vla_runtime.families.pi.dimensions import PI0, PI05, PiDims
from vla_runtime.families.pi.time_table import Pi05TimeTable
from vla_runtime.family.declaration import Family, no_inputs, prompt_inputs, state_input
from vla_runtime.family.performance_figures import Kernels, PerformanceFigures, vla_cpp_runs
from vla_runtime.processing.prompt_layout import PromptLayout

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
        limits=LIMITS,
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
        limits=LIMITS,
        templates={'pi0': _LINE},
        prefix_inputs=prompt_inputs,
        head_inputs=state_input,
        time_table=ActionTimeTable,
        cuts_padding=True,
        figures={'pi0': _PI0_FIGURES},
    ),
)
