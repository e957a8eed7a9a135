"""Requests to a policy that answers in tokens: one after the other, naive, in two passes, packed.

`sequential` runs a request alone: prompt, then K - 1 passes of one token. The other three have K
requests open, and a tick reads the newest one's prompt and a token of each older one: `naive` in a
pass each, `two_passes` in one for the prompt and one for all tokens, `packed` in one. A tick ends
with an answer. The age of an action is the time from the observation to its answer: K ticks.

All four must write the same tokens. Rounds go by turns, and ratios are those of a round: of the
time that passes, and of the processor's, which other programs of the machine change less.

With `--bundle` the same of a policy of the tabletop, through `Policy`, one thread, in the
processor's time: an answer alone, and a tick with every place taken.
"""

from __future__ import annotations

import argparse
from collections import deque
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from time import perf_counter, process_time
from typing import Any, NamedTuple

import numpy as np
import torch
from parts.measurement import Target, in_turn, median_ratio, percentiles, write_result
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from vla_runtime.families.blocks.dimensions import DecoderDims, VisionDims
from vla_runtime.families.flow_network import build_network
from vla_runtime.families.openvla.declaration import OPENVLA, OpenVlaDims
from vla_runtime.families.openvla.networks import OpenVla
from vla_runtime.families.packed_pass import Ring, tick
from vla_runtime.inference.settings import PolicySettings
from vla_runtime.policy import Policy

MODES = ('sequential', 'naive', 'two_passes', 'packed')
# Edge of the image in pixels: image tokens are (edge / 14)².
EDGES = {'short': 112, 'long': 224}
_PROMPT = 24
_TARGET = 1.8


class Request(NamedTuple):
    """An observation as the network sees it."""

    pixels: Tensor
    tokens: Tensor


def dims_of(edge: int) -> OpenVlaDims:
    """OpenVLA at about 100 million parameters."""
    tower = VisionDims(
        width=256, depth=4, num_heads=4, mlp_dim=1024, patch_size=14, image_size=edge
    )
    return OpenVlaDims(
        dino=tower,
        siglip=tower,
        dino_registers=4,
        projector_dim=1024,
        language=DecoderDims(
            width=768, depth=12, mlp_dim=2048, num_heads=12, num_kv_heads=12, head_dim=64
        ),
        vocabulary=4160,
        used_vocabulary=4096,
        action_bins=256,
        prompt_length=_PROMPT,
        action_dim=7,
        dino_mean=OPENVLA.dino_mean,
        dino_std=OPENVLA.dino_std,
        siglip_mean=OPENVLA.siglip_mean,
        siglip_std=OPENVLA.siglip_std,
    )


class Runner:
    """Answers requests in one of the modes; every call of `answer` is given a new request."""

    def __init__(self, network: OpenVla, mode: str) -> None:
        self._network, self._mode = network, mode
        self._length = network.dims.answer_length
        # Of open requests: past, keys and values of the answer, tokens.
        self._open: deque[tuple[Any, Tensor, Tensor, list[int]]] = deque()
        self._ring: Ring | None = None
        self._stages: deque[tuple[int, list[int]]] = deque()
        self._number = 0

    def answer(self, request: Request) -> list[int] | None:
        """Run a request, or a tick with it; return the answer that is complete."""
        network = self._network
        images = network.vision(request.pixels)
        seen = torch.ones(1, dtype=torch.bool)
        rows = {'tokens': request.tokens, 'token_mask': torch.ones(1, _PROMPT, dtype=torch.bool)}
        if self._mode == 'sequential':
            return network.answer(network.prefix(images, seen, **rows))[0][0].tolist()
        if self._mode == 'naive':
            return self._naive(images, seen, rows)
        return self._in_ring(network.embed_prefix(images, seen, **rows))

    def _naive(self, images: Tensor, seen: Tensor, rows: dict[str, Tensor]) -> list[int] | None:
        network = self._network
        for past, key, value, tokens in self._open:
            place = torch.tensor(len(tokens) - 1)
            read = torch.tensor([[tokens[-1]]])
            found = network.read_token(read, place, past, key, value)
            key[place], value[place] = found.key, found.value
            tokens.append(int(found.token))
        past = network.prefix(images, seen, **rows)
        self._open.append((past, *network.answer_places(past), [int(past['logits'].argmax())]))
        done = len(self._open[0][3]) == self._length
        return self._open.popleft()[3] if done else None

    def _in_ring(self, newest: tuple[Tensor, Tensor]) -> list[int] | None:
        network = self._network
        ring = self._ring
        if ring is None:
            keys, _, logits = network.read_prompt(*newest)
            past = {'prefix_key': torch.stack(keys), 'logits': logits}
            ring = self._ring = Ring.of(network, past)
        number = self._number % self._length
        slot = torch.tensor([number])
        self._number += 1
        if self._mode == 'packed':
            tick(network, ring, slot, newest)
        else:
            tick(network, ring, slot, None)
            self._enter(ring, number, newest)
        self._stages.append((number, []))
        written = ring.tokens.tolist()
        for place, tokens in self._stages:
            tokens.append(written[place])
        done = len(self._stages[0][1]) == self._length
        return self._stages.popleft()[1] if done else None

    def _enter(self, ring: Ring, slot: int, newest: tuple[Tensor, Tensor]) -> None:
        """Read a prompt in a pass of its own, into its slot."""
        keys, values, logits = self._network.read_prompt(*newest)
        places = newest[1].shape[1]
        for caches, made in ((ring.keys, keys), (ring.values, values)):
            for cache, one in zip(caches, made, strict=True):
                cache[slot].zero_()
                cache[slot, :, :places] = one[0]
        ring.mask[slot] = newest[1][0]
        ring.logits[slot] = logits[0]
        ring.tokens[slot] = logits[0].argmax()


