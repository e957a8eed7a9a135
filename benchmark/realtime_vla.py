"""pi0.5 beside the public Triton implementation (realtime-vla, arXiv 2510.26742) on a GPU.

By turns, both at the published size in bfloat16 with random weights, 3 views, a prompt of 48
tokens, 10 steps and nothing cached. A time is from images and noise in host memory to the chunk in
host memory. The chunks are not compared: the weights are random, and each lays them out its way.

REPOSITORY is a checkout of github.com/Dexmal/realtime-vla; its packages (triton, transformers) must
be installed beside ours.

    python benchmark/realtime_vla.py REPOSITORY
    python benchmark/realtime_vla.py REPOSITORY --views 2 --rounds 500 --json beside.json

Ours are measured alone first and written, so that a failure of theirs leaves them.

Exit code: 0, also where the target was missed; 1 where theirs could not be measured; 2 where
nothing was.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / 'benchmark')]

from parts.gpu_run import described, described_parser, device_facts, device_fault  # noqa: E402
from parts.measurement import Target, median_ratio, percentiles, write_result  # noqa: E402

# The shortest of the lengths for which our prefix has a graph: nothing is padded on either side.
PROMPT_TOKENS = 48
WARM_UP = 20
_MODULE = 'pi05_infer.py'
THEIRS, OPERATORS, TRITON = 'realtime-vla', 'ours, operators', 'ours, Triton'
PACKAGES = ('torch', 'triton', 'numpy', 'transformers')
Side = Callable[[], np.ndarray]


def import_theirs(repository: Path) -> Any:
    """Import realtime-vla's pi0.5 from its checkout; ImportError: a package is missing."""
    sys.path.insert(0, str(repository))
    return importlib.import_module('pi05_infer')


def their_side(module: Any, inputs: Any, device: str) -> Side:
    """Return one inference of realtime-vla on `random_policy.ChunkInputs`."""
    import torch

    views, horizon = len(inputs.pixels), len(inputs.step_inputs.x)
    # It copies given weights into its own and leaves the rest as allocated.
    prompt = torch.randn(PROMPT_TOKENS, 2048, dtype=torch.bfloat16, device=device)
    engine = module.Pi05Inference(
        checkpoint={'language_embeds': prompt},
        num_views=views,
        chunk_size=horizon,
        discrete_state_input=False,
    )
    for tensor in (*engine.weights.values(), *_styles(engine.buffers)):
        tensor.normal_(0.0, 0.02)
    images = np.ascontiguousarray(np.moveaxis(inputs.pixels, 1, -1))
    given = [torch.from_numpy(array) for array in (images, inputs.step_inputs.x)]

    def infer() -> np.ndarray:
        moved = [tensor.to(device, torch.bfloat16) for tensor in given]
        chunk: np.ndarray = engine.forward(*moved).float().cpu().numpy()
        return chunk

    return infer


def _styles(buffers: Mapping[str, Any]) -> list[Any]:
    """Return the buffers computed once, from weights that came later."""
    return [tensor for name, tensor in buffers.items() if name.startswith('decoder_style')]


def our_sides(size: str, views: int, device: str) -> tuple[dict[str, Side], Any, str]:
    """Return our inferences, the inputs, and why there are none in Triton ('' where there are)."""
    from parts.random_policy import infer, random_inputs, random_network, sized_dims, torch_engine

    from vla_runtime.engines.torch.layer_trial import choose_layers

    dims = sized_dims('pi05', size, views)
    network = random_network('pi05', dims, device, 'bfloat16')
    inputs = random_inputs(dims, rows=1, seed=1)
    tokens = min(PROMPT_TOKENS, dims.prompt_length)
    mask = np.arange(dims.prompt_length)[None] < tokens
    inputs = replace(inputs, prefix_inputs={**inputs.prefix_inputs, 'token_mask': mask})
    operators, in_triton = (
        torch_engine(network, graphs=device != 'cpu', max_rows=1) for _ in range(2)
    )
    sides: dict[str, Side] = {OPERATORS: lambda: infer(operators, inputs)}
    choose_layers(in_triton, 'bfloat16')
    if in_triton.triton != 'on':
        return sides, inputs, in_triton.why_triton
    return {**sides, TRITON: lambda: infer(in_triton, inputs)}, inputs, ''


