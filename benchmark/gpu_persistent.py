"""Denoise steps of pi0.5 with the expert in one persistent kernel, and in eight a layer, on a GPU.

    python benchmark/gpu_persistent.py --json gpu_persistent.json

pi0.5's expert at its published size with random weights in bfloat16, over random keys and values of
three views. First each layer is compared as at load (`layer_comparison`), for one prompt row and
two. Then ten steps in a captured graph are timed by turns: today's kernels, the persistent one, and
both in other tiles. Of the persistent kernel each phase's share is measured by the multiprocessors'
clocks. `--jobs` processes compile ahead.

A form whose numbers are wrong, or whose programs wait in vain, is said to be WRONG. The table is
last. OUT is written after each part; nothing begins after the budget, and half a minute after it
the process ends.

Exit code: 0, 1 where a form was wrong, 2 without a GPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / 'benchmark')]

from parts.gpu_run import (  # noqa: E402
    PACKAGES,
    Clock,
    OverTimeError,
    described,
    described_parser,
    device_facts,
    device_fault,
    ended_after,
    limited,
)

VIEWS, STEPS, ROUNDS = 3, 10, 20
BUDGET_S, LAST_S, FORM_S = 130.0, 30.0, 25.0
# Of a share that has no tile, at most.
IDLE_CYCLES = 400
PHASES = ('norm', 'project', 'attend', 'combine', 'out', 'norm 2', 'gate', 'down')
Tiles = dict[str, Any]


class Form(NamedTuple):
    """A form of the expert: its class's module, rows of the prompt, constants of the module."""

    module: str
    rows: int
    tiles: Tiles

    @property
    def name(self) -> str:
        """Name for people."""
        words = [f'{key} {value}' for key, value in self.tiles.items()]
        return f'{self.module}, {self.rows} row(s)' + ''.join(f', {word}' for word in words)


EIGHT, ONE = 'triton_expert', 'triton_persistent'
CLASSES = {EIGHT: 'TritonExpert', ONE: 'PersistentExpert'}


def multiplied(warps: int, stages: int) -> Tiles:
    """Warps and stages of today's products."""
    return {'MULTIPLIED': {'num_warps': warps, 'num_stages': stages}}


# In the order of their worth: what does not fit in the time is last.
TILES: dict[str, list[Tiles]] = {
    ONE: [
        {},
        {'FETCH': 0},
        {'FETCH': 2},
        {'INNER': 128, 'STAGES': 4},
        {'INNER': 128, 'STAGES': 5},
        {'INNER': 128, 'STAGES': 4, 'WARPS': 4},
        {'WARPS': 4},
        {'COOPERATIVE': False},
        {'OUT_OUTPUTS': 32, 'OUT_INPUTS': 512},
        {'DOWN_OUTPUTS': 32, 'DOWN_INPUTS': 1024},
        {'DOWN_OUTPUTS': 128, 'DOWN_INPUTS': 256, 'OUT_OUTPUTS': 128, 'OUT_INPUTS': 128},
        {'PART': 128},
        {'PART': 256},
        {'KEYS': 64, 'KEY_STAGES': 1},
        {'PER_MULTIPROCESSOR': 2, 'WARPS': 4, 'GATE_PAIRS': 16, 'DOWN_OUTPUTS': 32},
        {'HEAD_PAIRS': 32},
        {'COMBINED': 8},
        {'INNER': 256, 'STAGES': 3},
    ],
    EIGHT: [
        {},
        {'OUTPUTS': 64, 'PART_INPUTS': 256},
        {'OUTPUTS': 64},
        {'INNER': 128, **multiplied(4, 4)},
        {'INNER': 128, **multiplied(8, 4)},
        multiplied(8, 6),
        {'PART': 128},
        {'HEAD_PAIRS': 32},
        {'PART_INPUTS': 1024},
    ],
}
TWO_ROWS: list[Form] = [
    Form(EIGHT, 2, {}),
    Form(ONE, 2, {}),
    Form(ONE, 2, {'ROWS': 64}),
    Form(ONE, 2, {'INNER': 128, 'STAGES': 3}),
]


