"""The fused network of SmolVLA against LeRobot's numbers and the plain modules."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from network_cases import each_entry, largest_error, relative_error
from smolvla_cases import load_smolvla_case, tiny_smolvla
from thorough import thorough_but
from tiny_policy import tiny_dims
from torch import Tensor

from vla_runtime.families.blocks import fused_product
from vla_runtime.families.blocks.layers import matrix_names
from vla_runtime.families.flow_network import build_network
from vla_runtime.families.flow_step import DenoiseStep
from vla_runtime.families.smolvla.flow_policy import SmolVla
from vla_runtime.inference.denoise import flow_times

pytestmark = pytest.mark.cases

# As in test_smolvla_networks.py.
BOUND = 5e-5
PAST = ('self_key', 'self_value', 'cross_key', 'cross_value')

entries = each_entry('smolvla')
static = pytest.mark.parametrize('static_shapes', [False, True])
precisions = pytest.mark.parametrize(
    ('dtype', 'bound'), [(torch.float32, 1e-5), (torch.bfloat16, 5e-2)]
)


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.inference_mode():
        yield


def tiny_network(dtype: torch.dtype = torch.float32, **changes) -> SmolVla:
    network = tiny_smolvla(replace(tiny_dims('smolvla'), **changes))
    for name in matrix_names(network):
        parameter = network.get_parameter(name)
        parameter.data = parameter.data.to(dtype)
    return network


def inputs_of(network: SmolVla, rows: int) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Pixels, of which the first view is absent, prompts of different lengths, and states."""
    torch.manual_seed(1)
    dims = network.dims
    pixels = torch.rand(dims.cameras, 3, dims.image_size, dims.image_size) * 2 - 1
    lengths = torch.tensor([dims.prompt_length - 2 - row for row in range(rows)])
    given = {
        'tokens': torch.randint(0, dims.vocabulary, (rows, dims.prompt_length)),
        'token_mask': torch.arange(dims.prompt_length)[None] < lengths[:, None],
        'state': torch.randn(rows, dims.state_dim),
    }
    return pixels, torch.arange(dims.cameras) > 0, given


@static
@entries
def test_each_steps_velocity_and_the_chunk_are_lerobots(path, b, static_shapes):
    case = load_smolvla_case(path)
    fused = case.network.fused(static_shapes)
    pixels, image_mask = case.images(b)
    past = fused.prefix(fused.vision(pixels), image_mask, **case.rows(b))
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
            {},
        )
        assert relative_error(velocity[0], case.tensors['v_t'][k, b]) <= BOUND, f'step {k}'
    assert relative_error(x[0], case.tensors['actions'][b]) <= BOUND


@pytest.fixture(params=[2**24, 0], ids=['small', 'large'], autouse=True)
def _sizes(request, monkeypatch):
    """Products as of a small policy and of a large one."""
    for name in ('ONE_PASS_FROM', 'PACKED_FROM'):
        monkeypatch.setattr(fused_product, name, request.param)
    monkeypatch.setattr(fused_product, 'is_faster', lambda dtype: True)


@static
@precisions
@pytest.mark.parametrize(
    ('rows', 'samples'), thorough_but([(1, 1), (2, 3)], [(1, 1), (2, 1), (1, 3), (2, 3)])
)
@pytest.mark.parametrize('per_action', [False, True])
def test_rows_samples_and_times_of_single_actions_equal_the_plain_modules(
    rows, samples, per_action, dtype, bound, static_shapes
):
    network = tiny_network(dtype)
    dims = network.dims
    pixels, image_mask, given = inputs_of(network, rows)
    images = network.vision(pixels)
    past = network.prefix(images, image_mask, **given)
    times = torch.linspace(1.0, 0.1, dims.horizon) if per_action else torch.tensor([0.4])
    conditioning = network.time_conditioning(times)
    conditioning = conditioning[None] if per_action else conditioning
    x = torch.randn(1 if samples == 1 else rows * samples, dims.horizon, dims.action_dim)
    expected = network.velocity(x, past, conditioning)

    fused = network.fused(static_shapes)
    step = fused.split_conditioning(conditioning)
    found = fused.velocity(x, fused.prepare_prefix(past, samples), step)
    assert found.shape == expected.shape
    assert largest_error(found, expected) <= bound * max(1.0, float(expected.abs().max()))
    assert largest_error(fused.vision(pixels), images) <= bound * float(images.abs().max())
    again = fused.prefix(images, image_mask, **given)
    valid = past['prefix_mask']
    assert again.keys() == past.keys() and torch.equal(again['prefix_mask'], valid)
    for name in PAST:
        assert again[name].shape == past[name].shape and again[name].dtype == dtype
        ours, plain = (
            one[name].float().transpose(0, 1).movedim(3, 1)[valid] for one in (again, past)
        )
        assert largest_error(ours, plain) <= bound * max(1.0, float(plain.abs().max()))


