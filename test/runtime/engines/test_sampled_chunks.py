"""Chunks of all samplings that a reference case recorded, on both engines."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from diffusion_cases import load_diffusion_case
from multi_task_dit_cases import load_multi_task_dit_case
from network_cases import batch_entries, relative_error
from sampled_cases import SampledCase
from sampled_chunks import chunks
from xvla_cases import load_xvla_case

ENTRIES = [
    pytest.param(load, path, b, id=f'{path.stem}-{b}')
    for kind, load in (
        ('diffusion', load_diffusion_case),
        ('multi_task_dit', load_multi_task_dit_case),
        ('xvla', load_xvla_case),
    )
    for path, b in batch_entries(kind)
]


@pytest.mark.cases
@pytest.mark.parametrize('backend', ['torch', 'onnxruntime'])
@pytest.mark.parametrize(('load', 'path', 'b'), ENTRIES)
def test_the_chunk_of_every_sampling_equals_the_reference(
    load: Callable[[Path], SampledCase], path: Path, b: int, backend: str
):
    case = load(path)
    for sampling, chunk in chunks(case, b, backend):
        expected = case.trajectory(sampling, b)
        found = chunk[:, : expected.shape[1]]
        assert relative_error(found, expected) <= sampling.bound, sampling.name