def forms(quick: bool) -> list[Form]:
    """Return the forms to be measured, today's and the persistent one first."""
    count = 1 if quick else max(map(len, TILES.values()))
    found = [
        Form(module, 1, TILES[module][place])
        for place in range(count)
        for module in (EIGHT, ONE)
        if place < len(TILES[module])
    ]
    return [*found[:2], *TWO_ROWS[: 2 if quick else None], *found[2:]]


class Steps:
    """Denoise steps of a network whose expert alone has its published size.

    Args:
        device: device that they run on.
        size: size of `random_policy`.
        depth: layers of the expert; None: all.
    """

    def __init__(self, device: str, size: str, depth: int | None = None) -> None:
        import torch
        from parts.random_policy import random_network, sized_dims

        dims = sized_dims('pi05', size, VIEWS)
        depth = depth or dims.expert.depth
        dims = replace(
            dims,
            vision=replace(dims.vision, depth=1),
            # Both have the same depth and heads.
            language=replace(dims.language, width=64, mlp_dim=64, depth=depth),
            expert=replace(dims.expert, depth=depth),
            vocabulary=400,
        )
        # Triton's interpreter multiplies no bfloat16.
        self.precision = 'float32' if device == 'cpu' else 'bfloat16'
        network = random_network('pi05', dims, device, self.precision)
        self.device, self.dims = device, dims
        self.dtype = network.expert.layers[0].mlp.gate.dtype
        self._fused: Any = network.fused(static_shapes=True)
        generator = torch.Generator(device).manual_seed(5)
        draw = partial(torch.randn, generator=generator, device=device)
        shape = (depth, 2, dims.expert.num_kv_heads, dims.prefix_length, dims.expert.head_dim)
        self._keys, self._values = (draw(shape).to(self.dtype) for _ in range(2))
        self._noise = draw(1, dims.horizon, dims.action_dim)
        self._plan_weight = torch.zeros(1, dims.horizon, 1, device=device)

    @contextmanager
    def in_form(self, form: Form) -> Iterator[Any]:
        """The fused network with its expert in a form, whose constants hold meanwhile."""
        from importlib import import_module

        module = import_module(f'vla_runtime.families.blocks.{form.module}')
        self._fused.expert_type = getattr(module, CLASSES[form.module])
        # Without any of its own nothing would be patched.
        tiles = {'ROWS': module.ROWS, **form.tiles}
        with mock.patch.multiple(module, **tiles):
            yield self._fused

    def work_of(
        self, fused: Any, rows: int, count: int | None = None
    ) -> tuple[Any, Callable[[], Any]]:
        """Return the expert over a prefix, and what runs the first steps over it; None: all."""
        import torch

        from vla_runtime.families.flow_step import DenoiseStep
        from vla_runtime.inference.denoise import flow_times

        mask = torch.ones(rows, self.dims.prefix_length, dtype=torch.bool, device=self.device)
        # Rows of different lengths.
        mask[-1, -3:] = False
        past = {'past_key': self._keys[:, :rows], 'past_value': self._values[:, :rows]}
        expert = fused.prepare_prefix({**past, 'prefix_mask': mask}, 1)
        times = torch.tensor(flow_times(STEPS), dtype=torch.float32, device=self.device)
        steps = [
            (t, fused.split_conditioning(fused.time_conditioning(t[None]))) for t in times[:count]
        ]
        dt = torch.tensor(-1.0 / STEPS, device=self.device)
        weights = torch.tensor([1.0] if rows == 1 else [2.0, -1.0], device=self.device)
        step, plan = DenoiseStep(fused), torch.zeros_like(self._noise)

        def run() -> Any:
            x = self._noise
            for t, conditioning in steps:
                x, _ = step(x, expert, conditioning, t, dt, weights, plan, self._plan_weight, {})
            return x

        return expert, run


def compare(steps: Steps, form: Form) -> str:
    """Compare each layer as at load; return what is wrong in words, or an empty text."""
    from vla_runtime.families.blocks.layer_comparison import (
        ComparedExpert,
        LayerError,
        worst_fault,
    )

    errors: list[LayerError] = []
    with steps.in_form(form) as fused:
        fused.expert_type = partial(ComparedExpert, fused.expert_type, errors)
        _, run = steps.work_of(fused, form.rows, 1)
        run()
    assert len(errors) > steps.dims.expert.depth
    return worst_fault(errors)


