"""pi0, pi0.5 and SmolVLA without masks: valid keys packed first, and a length for each row.

A plain attention stands where a GPU has its kernel; everything else is what runs there.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from joined_networks import EXPERTS, inputs_of_case, joined, prefix_of, tiny, velocity_of
from network_cases import (
    ReferenceCase,
    denoised,
    each_entry,
    load_network_case,
    random_network,
    relative_error,
)
from plain_lengths import attend_by_lengths
from smolvla_cases import load_smolvla_case
from tiny_policy import tiny_dims
from torch import Tensor

from vla_runtime.models.base.flow_network import FlowNetwork

pytestmark = pytest.mark.cases

BOUND = 1e-5
families = pytest.mark.parametrize('family', EXPERTS)


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.inference_mode():
        yield


class Counted:
    """A kernel that is usable here and counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, *arguments: Any) -> Tensor:
        self.calls += 1
        return attend_by_lengths(*arguments)


def both(network: FlowNetwork) -> tuple[Any, Any]:
    """The joined network with masks and without, on the same weights."""
    kernel = Counted()
    masked, packed = joined(network, True), joined(network, True, kernel)
    assert masked.kernel is None and packed.kernel is kernel
    kernel.calls = 0
    return masked, packed


@each_entry('pi05', 'pi0', 'smolvla')
def test_every_prefix_step_and_chunk_of_the_cases_is_that_with_masks(path, b):
    load = load_smolvla_case if 'smolvla' in path.stem else load_network_case
    case: ReferenceCase = load(path)
    network: FlowNetwork = case.network
    pixels, image_mask = case.images(b)
    rows, head = inputs_of_case(case, b)
    found = []
    for one in both(network):
        past = one.prefix(one.vision(pixels), image_mask, **rows)
        noise = case.tensors['noise'][b : b + 1]
        steps = denoised(one, past, noise, case.steps, rows=head)
        states = [state for step in steps for state in step]
        found.append((past, states))
    (masked_past, masked), (packed_past, packed) = found
    for name, expected in masked_past.items():
        # Of padding too: nothing that leaves the prefix is other than before.
        assert relative_error(packed_past[name].float(), expected.float()) <= BOUND, name
    for ours, expected in zip(packed, masked, strict=True):
        assert relative_error(ours, expected) <= BOUND
    assert relative_error(packed[-2][0], case.tensors['actions'][b]) <= 5e-5


@families
@pytest.mark.parametrize('rows', [1, 2])
@pytest.mark.parametrize(('dtype', 'bound'), [(torch.float32, BOUND), (torch.bfloat16, 5e-2)])
def test_rows_of_different_lengths_are_those_with_masks(family, rows, dtype, bound):
    masked, packed = both(tiny(family, dtype))
    expected, found = (prefix_of(one, rows) for one in (masked, packed))
    lengths = found['prefix_mask'].sum(dim=1)
    assert rows == 1 or lengths[0] != lengths[1]
    for name in expected:
        assert relative_error(found[name].float(), expected[name].float()) <= bound, name
    ours, _ = velocity_of(packed, expected)
    theirs, _ = velocity_of(masked, expected)
    assert relative_error(ours, theirs) <= bound


@families
def test_layers_whose_tokens_all_see_the_same_run_without_a_mask(family):
    """pi0.5 altogether, pi0's prefix, and SmolVLA's cross layers."""
    _, packed = both(tiny(family))
    past = prefix_of(packed, 1)
    of_prefix = packed.kernel.calls
    velocity_of(packed, past)
    dims = packed.dims
    whole = dims.language.depth - 1
    expected = {
        'pi05': (whole, dims.expert.depth),
        'pi0': (whole, 0),
        'smolvla': (0, len(dims.cross_layers) if family == 'smolvla' else 0),
    }
    assert (of_prefix, packed.kernel.calls - of_prefix) == expected[family]
    assert packed.kernel.calls > 0


def test_what_is_behind_the_valid_keys_is_not_read():
    """NaN in padding and absent views. The negative control is the mask, which multiplies it."""
    masked, packed = both(tiny('pi05'))
    past = prefix_of(masked, 2)
    expected, _ = velocity_of(packed, past)
    for name in ('past_key', 'past_value'):
        past[name] = past[name].clone()
        for row, valid in enumerate(past['prefix_mask']):
            past[name][:, row, :, ~valid] = torch.nan
    assert torch.equal(velocity_of(packed, past)[0], expected)
    assert velocity_of(masked, past)[0].isnan().any()


@families
def test_a_prefix_of_fewer_valid_tokens_is_laid_out_over_a_longer_one(family):
    masked, packed = both(tiny(family))
    prepared = None
    for seed, shares in enumerate([(1.0, 1.0), (0.2, 0.6), (0.9, 0.3), (0.1, 0.1)]):
        past = prefix_of(masked, 2, shares, seed)
        found, again = velocity_of(packed, past, into=prepared)
        assert prepared is None or again is prepared
        prepared = again
        assert relative_error(found, velocity_of(masked, past)[0]) <= BOUND


def test_a_kernel_is_for_static_shapes_alone():
    """Little is to be packed, and shapes change, where tokens in use are cut."""
    network = tiny('pi05')
    assert joined(network, False, attend_by_lengths).kernel is None
    assert joined(network, True, attend_by_lengths).kernel is attend_by_lengths


def test_smolvla_without_cross_layers_asks_for_no_kernel():
    dims = replace(tiny_dims('smolvla'), self_attention_every=1)
    kernel = Counted()
    assert joined(random_network('smolvla', dims), True, kernel).kernel is None
    assert kernel.calls == 0


NORMS_AT_ONCE = 'vla_runtime.models.blocks.layers.norms_at_once'
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 5e-3}


@pytest.mark.parametrize('family', EXPERTS)
@pytest.mark.parametrize('dtype', BOUNDS, ids=str)
def test_a_velocity_is_that_of_norms_one_by_one(family, dtype, monkeypatch):
    network = tiny(family, dtype)
    with torch.inference_mode():
        one_by_one = joined(network, True)
        expected, _ = velocity_of(one_by_one, prefix_of(one_by_one, 2))
        monkeypatch.setattr(NORMS_AT_ONCE, lambda x: True)
        at_once = joined(network, True)
        found, _ = velocity_of(at_once, prefix_of(at_once, 2))
    assert relative_error(found, expected) <= BOUNDS[dtype]
