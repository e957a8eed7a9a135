"""What is particular to GR00T's networks: buckets of flow time, positions, scales."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from groot_cases import N15, N16, N17, load_groot_case
from network_cases import each_case, each_entry, largest_error, relative_error
from onnx_bundles import tiny_onnx_bundle
from tiny_policy import tiny_dims

from vla_convert.export.onnx.cases import seeded_cases
from vla_convert.export.onnx.verification import verify_onnx
from vla_runtime.bundle.folder import read_bundle
from vla_runtime.family import dit as declaration
from vla_runtime.inference.denoise import flow_times
from vla_runtime.models.base.dit_network import action_code, bucket, dit_code
from vla_runtime.models.base.flow_network import empty_network
from vla_runtime.models.blocks.interleaving import separated
from vla_runtime.models.blocks.layers import query_scales

pytestmark = pytest.mark.cases

# Relative to the largest value: float32's own noise is 2e-5 in N1.7's features.
BOUND = 5e-5

entries = each_entry(N15, N16, N17)
cases = each_case(N15, N16, N17)


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.inference_mode():
        yield


@entries
def test_buckets_and_time_codes_equal_the_reference(path: Path, b: int):
    case = load_groot_case(path, b)
    times = flow_times(case.steps)
    assert declaration.bucket(times).tolist() == case.tensors['t'][:, b].tolist()
    buckets = case.tensors['time_embedding_t']
    width = case.network.dims.dit_width
    code = torch.nn.functional.silu(case.network.time_in(dit_code(buckets)))
    assert relative_error(case.network.time_out(code), case.tensors['dit_time_embedding']) <= BOUND
    reference = case.tensors['action_time_encoding']
    # The sine of an angle of 999 rounds by the angle's own last bit, 6e-5.
    assert largest_error(action_code(buckets, width), reference) <= 1e-4
    assert largest_error(declaration.action_code(buckets.numpy(), width), reference) <= 1e-4


def test_buckets_are_those_of_whole_numbers_for_every_number_of_steps():
    for steps in (*range(1, 301), 500, 999, 1000, 4096):
        exact = [k * 1000 // steps for k in range(steps)]
        times = flow_times(steps)
        assert declaration.bucket(times).tolist() == exact, steps
        in_float32 = times.astype(np.float32)
        assert declaration.bucket(in_float32).tolist() == exact, steps
        assert bucket(torch.from_numpy(in_float32)).tolist() == exact, steps
    naive = ((1.0 - flow_times(10)) * 1000).astype(int)
    assert naive.tolist() != [k * 100 for k in range(10)]


@each_case(N17)
def test_a_hidden_image_takes_no_positions(path: Path):
    case = load_groot_case(path, 0)
    network = case.network
    visible = case.visible.clone()
    visible[0] = False
    tokens = network.vision(case.pixels)
    _, mask = network.embed_prefix(tokens[None], visible[None], **case.rows())
    starts = network.starts(mask)
    text, _ = separated(starts, network.dims.image_places, network.dims.image_tokens)
    first = network.dims.image_places[0]
    assert torch.equal(text[0, : first + 1], torch.arange(first + 1))


def test_the_scale_of_the_scores_is_in_the_norms_of_normalised_queries():
    scales = query_scales(empty_network(N15, tiny_dims(N15)))
    assert 'language.blocks.0.attention.q_norm.weight' in scales
    assert 'language.blocks.0.attention.q.weight' not in scales
    assert {'context.0.attention.q.bias', 'dit.1.attention.q.weight'} <= set(scales)


@pytest.mark.thorough
# Which weights a part of the network computes with is told by its gradients.
@torch.inference_mode(False)
def test_a_bucket_off_by_one_is_found_in_a_half(monkeypatch):
    """Its error, 0.08, is within bfloat16's bound of tensors."""
    folder = tiny_onnx_bundle(N15, 'bfloat16')
    spec = read_bundle(folder).spec
    cases = seeded_cases(folder, spec)[:1]
    assert verify_onnx(folder, spec, cases=cases).failures == []
    right = declaration.bucket
    monkeypatch.setattr(declaration, 'bucket', lambda times: right(times) + 1)
    failures = verify_onnx(folder, spec, cases=cases).failures
    assert any('the bound for float32 is 5e-05' in line for line in failures), failures