def random_network(dims: OpenVlaDims) -> OpenVla:
    network = build_network('openvla', dims).eval().requires_grad_(False)
    assert isinstance(network, OpenVla)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in network.named_parameters():
        if parameter.ndim > 1:
            scale = 0.5 if 'embedding' in name else parameter.shape[-1] ** -0.5
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    return network


def requests_of(dims: OpenVlaDims, count: int) -> list[Request]:
    generator = torch.Generator().manual_seed(1)
    edge = dims.image_size
    return [
        Request(
            torch.rand(1, 3, edge, edge, generator=generator) * 2.0 - 1.0,
            torch.randint(3, 4000, (1, _PROMPT), generator=generator),
        )
        for _ in range(count)
    ]


def operations(run: Callable[[], object]) -> int:
    """Floating point operations of a run, as PyTorch counts them."""
    with FlopCounterMode(display=False) as counter:
        run()
    return int(counter.get_total_flops())


@torch.inference_mode()
def measure(edge: int, rounds: int) -> dict[str, Any]:
    """Measure all modes by turns."""
    dims = dims_of(edge)
    network, length = random_network(dims), dims.answer_length
    given = requests_of(dims, length + 1)
    runners = {mode: Runner(network, mode) for mode in MODES}
    answers: dict[str, list[list[int]]] = {mode: [] for mode in MODES}
    for request in given:
        for mode, runner in runners.items():
            found = runner.answer(request)
            if found is not None:
                answers[mode].append(found)
    for mode in MODES[1:]:
        count = len(answers[mode])
        assert count and answers[mode] == answers['sequential'][:count], mode
    flops = {mode: operations(lambda r=r: r.answer(given[0])) for mode, r in runners.items()}
    seconds: dict[str, list[float]] = {mode: [] for mode in MODES}
    busy: dict[str, list[float]] = {mode: [] for mode in MODES}
    for round_ in range(rounds):
        request = given[round_ % len(given)]
        for mode in in_turn(MODES, round_):
            start, start_busy = perf_counter(), process_time()
            runners[mode].answer(request)
            seconds[mode].append(perf_counter() - start)
            busy[mode].append(process_time() - start_busy)
    language = sum(p.numel() for name, p in network.named_parameters() if 'vision' not in name)
    passes = {'sequential': length, 'naive': length, 'two_passes': 2, 'packed': 1}
    ticks = {mode: 1 if mode == 'sequential' else length for mode in MODES}
    return {
        'image_tokens': dims.image_tokens,
        'prompt_places': dims.prefix_length,
        'answer_tokens': length,
        'parameters': sum(p.numel() for p in network.parameters()),
        'parameters_of_the_language_model': language,
        'modes': {
            mode: {
                'answer_ms': percentiles(np.array(times) * 1e3),
                'answers_per_s': 1.0 / float(np.median(times)),
                'age_ms': float(np.median(times)) * 1e3 * ticks[mode],
                'age_ticks': ticks[mode],
                'operations_an_answer': flops[mode],
                'passes_an_answer': passes[mode],
                'throughput_of_sequential': inverse(median_ratio(times, seconds['sequential'])),
                'processor_ms': percentiles(np.array(busy[mode]) * 1e3),
                'by_processor_time': inverse(median_ratio(busy[mode], busy['sequential'])),
            }
            for mode, times in seconds.items()
        },
        'prompt_alone': alone(network, given[0], rounds),
    }