@precisions
@pytest.mark.parametrize('every', [0, 1, 3])
@pytest.mark.parametrize('kv_heads', [1, 6])
def test_other_kinds_and_heads_of_layers_equal_the_plain_modules(every, kv_heads, dtype, bound):
    """Without layers of a kind, and where keys are of all heads or of one."""
    dims = tiny_dims('smolvla')
    stacks = {
        name: replace(getattr(dims, name), num_kv_heads=kv_heads) for name in ('language', 'expert')
    }
    network = tiny_network(dtype, self_attention_every=every, **stacks)
    pixels, image_mask, given = inputs_of(network, 2)
    conditioning = network.time_conditioning(torch.tensor([0.4]))
    x = torch.randn(1, dims.horizon, dims.action_dim)
    images = network.vision(pixels)
    expected = network.velocity(x, network.prefix(images, image_mask, **given), conditioning)
    fused = network.fused()
    prepared = fused.prepare_prefix(fused.prefix(images, image_mask, **given), 1)
    found = fused.velocity(x, prepared, fused.split_conditioning(conditioning))
    assert largest_error(found, expected) <= bound * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_padding_of_the_prompt_changes_no_bit(dtype):
    """Padded tokens are not computed at all, and neither are those of an absent view."""
    network = tiny_network(dtype)
    dims = network.dims
    longer = build_network('smolvla', replace(dims, prompt_length=dims.prompt_length + 9))
    longer.load_state_dict(network.state_dict(), assign=True)
    pixels, image_mask, given = inputs_of(network, 2)
    padded = {
        name: rows if name == 'state' else torch.nn.functional.pad(rows, (0, 9))
        for name, rows in given.items()
    }
    x = torch.randn(1, dims.horizon, dims.action_dim)
    found = []
    for one, rows in ((network, given), (longer.eval().requires_grad_(False), padded)):
        fused = one.fused()
        past = fused.prefix(fused.vision(pixels), image_mask, **rows)
        hidden = ~past['prefix_mask'].any(dim=0)
        # The absent view comes first, padding before the state.
        assert hidden[0] and hidden[-2] and not hidden[-1]
        assert not any(past[name][..., hidden, :].any() for name in PAST)
        step = fused.split_conditioning(fused.time_conditioning(torch.tensor([0.7])))
        found.append(fused.velocity(x, fused.prepare_prefix(past, 1), step).clone())
    assert torch.equal(*found)


def test_images_and_text_do_not_see_the_state():
    """The negative control is the state's own token, which sees all."""
    network = tiny_network()
    pixels, image_mask, given = inputs_of(network, 1)
    fused = network.fused()
    images = fused.vision(pixels)
    one, other = (
        fused.prefix(images, image_mask, **{**given, 'state': state})
        for state in (given['state'], given['state'] + 1.0)
    )
    assert all(torch.equal(one[name][..., :-1, :], other[name][..., :-1, :]) for name in PAST)
    assert all(largest_error(one[name], other[name]) > 1e-2 for name in PAST)


def test_a_laid_out_prefix_serves_step_after_step():
    """No step leaves anything behind that the next one sees."""
    network = tiny_network()
    dims, fused = network.dims, network.fused()
    pixels, image_mask, given = inputs_of(network, 1)
    prepared = fused.prepare_prefix(fused.prefix(fused.vision(pixels), image_mask, **given), 1)
    step = fused.split_conditioning(fused.time_conditioning(torch.tensor([0.7])))
    first, other = (torch.randn(1, dims.horizon, dims.action_dim) for _ in range(2))
    fresh = fused.velocity(first, prepared, step).clone()
    assert not torch.equal(fused.velocity(other, prepared, step), fresh)
    assert torch.equal(fused.velocity(first, prepared, step), fresh)


def test_what_is_laid_out_into_follows_a_prefix_of_another_shape():
    """On a CPU the number of tokens in use changes with the prompt."""
    network = tiny_network()
    dims, fused = network.dims, network.fused()
    pixels, image_mask, given = inputs_of(network, 1)
    images, x = fused.vision(pixels), torch.randn(1, dims.horizon, dims.action_dim)
    conditioning = fused.time_conditioning(torch.tensor([0.7]))
    prepared = None
    for length in (5, 9, 5):
        given['token_mask'] = torch.arange(dims.prompt_length)[None] < length
        past = fused.prefix(images, image_mask, **given)
        again = fused.prepare_prefix(past, 1, prepared)
        assert prepared is None or again is prepared
        prepared = again
        found = fused.velocity(x, prepared, fused.split_conditioning(conditioning))
        assert largest_error(found, network.velocity(x, past, conditioning)) <= 1e-5


def test_merged_matrices_are_the_plain_layers_own_memory():
    network = tiny_network()
    before = {name: value.clone() for name, value in network.state_dict().items()}
    network.fused()
    after = network.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    cross = [network.expert.layers[layer] for layer in network.dims.cross_layers]
    for block in (*network.language.layers, *network.expert.layers):
        attention, mlp = block.attention, block.mlp
        merged = [(mlp.gate, mlp.up)]
        if not any(block is one for one in cross):
            merged.append((attention.q, attention.k, attention.v))
        for layers in merged:
            assert len({layer.weight.untyped_storage().data_ptr() for layer in layers}) == 1
