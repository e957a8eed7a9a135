"""Results of `vla_runtime roofline` for a device, as lines for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vla_tools.performance.devices import GIB
from vla_tools.performance.roofline import SECONDS_A_KERNEL


def describe(answer: Mapping[str, Any], device: Mapping[str, Any]) -> str:
    """The answer for one device, as lines for people."""
    tokens = answer['answer_tokens']
    whole = f'{answer["steps"]} denoise steps' if tokens is None else f'answers of {tokens} tokens'
    lines = [
        f'{answer["model"]} on {device["name"]}: {_verdict(device)}',
        f'  networks   {answer["precision"]} matrices, {answer["views"]} view(s), prefix of '
        f'{answer["prefix_tokens"]} tokens, {whole}',
        f'  memory     {device["memory_gib"]:g} GiB, less {device["reserved_gib"]:g} for system '
        'and CUDA',
        f'  published  {device["bandwidth_gb_s"]:g} GB/s, half {device["half_tflops"]:g} TFLOP/s, '
        f'float32 {device["float32_tflops"]:g} TFLOP/s',
        f'  source     {device["source"]}',
        '',
        *_memory_lines(answer['memory_bytes'], device),
        _build_line(device['build']),
        '',
    ]
    labels = {
        'vision': 'vision, one view',
        'prefix': 'prefix',
        'step': 'denoise, one step' if tokens is None else 'one token',
        'denoise': f'denoise, {answer["steps"]} steps'
        if tokens is None
        else f'answer, {tokens} tokens',
        'miss': f'miss, {answer["views"]} view(s)',
        'hit': 'hit',
    }
    floors = list(device['floors_ms'].values())
    rows = ''.join(f'{title:>10}' for title in ('1 row', '2 rows')[: len(floors)])
    lines.append(f'  {"at least, ms":24}{rows}  bound by')
    for phase, label in labels.items():
        times = ''.join(f'{_digits(of_rows[phase]["milliseconds"]):>10}' for of_rows in floors)
        # Once where one and two rows have the same bound.
        bounds = dict.fromkeys(of_rows[phase]['bound'] for of_rows in floors)
        bound = ', then '.join(bounds)
        lines.append(f'  {label:24}{times}  {bound if tokens is None else _of_answer(bound)}')
    lines += ['', *_predicted_lines(device, labels), *_share_lines(device, tokens)]
    if device['note']:
        lines.append(f'  note: {device["note"]}')
    return '\n'.join(lines)


def _of_answer(phase: str) -> str:
    return phase.replace('denoise', 'answer')


def _predicted_lines(device: Mapping[str, Any], labels: Mapping[str, str]) -> Sequence[str]:
    """Lines with the predicted times of PyTorch on CUDA, and an empty line."""
    predicted = device['predicted_ms']
    if not predicted:
        return ['  no prediction for PyTorch: its kernels were not counted for this', '']
    how = f'1 row; least time + {1e6 * SECONDS_A_KERNEL:g} µs a kernel, not measured'
    lines = [f'  {"PyTorch predicted, ms":24}{"operators":>10}{"Triton":>10}  {how}']
    for phase, label in labels.items():
        first, *others = (one[phase] for one in predicted.values())
        # Differences of a kernel or two are noise.
        cells = [first, *(one if abs(one - first) > 0.01 * first else None for one in others)]
        lines.append(
            f'  {label:24}'
            + ''.join(f'{"same" if one is None else _digits(one):>10}' for one in cells)
        )
    return [*lines, '']


def _share_lines(device: Mapping[str, Any], tokens: int | None) -> Sequence[str]:
    """Lines with each phase's share of a miss: of its least time, and as others measured it."""
    phases = ('vision', 'prefix', 'denoise')
    titles = phases if tokens is None else map(_of_answer, phases)
    lines = [f'  {"share of a miss":24}' + ''.join(f'{title:>10}' for title in titles)]
    for rows, shares in device['miss_shares'].items():
        label = f'least time, {rows.replace("_", " ").replace("1 rows", "1 row")}'
        lines.append(f'  {label:24}' + ''.join(f'{shares[phase]:>10.0%}' for phase in phases))
    for run in device['measured_by_others']:
        label = f'{run["runtime"]}, {run["total_ms"]:.0f} ms'
        vision = run['vision_ms'] / run['total_ms']
        lines.append(f'  {label:24}{vision:>10.0%}{1 - vision:>15.0%} together  {run["source"]}')
    return lines


def _verdict(device: Mapping[str, Any]) -> str:
    """Return one verdict over all backends, numbers of rows, and building."""
    fits = [one for of_backend in device['fits'].values() for one in of_backend.values()]
    if all(fits) and device['build']['fits']:
        return 'fits'
    return 'FITS IN PART' if any(fits) else 'DOES NOT FIT'


def _memory_lines(
    needs: Mapping[str, Mapping[str, Mapping[str, int]]], device: Mapping[str, Any]
) -> Sequence[str]:
    """Lines with the memory that each backend takes, and whether the device has it."""
    free = f'needs, of {device["memory_gib"] - device["reserved_gib"]:g} GiB'
    parts = ('total', 'weights', 'keys, values', 'activations')
    lines = [f'  {free:24}' + ''.join(f'{part:>13}' for part in parts)]
    for backend, of_backend in needs.items():
        for built, need in of_backend.items():
            sizes = (
                need['total'],
                need['weights'],
                need['past'] + need['prepared'],
                need['activations'],
            )
            fits = device['fits'][backend][built]
            lines.append(
                f'  {backend + ", " + built.replace("_", " "):24}'
                + ''.join(f'{_size(size):>13}' for size in sizes)
                + ('  fits' if fits else '  DOES NOT FIT')
            )
    return lines


def _build_line(build: Mapping[str, Any]) -> str:
    """Line with the memory that building takes, and what is missing."""
    if build['fits']:
        verdict = 'fits'
    elif build['swap_bytes'] is None:
        verdict = 'DOES NOT FIT'
    else:
        verdict = f'DOES NOT FIT without {_size(build["swap_bytes"])} of swap'
    if build['host_bytes']:
        verdict += f', beside {_size(build["host_bytes"])} of the host'
    return f'  {"tensorrt, build":24}{_size(build["memory_bytes"]):>13}{"":39}  {verdict}'


def _size(count: int) -> str:
    return f'{count / GIB:.2f} GiB' if count >= GIB / 10 else f'{count / 2**20:.1f} MiB'


def _digits(milliseconds: float) -> str:
    return f'{milliseconds:.2f}' if milliseconds >= 0.1 else f'{milliseconds:.2g}'
