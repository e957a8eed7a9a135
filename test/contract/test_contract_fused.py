"""Fused networks: the training code's numbers, and those of the plain modules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from contract_cases import Entry, assert_close, bound_of, entries, image_tokens_of, load, visible
from family_contracts import contracts
from fused_networks import tiny
from network_cases import denoised, largest_error, relative_error
from tiny_policy import tiny_dims
from torch import Tensor

from vla_runtime.families.blocks import fused_product
from vla_runtime.families.flow_network import FlowNetwork, build_network, empty_network

FAMILIES = [
    name for name in contracts() if empty_network(name, tiny_dims(name)).fused_type is not None
]
families = pytest.mark.parametrize('family', FAMILIES)
static = pytest.mark.parametrize('static_shapes', [False, True])
precisions = pytest.mark.parametrize(
    ('dtype', 'bound'), [(torch.float32, 1e-5), (torch.bfloat16, 5e-2)]
)


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.inference_mode():
        yield


@pytest.fixture(params=[2**24, 0], ids=['small', 'large'], autouse=True)
def _sizes(request, monkeypatch):
    """Products as of a small policy and of a large one."""
    for name in ('ONE_PASS_FROM', 'PACKED_FROM'):
        monkeypatch.setattr(fused_product, name, request.param)
    monkeypatch.setattr(fused_product, 'is_faster', lambda dtype: True)


class Inputs:
    """Prompts of different lengths over images, of which the first view is absent."""

    def __init__(self, network: FlowNetwork, rows: int = 1) -> None:
        dims: Any = network.dims
        generator = torch.Generator().manual_seed(1)
        size = dims.image_size
        self.pixels = torch.rand(dims.cameras, 3, size, size, generator=generator) * 2 - 1
        self.image_mask = torch.arange(dims.cameras) > 0
        lengths = torch.tensor([dims.prompt_length - 2 - row for row in range(rows)])
        shape = (rows, dims.prompt_length)
        state = torch.randn(rows, dims.state_dim, generator=generator)
        in_prefix = 'state' in network.family.prefix_inputs(dims)
        self.rows = {
            'tokens': torch.randint(0, dims.vocabulary, shape, generator=generator),
            'token_mask': torch.arange(dims.prompt_length)[None] < lengths[:, None],
            **({'state': state} if in_prefix else {}),
        }
        self.head = {} if in_prefix or not dims.state_dim else {'state': state}
        self.x = torch.randn(1, dims.horizon, dims.action_dim, generator=generator)

    def prefix(self, network: FlowNetwork) -> Mapping[str, Tensor]:
        return network.prefix(network.vision(self.pixels), self.image_mask, **self.rows)

    def velocity(self, fused: Any, x: Tensor | None = None, prepared: Any = None) -> Tensor:
        prepared = fused.prepare_prefix(self.prefix(fused)) if prepared is None else prepared
        step = fused.split_conditioning(fused.time_conditioning(torch.tensor([0.7])))
        return fused.velocity(self.x if x is None else x, prepared, step, **self.head).clone()


@pytest.mark.cases
@static
@pytest.mark.parametrize('entry', [of for of in entries() if of.values[0][0] in FAMILIES])
def test_velocities_and_the_chunk_of_the_cases_equal_the_reference(
    entry: Entry, static_shapes: bool
):
    case, bound = load(entry), bound_of(entry)
    fused = case.network.fused(static_shapes)
    plain, network = case.network, replace(case, network=fused)
    past = fused.prefix(image_tokens_of(network), case.image_mask, **case.rows)
    for name, expected in case.past.items():
        assert_close(visible(past, name), expected, bound, name)
    assert plain.dims == fused.dims
    steps = denoised(fused, past, case.noise[None], case.steps, rows=case.head)
    for k, (_, velocity) in enumerate(steps):
        assert_close(velocity[0], case.velocities[k], bound, f'step {k}')
    assert_close(steps[-1][0][0], case.actions, bound)


@families
@static
@precisions
@pytest.mark.parametrize('rows', [1, 2])
@pytest.mark.parametrize('per_action', [False, True])
def test_rows_and_times_of_single_actions_equal_the_plain_modules(
    family: str,
    rows: int,
    per_action: bool,
    dtype: torch.dtype,
    bound: float,
    static_shapes: bool,
):
    network = tiny(family, dtype)
    dims, given = network.dims, Inputs(network, rows)
    images, past = network.vision(given.pixels), given.prefix(network)
    times = torch.linspace(1.0, 0.1, dims.horizon) if per_action else torch.tensor([0.4])
    conditioning = network.time_conditioning(times)
    conditioning = conditioning[None] if per_action else conditioning
    x = torch.randn(rows, dims.horizon, dims.action_dim, generator=torch.Generator().manual_seed(2))
    expected = network.velocity(x, past, conditioning, **given.head)

    fused = network.fused(static_shapes)
    prepared, step = fused.prepare_prefix(past), fused.split_conditioning(conditioning)
    assert_close(fused.velocity(x, prepared, step, **given.head), expected, bound)
    assert largest_error(fused.vision(given.pixels), images) <= bound * float(images.abs().max())
    again, valid = given.prefix(fused), past['prefix_mask']
    assert again.keys() == past.keys() and torch.equal(again['prefix_mask'], valid)
    for name in past.keys() - {'prefix_mask'}:
        assert again[name].shape == past[name].shape and again[name].dtype == dtype
        ours, plain = (
            one[name].float().transpose(0, 1).movedim(3, 1)[valid] for one in (again, past)
        )
        assert relative_error(ours, plain) <= bound, name


@families
@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_padding_of_the_prompt_changes_no_bit(family: str, dtype: torch.dtype):
    """Padded tokens are not computed at all, and neither are those of an absent view."""
    network = tiny(family, dtype)
    dims: Any = network.dims
    longer = build_network(family, replace(dims, prompt_length=dims.prompt_length + 9))
    longer.load_state_dict(network.state_dict(), assign=True)
    given, padded = Inputs(network, 2), Inputs(network, 2)
    for name in ('tokens', 'token_mask'):
        padded.rows[name] = torch.nn.functional.pad(padded.rows[name], (0, 9))
    found = []
    for one, inputs in ((network, given), (longer.eval().requires_grad_(False), padded)):
        fused = one.fused()
        past = inputs.prefix(fused)
        hidden = ~past['prefix_mask'].any(dim=0)
        # The absent view comes first.
        assert hidden[0] and hidden.sum() > int((~inputs.rows['token_mask'].any(dim=0)).sum())
        for name in past.keys() - {'prefix_mask'}:
            assert not past[name][..., hidden, :].any(), name
        found.append(inputs.velocity(fused))
    assert torch.equal(*found)


@families
def test_a_laid_out_prefix_serves_step_after_step(family: str):
    """No step leaves anything behind that the next one sees."""
    network = tiny(family)
    fused, given = network.fused(), Inputs(network)
    prepared = fused.prepare_prefix(given.prefix(fused))
    fresh = given.velocity(fused, given.x, prepared)
    assert not torch.equal(given.velocity(fused, -given.x, prepared), fresh)
    assert torch.equal(given.velocity(fused, given.x, prepared), fresh)


@families
def test_what_is_laid_out_into_follows_a_prefix_of_another_shape(family: str):
    """On a CPU the number of tokens in use changes with the prompt."""
    network = tiny(family)
    fused, given, prepared = network.fused(), Inputs(network), None
    conditioning = network.time_conditioning(torch.tensor([0.7]))
    for length in (5, 9, 5):
        given.rows['token_mask'] = torch.arange(network.dims.prompt_length)[None] < length
        past = given.prefix(fused)
        again = fused.prepare_prefix(past, prepared)
        assert prepared is None or again is prepared
        prepared = again
        expected = network.velocity(given.x, past, conditioning, **given.head)
        assert relative_error(given.velocity(fused, given.x, prepared), expected) <= 1e-5


@families
def test_fusing_keeps_all_weights_in_the_plain_layers_own_memory(family: str):
    network = tiny(family)
    before = {name: value.clone() for name, value in network.state_dict().items()}
    network.fused()
    after = network.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    storages = {value.untyped_storage().data_ptr() for value in after.values()}
    # Those that are read together lie together.
    assert len(storages) <= len(after) - 2 * len(network.language.layers)