class Captured:
    """A form's steps in a graph.

    Attributes:
        chunk: the result, (1, H, A), of the last replay.
        failed: stage + 1 where a program waited in vain, else 0.
        phases: of each phase, microseconds of a layer: the longest share of a program, the median
            share, and the median wait before; empty where they are not noted.
    """

    def __init__(self, steps: Steps, form: Form) -> None:
        import torch

        with steps.in_form(form) as fused:
            self._expert, run = steps.work_of(fused, form.rows)
            self.replay: Callable[[], Any] = run
            self.chunk = run()
            if steps.device != 'cpu':
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    self.chunk = run()
                self.replay = graph.replay

    @property
    def failed(self) -> int:
        """See the class."""
        return int(getattr(self._expert, '_failed', 0))

    def phases(self, clock_ghz: float) -> dict[str, list[float]]:
        """See the class."""
        expert = self._expert
        noted = expert._clocks.view(expert._stages, expert._programs, 2).cpu().numpy()
        begin, end = noted[..., 0], noted[..., 1]
        share, wait = end - begin, np.zeros_like(begin)
        wait[1:] = begin[1:] - end[:-1]
        found = {}
        for place, name in enumerate(PHASES):
            # Without the first layer, which waits for nothing.
            of_phase = slice(place + len(PHASES), len(begin) - 1, len(PHASES))
            # Programs without a tile do not wait.
            busy = np.where(share[of_phase] > IDLE_CYCLES, 1.0, np.nan)
            own, before = share[of_phase] * busy, wait[of_phase] * busy
            cycles = [np.nanmax(own, 1), np.nanmedian(own, 1)]
            cycles += [np.nanmin(before, 1), np.nanmedian(before, 1)]
            found[name] = [float(np.nanmedian(one)) / clock_ghz / 1e3 for one in cycles]
        return found


def compile_ahead(device: str, size: str, some: Sequence[Form]) -> None:
    """Run forms once with a single layer, which leaves what was compiled in Triton's cache."""
    import torch

    with torch.inference_mode():
        steps = Steps(device, size, depth=1)
        for form in some:
            try:
                with steps.in_form(form) as fused:
                    steps.work_of(fused, form.rows)[1]()
                    torch.cuda.synchronize()
            except Exception:
                # Said when its turn comes.
                continue


def measure(steps: Steps, some: Sequence[Form], clock: Clock, keep: Callable[..., None]) -> None:
    """Compare and capture every form, then time all by turns; `keep` takes what is found."""
    import torch
    from parts.measurement import in_turn

    captured: dict[str, Captured] = {}
    reference: dict[int, Any] = {}
    for form in some:
        try:
            with limited(max(1.0, min(FORM_S, clock.left_s))):
                one = Captured(steps, form)
                one.replay()
                first = one.chunk.clone()
                one.replay()
                fault = '' if torch.equal(first, one.chunk) else 'two replays differ; '
                if not form.tiles:
                    fault += compare(steps, form)
        except OverTimeError as error:
            keep(form.name, left_out=str(error))
            continue
        except Exception as error:
            # Tiles that share too much memory.
            keep(form.name, left_out=described(error))
            continue
        expected = reference.setdefault(form.rows, first)
        off = float((first - expected).abs().max() / expected.abs().max())
        # As of any two forms in bfloat16, whose roundings differ.
        if not off < 0.03:
            fault += f'its chunk is off by {off:.1e}; '
        if one.failed:
            fault += f'a program waited in vain in stage {one.failed - 1}'
        keep(form.name, form=form._asdict(), fault=fault, off=off)
        clock.say(f'{form.name}: off {off:.1e} {fault and "WRONG " + fault}')
        if not fault:
            captured[form.name] = one
    if steps.device == 'cpu':
        return
    times: dict[str, list[float]] = {name: [] for name in captured}
    for round_ in range(ROUNDS):
        if clock.left_s < 0:
            break
        for name in in_turn([*captured], round_):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            captured[name].replay()
            begin.record()
            captured[name].replay()
            end.record()
            torch.cuda.synchronize()
            times[name].append(begin.elapsed_time(end))
    for name, taken in times.items():
        keep(name, ms=float(np.median(taken)), best_ms=min(taken), samples=len(taken))


