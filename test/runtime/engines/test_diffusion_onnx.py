"""Reference cases of Diffusion Policy on both engines: networks, and every sampler's chunk."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from diffusion_cases import load_diffusion_case
from network_cases import each_entry, relative_error
from onnx_bundles import run_graph
from sampled_chunks import chunks, onnx_files

pytestmark = pytest.mark.cases

# Relative to the largest value.
BOUND = 5e-5

entries = each_entry('diffusion')


@entries
def test_each_network_equals_the_reference(path: Path, b: int):
    case = load_diffusion_case(path)
    folder = onnx_files(case.network, len(case.cameras))
    pixels = case.pixels(b)
    found = [run_graph(folder, 'vision', {'pixels': one[None].numpy()}) for one in pixels]
    tokens = np.concatenate([one['image_tokens'] for one in found])
    assert relative_error(tokens, case.image_tokens(b)) <= BOUND
    given = {'image_mask': case.visible().numpy(), 'state': case.rows(b)['state'].numpy()}
    past = run_graph(folder, 'prefix', {'image_tokens': tokens, **given})
    with torch.inference_mode():
        expected = case.prefix(b)
    assert relative_error(past['modulation'], expected['modulation']) <= BOUND


@pytest.mark.parametrize('backend', ['torch', 'onnxruntime'])
@entries
def test_the_trajectory_of_every_sampler_equals_the_reference(path: Path, b: int, backend: str):
    case = load_diffusion_case(path)
    for sampling, chunk in chunks(case, b, backend):
        expected = case.tensors[f'{sampling.prefix}trajectory'][b]
        assert relative_error(chunk, expected) <= BOUND, sampling.name