def alone(network: OpenVla, request: Request, rounds: int) -> dict[str, float]:
    """Milliseconds of what every mode does once an answer, and of one token's pass."""
    seen = torch.ones(1, dtype=torch.bool)
    rows = {'tokens': request.tokens, 'token_mask': torch.ones(1, _PROMPT, dtype=torch.bool)}
    images = network.vision(request.pixels)
    past = network.prefix(images, seen, **rows)
    places = network.answer_places(past)
    token, place = torch.tensor([[5]]), torch.tensor(0)
    parts: dict[str, Callable[[], object]] = {
        'vision_ms': lambda: network.vision(request.pixels),
        'prompt_ms': lambda: network.prefix(images, seen, **rows),
        'token_ms': lambda: network.read_token(token, place, past, *places),
    }
    times: dict[str, list[float]] = {name: [] for name in parts}
    for _ in range(rounds):
        for name, run in parts.items():
            start = perf_counter()
            run()
            times[name].append((perf_counter() - start) * 1e3)
    return {name: float(np.median(found)) for name, found in times.items()}


def measure_bundle(folder: Path, rounds: int) -> dict[str, Any]:
    """Measure a policy of the tabletop on scenes of its training."""
    from vla_tabletop.sim.closed_loop import observe
    from vla_tabletop.sim.world import Tabletop

    world, seen = Tabletop(), []
    for seed in range(rounds):
        world.reset(seed)
        seen.append(observe(world, 'touch the red block'))
    world.close()
    packed = PolicySettings(pipeline='packed')
    alone: list[tuple[float, int]] = []
    with closing(Policy.load(folder, 'torch', precision='float32', threads=1)) as policy:
        policy.warm_up()
        for observation in seen:
            start = process_time()
            _, report = policy.infer(observation)
            alone.append((process_time() - start, report.runs['expert']))
        policy.infer(seen[0], settings=packed)
        start = process_time()
        futures = [policy.submit(observation, settings=packed) for observation in seen * 4]
        reports = [future.result()[1] for future in futures]
        busy_s = process_time() - start
    # The last one's passes go on without new prompts; they are few beside all.
    tick_ms = busy_s * 1e3 / len(reports)
    ticks = float(np.mean([report.ticks + 1 for report in reports]))
    seconds, passes = np.array(alone).T
    per_pass, rest = np.polyfit(passes, seconds * 1e3, 1)
    answer_ms = float(np.mean(seconds)) * 1e3
    return {
        'bundle': folder.name,
        'answer_tokens': float(np.mean(passes)) + 1,
        'sequential': {
            'answer_ms': answer_ms,
            'prompt_ms': float(rest),
            'pass_ms': float(per_pass),
        },
        'packed': {'tick_ms': tick_ms, 'age_ticks': ticks, 'age_ms': tick_ms * ticks},
        'throughput_of_sequential': answer_ms / tick_ms,
        'age_of_sequential': tick_ms * ticks / answer_ms,
    }


def inverse(ratio: dict[str, Any]) -> dict[str, Any]:
    """Turn a ratio of times into one of rates."""
    low, high = ratio['interval']
    return {'median': 1.0 / ratio['median'], 'interval': [1.0 / high, 1.0 / low]}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or '').splitlines()[0])
    parser.add_argument('--rounds', type=int, default=30, help='answers of each mode; default: 30')
    parser.add_argument('--images', nargs='+', choices=list(EDGES), default=list(EDGES))
    parser.add_argument('--threads', type=int, default=2, help='default: 2')
    parser.add_argument('--bundle', type=Path, help='a policy of the tabletop instead')
    parser.add_argument('--json', type=Path, help='write here instead of to benchmark/results/')
    arguments = parser.parse_args()
    if arguments.bundle is not None:
        found = measure_bundle(arguments.bundle, arguments.rounds)
        print(found)
        print(write_result('packed_policy', found, ('torch', 'numpy'), arguments.json).name)
        return
    torch.set_num_threads(arguments.threads)
    figures: dict[str, Any] = {'threads': arguments.threads, 'rounds': arguments.rounds}
    for name in arguments.images:
        figures[name] = found = measure(EDGES[name], arguments.rounds)
        print(f'{name}: {found["prompt_places"]} places, {found["parameters"] / 1e6:.0f} M')
        for mode, one in found['modes'].items():
            ratios = (
                f'{ratio["median"]:.2f} ({ratio["interval"][0]:.2f} to {ratio["interval"][1]:.2f})'
                for ratio in (one['throughput_of_sequential'], one['by_processor_time'])
            )
            print(
                f'  {mode:10} {one["answers_per_s"]:6.2f}/s  age {one["age_ms"]:7.0f} ms  '
                f'{one["operations_an_answer"] / 1e9:6.1f} GFLOP  {"; ".join(ratios)}'
            )
    packed = figures[arguments.images[0]]['modes']['packed']['by_processor_time']['median']
    # A target bounds from above.
    print(Target('time of an answer, of sequential', 1.0 / _TARGET, 1.0 / packed).line)
    print(write_result('packed_tokens', figures, ('torch', 'numpy'), arguments.json).name)


if __name__ == '__main__':
    main()
