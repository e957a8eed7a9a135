"""benchmark/kernels.py: views and allocations are no kernels; depth counts, width does not."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch
from paths import ROOT
from tiny_policy import tiny_spec, write_tiny_policy
from triton_package import interpreted, needs_triton  # noqa: F401

sys.path.insert(0, str(ROOT / 'benchmark'))

import kernels

from vla_runtime.family.listing import performance_figures, preset_names
from vla_runtime.policy import Policy

COUNTED = {
    name: counted for name in preset_names() if (counted := performance_figures(name).kernels)
}


def test_views_and_allocations_are_no_kernels():
    x = torch.zeros(4, 4)
    with kernels.KernelCounter() as counted:
        y = torch.empty(4, 4)
        y.copy_(x.t()[:2].reshape(2, 4).repeat(2, 1))
        x.view(16).unsqueeze(0)
    # repeat copies into what it allocates, copy_ copies.
    assert counted.count == 2


def test_attention_of_a_single_token_is_two_kernels_and_of_more_tokens_one():
    starts = torch.tensor([0, 1], dtype=torch.int32)
    for queries, expected in ((1, 2), (3, 1)):
        query, keys = torch.ones(queries, 4, 8), torch.ones(5, 1, 8)
        with kernels.KernelCounter() as counted:
            found = kernels.attend(query, keys, keys, starts, starts, queries, 5, starts[1:])
        assert torch.equal(found, query)
        assert counted.count == expected


@pytest.fixture
def kernels_at(tmp_path):
    def count(name: str, **changes):
        spec = tiny_spec()
        expert = replace(spec.dims.expert, **changes)
        language = replace(spec.dims.language, depth=expert.depth)
        dims = replace(spec.dims, expert=expert, language=language)
        bundle = write_tiny_policy(tmp_path / name, replace(spec, dims=dims))
        return kernels.kernels_of(Policy.load(bundle, 'torch', precision='float32', threads=1))

    return count


def test_a_hit_runs_fewer_than_a_miss_and_only_depth_counts(kernels_at):
    expert = tiny_spec().dims.expert
    own = kernels_at('own')
    assert 0 < own['hit'] < own['miss']
    assert kernels_at('wide', mlp_dim=2 * expert.mlp_dim) == own
    two, three = kernels_at('two', depth=2), kernels_at('three', depth=3)
    four = kernels_at('four', depth=4)
    # Every layer of every step alike.
    assert three['hit'] - two['hit'] == four['hit'] - three['hit'] > 0


@pytest.mark.thorough
@pytest.mark.parametrize('name', list(COUNTED))
def test_counts_of_the_roofline_are_those_of_todays_modules(name, tmp_path):
    bundle = kernels.write_deep(name, tmp_path / 'deep')
    assert kernels.packed_kernels(name, bundle) == COUNTED[name]['torch']


@pytest.mark.thorough
@needs_triton
@pytest.mark.usefixtures('interpreted')
@pytest.mark.parametrize('name', list(COUNTED))
def test_counts_in_triton_kernels_are_those_of_todays_modules(name, tmp_path):
    bundle = kernels.write_deep(name, tmp_path / 'deep')
    assert kernels.triton_kernels(name, bundle) == COUNTED[name]['triton']