def measure_phases(steps: Steps, keep: Callable[..., None]) -> None:
    """Note the phases of the persistent kernel; both ways of the weights."""
    import torch

    for tiles in _noted():
        form = Form(ONE, 1, {**tiles, 'NOTED': True})
        one = Captured(steps, form)
        for _ in range(20):
            one.replay()
        torch.cuda.synchronize()
        # The highest clock, which scales all alike.
        ghz = getattr(torch.cuda.get_device_properties(0), 'clock_rate', 1.98e6) / 1e6
        keep(form.name, clock_ghz=ghz, phases=one.phases(ghz))


def show(found: dict[str, dict[str, Any]]) -> None:
    """Print the phases, and each form with its time, the fastest first."""
    for name, one in found.items():
        if 'phases' in one:
            print(f'{name}: us of a layer at {one["clock_ghz"]:.2f} GHz')
            print('   phase     longest   median   least wait   median wait')
            for phase, (most, median, least, wait) in one['phases'].items():
                print(f'   {phase:8s}{most:9.2f}{median:9.2f}{least:13.2f}{wait:14.2f}')
    for name, one in found.items():
        if 'left_out' in one:
            print(f'left out: {name}: {one["left_out"]}')
        elif one.get('fault'):
            print(f'WRONG: {name}: {one["fault"]}')
    for name, one in sorted(found.items(), key=lambda item: item[1].get('ms', np.inf)):
        if 'ms' in one:
            print(f'{one["ms"]:8.3f} ms (best {one["best_ms"]:.3f})  off {one["off"]:.1e}  {name}')


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and write; see the module for the exit code."""
    arguments = _arguments(argv)
    clock = Clock(arguments.budget_s)
    with ended_after(arguments.budget_s + LAST_S):
        return _run(arguments, clock)


def _run(arguments: argparse.Namespace, clock: Clock) -> int:
    if reason := device_fault(arguments.device):
        print(f'error: {reason}', file=sys.stderr)
        return 2
    import torch
    from parts.measurement import write_result

    from vla_runtime.processes.workers import workers

    some, of_size = forms(arguments.quick), (arguments.device, arguments.size)
    found: dict[str, dict[str, Any]] = {}
    figures = {'device': device_facts(arguments.device), 'forms': found, 'complete': False}

    def keep(name: str, **values: Any) -> None:
        found.setdefault(name, {}).update(values)
        if arguments.json:
            write_result('gpu_persistent', figures, PACKAGES, arguments.json)

    if arguments.jobs:
        noted = [Form(ONE, 1, {**tiles, 'NOTED': True}) for tiles in _noted()]
        every = [*noted, *some]
        with workers(arguments.jobs) as submit:
            for one in [
                submit(compile_ahead, *of_size, every[first :: arguments.jobs])
                for first in range(arguments.jobs)
            ]:
                one.result()
        clock.say('compiled')
    with torch.inference_mode():
        steps = Steps(*of_size)
        clock.say('random weights are drawn')
        if arguments.device != 'cpu':
            try:
                measure_phases(steps, keep)
            except Exception as error:
                keep('phases', left_out=described(error))
        measure(steps, some, clock, keep)
    figures['complete'] = True
    keep('all')
    show(found)
    return 1 if any(one.get('fault') for one in found.values()) else 0


def _noted() -> list[Tiles]:
    return [{}, {'FETCH': 0}, {'INNER': 128, 'STAGES': 5}]


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = described_parser(__doc__)
    parser.add_argument('--json', type=Path, metavar='OUT', help='write all figures to this file')
    parser.add_argument('--quick', action='store_true', help='no other tiles')
    parser.add_argument('--jobs', type=int, default=14, help='compile ahead (default: 14; 0: none)')
    parser.add_argument(
        '--budget-s', type=float, default=BUDGET_S, metavar='S', help='begin nothing later'
    )
    # For the tests of this script, which have no GPU.
    parser.add_argument('--device', choices=['cuda', 'cpu'], default='cuda', help=argparse.SUPPRESS)
    parser.add_argument('--size', choices=['full', 'tiny'], default='full', help=argparse.SUPPRESS)
    return parser.parse_args(argv)


if __name__ == '__main__':
    sys.exit(main())
