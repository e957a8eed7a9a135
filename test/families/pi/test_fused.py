"""The fused networks of pi0 and pi0.5 against the reference cases and the plain modules."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from network_cases import batch_entries, largest_error, load_network_case, relative_error
from thorough import thorough_but
from tiny_policy import tiny_dims
from torch import Tensor

from vla_runtime.families.blocks import fused_product
from vla_runtime.families.blocks.layers import matrix_names
from vla_runtime.families.flow_network import build_network
from vla_runtime.families.flow_step import DenoiseStep
from vla_runtime.families.pi.flow_policy import PiNetwork
from vla_runtime.inference.denoise import flow_times

pytestmark = pytest.mark.cases

entries = pytest.mark.parametrize(
    ('path', 'b'), list(batch_entries()), ids=lambda value: getattr(value, 'stem', value)
)
families = pytest.mark.parametrize('family', ['pi0', 'pi05'])


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


def tiny_network(family: str, dtype: torch.dtype = torch.float32) -> PiNetwork:
    """Random weights in every layer, the gates of untrained norms included."""
    torch.manual_seed(3)
    network = build_network(family, tiny_dims(family)).eval().requires_grad_(False)
    assert isinstance(network, PiNetwork)
    matrices = matrix_names(network)
    for name, parameter in network.named_parameters():
        parameter.copy_(0.2 * torch.randn_like(parameter))
        if name in matrices:
            parameter.data = parameter.data.to(dtype)
    return network


def prompt_rows(network: PiNetwork, rows: int) -> dict[str, Tensor]:
    """Prompts of different lengths."""
    dims = network.dims
    tokens = torch.randint(0, dims.vocabulary, (rows, dims.prompt_length))
    lengths = torch.tensor([dims.prompt_length - 2 - row for row in range(rows)])
    return {
        'tokens': tokens,
        'token_mask': torch.arange(dims.prompt_length)[None] < lengths[:, None],
    }


@entries
def test_each_steps_velocity_and_the_chunk_equal_the_reference(path: Path, b: int):
    case = load_network_case(path)
    fused = case.network.fused()
    pixels, image_mask = case.images(b)
    tokens, token_mask = case.prompt(b)
    past = fused.prefix(
        fused.vision(pixels), image_mask, tokens=tokens[None], token_mask=token_mask[None]
    )
    valid = past['prefix_mask'][0]
    for name, reference in (('past_key', 'prefix_keys'), ('past_value', 'prefix_values')):
        expected = case.tensors[reference][:, b : b + 1]
        assert largest_error(past[name][..., valid, :], expected[..., valid, :]) <= 2e-5
    prepared, step = fused.prepare_prefix(past, 1), DenoiseStep(fused)
    x = case.tensors['noise'][b : b + 1]
    for k, t in enumerate(torch.tensor(flow_times(case.steps), dtype=torch.float32)):
        x, velocity = step(
            x,
            prepared,
            fused.split_conditioning(fused.time_conditioning(t[None])),
            t,
            torch.tensor(-1.0 / case.steps),
            torch.ones(1),
            torch.zeros_like(x),
            torch.zeros(1, x.shape[1], 1),
            case.head_inputs(b),
        )
        assert relative_error(velocity[0], case.tensors['v_t'][k, b]) <= 2e-5, f'step {k}'
    assert largest_error(x[0], case.tensors['actions'][b]) <= 2e-5


@families
@pytest.mark.parametrize(
    ('rows', 'samples'), thorough_but([(1, 1), (2, 3)], [(1, 1), (2, 1), (1, 3), (2, 3)])
)
@pytest.mark.parametrize('per_action', [False, True])
@pytest.mark.parametrize(('dtype', 'bound'), [(torch.float32, 1e-5), (torch.bfloat16, 5e-2)])
def test_rows_samples_and_times_of_single_actions_equal_the_plain_modules(
    family: str, rows: int, samples: int, per_action: bool, dtype: torch.dtype, bound: float
):
    network = tiny_network(family, dtype)
    dims, given = network.dims, prompt_rows(network, rows)
    pixels = torch.rand(dims.cameras, 3, dims.image_size, dims.image_size) * 2 - 1
    image_mask = torch.arange(dims.cameras) > 0
    images = network.vision(pixels)
    past = network.prefix(images, image_mask, **given)
    times = torch.linspace(1.0, 0.1, dims.horizon) if per_action else torch.tensor([0.4])
    conditioning = network.time_conditioning(times)
    conditioning = conditioning[None] if per_action else conditioning
    x = torch.randn(1 if samples == 1 else rows * samples, dims.horizon, dims.action_dim)
    state = {'state': torch.randn(rows, dims.state_dim)} if dims.state_dim else {}
    expected = network.velocity(x, past, conditioning, **state)

    fused = network.fused()
    found = fused.velocity(
        x, fused.prepare_prefix(past, samples), fused.split_conditioning(conditioning), **state
    )
    scale = max(1.0, float(expected.abs().max()))
    assert found.shape == expected.shape
    assert largest_error(found, expected) <= bound * scale
    assert largest_error(fused.vision(pixels), images) <= bound * float(images.abs().max())
    valid = past['prefix_mask']
    again = fused.prefix(images, image_mask, **given)
    assert torch.equal(again['prefix_mask'], valid)
    for name in ('past_key', 'past_value'):
        ours, plain = (
            one[name].float().transpose(0, 1).movedim(3, 1)[valid] for one in (again, past)
        )
        assert largest_error(ours, plain) <= bound * max(1.0, float(plain.abs().max()))


@families
@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_padding_of_the_prompt_changes_no_bit(family: str, dtype: torch.dtype):
    """Padded tokens are not computed at all, and neither are those of an absent view."""
    network = tiny_network(family, dtype)
    dims = network.dims
    longer = build_network(family, replace(dims, prompt_length=dims.prompt_length + 9))
    longer.load_state_dict(network.state_dict(), assign=True)
    pixels = torch.rand(dims.cameras, 3, dims.image_size, dims.image_size)
    image_mask = torch.arange(dims.cameras) > 0
    given = prompt_rows(network, 2)
    padded = {name: torch.nn.functional.pad(rows, (0, 9)) for name, rows in given.items()}
    x = torch.randn(1, dims.horizon, dims.action_dim)
    state = {'state': torch.randn(2, dims.state_dim)} if dims.state_dim else {}
    found = []
    for one, rows in ((network, given), (longer.eval().requires_grad_(False), padded)):
        fused = one.fused()
        past = fused.prefix(fused.vision(pixels), image_mask, **rows)
        hidden = ~past['prefix_mask'].any(dim=0)
        assert hidden[0] and hidden[-1]  # The absent view comes first, the padding last.
        assert not past['past_key'][..., hidden, :].any()
        step = fused.split_conditioning(fused.time_conditioning(torch.tensor([0.7])))
        found.append(fused.velocity(x, fused.prepare_prefix(past, 1), step, **state).clone())
    assert torch.equal(*found)


@families
def test_a_laid_out_prefix_serves_step_after_step(family: str):
    """No step leaves anything behind that the next one sees."""
    network = tiny_network(family)
    dims, fused = network.dims, network.fused()
    pixels = torch.rand(dims.cameras, 3, dims.image_size, dims.image_size)
    mask = torch.ones(dims.cameras, dtype=torch.bool)
    past = fused.prefix(fused.vision(pixels), mask, **prompt_rows(network, 1))
    state = {'state': torch.randn(1, dims.state_dim)} if dims.state_dim else {}
    prepared = fused.prepare_prefix(past, 1)
    step = fused.split_conditioning(fused.time_conditioning(torch.tensor([0.7])))
    first, other = (torch.randn(1, dims.horizon, dims.action_dim) for _ in range(2))
    fresh = fused.velocity(first, prepared, step, **state).clone()
    assert not torch.equal(fused.velocity(other, prepared, step, **state), fresh)
    assert torch.equal(fused.velocity(first, prepared, step, **state), fresh)


@families
def test_merged_matrices_are_the_plain_layers_own_memory(family: str):
    network = tiny_network(family)
    before = {name: value.clone() for name, value in network.state_dict().items()}
    network.fused()
    after = network.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    for block in (*network.language.layers, *network.expert.layers):
        attention, mlp = block.attention, block.mlp
        for layers in ((attention.q, attention.k, attention.v), (mlp.gate, mlp.up)):
            storages = {layer.weight.untyped_storage().data_ptr() for layer in layers}
            assert len(storages) == 1