def take_turns(sides: Mapping[str, Side], rounds: int) -> dict[str, np.ndarray]:
    """Milliseconds of each side, (rounds,), by turns in an order that changes.

    Raises RuntimeError: a side's numbers are not finite.
    """
    random, found = np.random.default_rng(0), {name: np.empty(rounds) for name in sides}
    for name, side in sides.items():
        for _ in range(WARM_UP):
            chunk = side()
        if not np.isfinite(chunk).all():
            raise RuntimeError(f'{name}: a number of its chunk is not finite')
    for turn in range(rounds):
        for name in random.permutation(list(sides)):
            start = perf_counter()
            sides[name]()
            found[name][turn] = (perf_counter() - start) * 1e3
    return found


def figures_of(times: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Percentiles of each side, and ours beside theirs by turns where theirs were measured."""
    return {
        name: {
            'ms': percentiles(list(values)),
            **(
                {'of_theirs': median_ratio(values, times[THEIRS])}
                if name != THEIRS and THEIRS in times
                else {}
            ),
        }
        for name, values in times.items()
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and write; see the module for the exit code."""
    arguments = _arguments(argv)
    if reason := device_fault(arguments.device):
        print(f'error: {reason}', file=sys.stderr)
        return 2
    if not (arguments.repository / _MODULE).is_file():
        fault = f'no {_MODULE}; give a checkout of realtime-vla'
        print(f'error: {arguments.repository}: {fault}', file=sys.stderr)
        return 2
    sides, inputs, why_no_triton = our_sides(arguments.size, arguments.views, arguments.device)
    result = {
        'views': arguments.views,
        'rounds': arguments.rounds,
        'prompt_tokens': PROMPT_TOKENS,
        'device': device_facts(arguments.device),
        'why_no_triton': why_no_triton,
        'why_not_theirs': 'cut off before they were measured',
        'sides': figures_of(take_turns(sides, arguments.rounds)),
    }
    _write(result, arguments.json)
    try:
        module = import_theirs(arguments.repository)
        sides[THEIRS] = their_side(module, inputs, arguments.device)
        result['sides'] = figures_of(take_turns(sides, arguments.rounds))
        result['why_not_theirs'] = ''
    except Exception as error:
        # Its code is not ours: whatever it ends with, ours are measured.
        result['why_not_theirs'] = described(error)
    path = _write(result, arguments.json)
    _show(result)
    print(path)
    return 1 if result['why_not_theirs'] else 0


def _target(sides: Mapping[str, Any]) -> Target:
    ratios = [one['of_theirs']['median'] for one in sides.values() if 'of_theirs' in one]
    return Target('the faster of ours, of realtime-vla', 1.0, min(ratios, default=None))


def _write(result: dict[str, Any], out: Path | None) -> Path:
    result['target'] = _target(result['sides'])._asdict()
    return write_result('realtime_vla', result, PACKAGES, out)


def _show(result: Mapping[str, Any]) -> None:
    for name, found in result['sides'].items():
        print(f'{name:16} {found["ms"]["median"]:8.2f} ms')
    if result['why_no_triton']:
        print(f'{TRITON}: {result["why_no_triton"]}')
    if result['why_not_theirs']:
        print(f'{THEIRS}: {result["why_not_theirs"]}')
    print(f'target: {_target(result["sides"]).line}')


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = described_parser(__doc__)
    parser.add_argument('repository', type=Path, metavar='REPOSITORY', help='checkout of theirs')
    parser.add_argument('--views', type=int, choices=(1, 2, 3), default=3, help='default: 3')
    parser.add_argument('--rounds', type=int, default=200, help='turns of each (default: 200)')
    parser.add_argument('--json', type=Path, metavar='OUT', help='instead of benchmark/results')
    # For a rehearsal without a GPU.
    parser.add_argument('--device', default='cuda', help=argparse.SUPPRESS)
    parser.add_argument('--size', default='full', help=argparse.SUPPRESS)
    return parser.parse_args(argv)


if __name__ == '__main__':
    sys.exit(main())
