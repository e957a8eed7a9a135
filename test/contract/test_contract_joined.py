"""Joined networks: the training code's numbers, and those of the same layers one by one.

The oracle is a network of the same weights that is not joined.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from contract_cases import (
    Entry,
    assert_close,
    bound_of,
    entries,
    image_tokens_of,
    load,
    seen_by,
    visible,
)
from family_contracts import contracts
from family_contracts.declaration import Case
from joined_networks import EXPERTS, joined, tiny
from network_cases import denoised, largest_error, relative_error
from tiny_policy import tiny_dims
from torch import Tensor

from vla_runtime.family.declaration import image_sizes, language_dims
from vla_runtime.models.base.flow_network import FlowNetwork, build_network, empty_network
from vla_runtime.models.blocks import products
from vla_runtime.models.blocks.transformer import Attention
from vla_runtime.models.shapes.traced_shapes import row_tensors


def attentions_of(network: FlowNetwork) -> list[Attention]:
    return [module for module in network.modules() if isinstance(module, Attention)]


def is_joined(family: str) -> bool:
    """Whether an engine joins layers of this family's network; that of tokens joins none."""
    network = empty_network(family, tiny_dims(family))
    return network.family.head != 'tokens' and bool(attentions_of(network))


FAMILIES = [name for name in contracts() if is_joined(name)]
families = pytest.mark.parametrize('family', FAMILIES)
experts = pytest.mark.parametrize('family', EXPERTS)
# Static shapes are a word of the experts' families alone.
with_shapes = pytest.mark.parametrize(
    ('family', 'static_shapes'),
    [(name, static) for name in FAMILIES for static in (False, True)[: 1 + (name in EXPERTS)]],
)
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
        monkeypatch.setattr(products, name, request.param)
    monkeypatch.setattr(products, 'is_faster', lambda dtype: True)


def random_case(network: FlowNetwork, rows: int = 1) -> Case:
    """Prompts of different lengths over images, of which the first view of several is absent."""
    dims: Any = network.dims
    generator = torch.Generator().manual_seed(1)

    def drawn(inputs: Mapping[str, Any]) -> dict[str, Tensor]:
        found = {}
        for name, like in row_tensors(inputs, rows, 'cpu').items():
            if like.dtype == torch.bool:
                length = torch.arange(rows)[:, None] + 2
                found[name] = torch.arange(like.shape[1]) < like.shape[1] - length
            elif like.dtype == torch.int64:
                most = language_dims(dims).vocabulary
                found[name] = torch.randint(0, most, like.shape, generator=generator)
            else:
                found[name] = torch.randn(like.shape, generator=generator)
        return found

    return Case(
        network=network,
        steps=1,
        pixels=[torch.rand(3, *size, generator=generator) * 2 - 1 for size in image_sizes(dims)],
        image_mask=torch.arange(dims.cameras) > min(dims.cameras - 2, 0),
        rows=drawn(network.family.prefix_inputs(dims)),
        head=drawn(network.family.head_inputs(dims)),
        noise=torch.randn(dims.horizon, dims.action_dim, generator=generator),
        actions=None,
    )


def prefix_of(network: FlowNetwork, case: Case) -> Mapping[str, Tensor]:
    images = image_tokens_of(replace(case, network=network))
    return network.prefix(images, case.image_mask, **case.rows)


def velocity_of(
    network: FlowNetwork,
    case: Case,
    past: Mapping[str, Tensor],
    conditioning: Tensor | None = None,
    x: Tensor | None = None,
    prepared: Any = None,
) -> Tensor:
    """Velocity as an engine computes it, over what is laid out of a prefix."""
    if conditioning is None:
        conditioning = network.time_conditioning(torch.tensor([0.7]))
    assert case.noise is not None
    x = case.noise[None] if x is None else x
    prepared = network.prepare_prefix(past) if prepared is None else prepared
    step = network.split_conditioning(conditioning)
    return network.velocity(x, prepared, step, **case.head).clone()


@pytest.mark.cases
@pytest.mark.parametrize('static_shapes', [False, True])
@pytest.mark.parametrize('entry', [of for of in entries() if of.values[0][0] in FAMILIES])
def test_velocities_and_the_chunk_of_the_cases_equal_the_reference(
    entry: Entry, static_shapes: bool
):
    if static_shapes and entry[0] not in EXPERTS:
        pytest.skip('no shape of this family depends on numbers')
    case, bound = load(entry), bound_of(entry)
    if case.actions is None:
        pytest.skip('the training code sees padding in this case')
    network = joined(case.network, static_shapes)
    past = prefix_of(network, case)
    for name, expected in case.past.items():
        assert_close(visible(past, name), expected, bound, name)
    if network.family.head == 'single':
        assert_close(network.actions(past, **case.head)[0], case.actions, bound)
        return
    if network.family.head == 'diffusion':
        # Its steps are a scheduler's, and its velocity is compared below.
        return
    assert case.noise is not None
    steps = denoised(network, past, case.noise[None], case.steps, rows=case.head)
    for k, (_, velocity) in enumerate(steps):
        if case.velocities is not None:
            assert_close(velocity[0], case.velocities[k], bound, f'step {k}')
    assert_close(steps[-1][0][0], case.actions, bound)


@with_shapes
@precisions
@pytest.mark.parametrize('rows', [1, 2])
@pytest.mark.parametrize('per_action', [False, True])
def test_rows_and_times_of_single_actions_equal_the_layers_one_by_one(
    family: str,
    static_shapes: bool,
    rows: int,
    per_action: bool,
    dtype: torch.dtype,
    bound: float,
):
    network = tiny(family, dtype)
    network.fold_constants()
    if per_action and network.family.head == 'single':
        pytest.skip('this head has no flow time')
    case = random_case(network, rows)
    past = prefix_of(network, case)
    horizon = network.dims.horizon
    times = torch.linspace(1.0, 0.1, horizon) if per_action else torch.tensor([0.4])
    conditioning = network.time_conditioning(times)
    conditioning = conditioning[None] if per_action else conditioning
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(rows, horizon, network.dims.action_dim, generator=generator)
    expected = velocity_of(network, case, past, conditioning, x)

    other = joined(network, static_shapes)
    assert_close(velocity_of(other, case, past, conditioning, x), expected, bound)
    for pixels in case.pixels:
        images = network.vision(pixels[None])
        assert largest_error(other.vision(pixels[None]), images) <= bound * images.abs().max()
    again = prefix_of(other, case)
    assert again.keys() == past.keys()
    for name, value in past.items():
        assert again[name].shape == value.shape and again[name].dtype == value.dtype, name
        if value.dtype == torch.bool:
            assert torch.equal(again[name], value), name
            continue
        valid, both = seen_by(past, name), (again[name].float(), value.float())
        if valid is not None and value.ndim == 5:
            both = tuple(one.transpose(0, 1).movedim(3, 1)[valid] for one in both)
        assert relative_error(*both) <= bound, name
    assert_close(velocity_of(other, case, again, conditioning, x), expected, bound)


@experts
@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_padding_of_the_prompt_changes_no_bit(family: str, dtype: torch.dtype):
    """Padded tokens are not computed at all, and neither are those of an absent view."""
    network = tiny(family, dtype)
    dims: Any = network.dims
    longer = build_network(family, replace(dims, prompt_length=dims.prompt_length + 9))
    longer.load_state_dict(network.state_dict(), assign=True)
    case = random_case(network, 2)
    padded = {
        name: torch.nn.functional.pad(case.rows[name], (0, 9)) for name in ('tokens', 'token_mask')
    }
    found = []
    for one, given in (
        (network, case),
        (longer.eval().requires_grad_(False), replace(case, rows={**case.rows, **padded})),
    ):
        other = joined(one)
        past = prefix_of(other, given)
        hidden = ~past['prefix_mask'].any(dim=0)
        # The absent view comes first.
        assert hidden[0] and hidden.sum() > int((~given.rows['token_mask'].any(dim=0)).sum())
        for name in past.keys() - {'prefix_mask'}:
            assert not past[name][..., hidden, :].any(), name
        found.append(velocity_of(other, given, past))
    assert torch.equal(*found)


@families
def test_a_laid_out_prefix_serves_step_after_step(family: str):
    """No step leaves anything behind that the next one sees."""
    network = joined(tiny(family))
    case = random_case(network)
    past = prefix_of(network, case)
    prepared, x = network.prepare_prefix(past), random_case(network).noise[None]
    fresh = velocity_of(network, case, past, x=x, prepared=prepared)
    other = velocity_of(network, case, past, x=-x, prepared=prepared)
    # A head of one pass starts from nothing.
    assert torch.equal(other, fresh) == (network.family.head == 'single')
    assert torch.equal(velocity_of(network, case, past, x=x, prepared=prepared), fresh)


@experts
def test_what_is_laid_out_into_follows_a_prefix_of_another_shape(family: str):
    """On a CPU the number of tokens in use changes with the prompt."""
    network = tiny(family)
    other, case, prepared = joined(network), random_case(network), None
    for length in (5, 9, 5):
        mask = torch.arange(network.dims.prompt_length)[None] < length
        case = replace(case, rows={**case.rows, 'token_mask': mask})
        past = prefix_of(other, case)
        again = other.prepare_prefix(past, prepared)
        assert prepared is None or again is prepared
        prepared = again
        found = velocity_of(other, case, past, prepared=prepared)
        assert relative_error(found, velocity_of(network, case, past)) <= 1e-5


@families
def test_joining_keeps_all_weights_in_the_layers_own_memory(family: str):
    network = tiny(family)
    before = {name: value.clone() for name, value in network.state_dict().items()}
    network.join()
    after = network.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    storages = {value.untyped_storage().data_ptr() for value in after.values()}
    # Those that are read together lie together.
    together = [attention for attention in attentions_of(network) if not attention.is_cross]
    assert together and len(storages) <= len(after) - 2 * len(together)


@families
def test_products_are_what_runs_and_with_gradients_each_layer(family: str, monkeypatch):
    """A fault in the products is seen, but not by the path that the Jacobian takes."""
    right = products.Product.__call__

    def wrong(self: Any, x: Tensor, *more: Any) -> Tensor:
        return 0 * right(self, x, *more) + 1

    with torch.inference_mode(False), torch.no_grad():
        network = tiny(family)
        case, other = random_case(network), joined(network)
        past = prefix_of(network, case)
        conditioning = network.time_conditioning(torch.tensor([0.7]))
        expected = velocity_of(network, case, past)
        monkeypatch.setattr(products.Product, '__call__', wrong)
        monkeypatch.setattr(products.Product, 'matmul_via', lambda self, buffer, x: wrong(self, x))
        # Where the head has such layers.
        if family != 'openvla_oft':
            assert relative_error(velocity_of(other, case, past), expected) > 1e-2
        faulty = prefix_of(other, case)
        assert relative_error(velocity_of(network, case, faulty), expected) > 1e-2
        x = case.noise[None].clone().requires_grad_()
        with torch.enable_grad():
            found = other.velocity(x, past, conditioning, **case.head)
        assert found.requires_grad == (network.family.head != 'single')
    assert relative_error(found.detach(), expected) <= 1e-5


@families
def test_weights_of_a_joined_network_are_neither_changed_nor_moved(family: str):
    network = tiny(family)
    weights = network.state_dict()
    network.join()
    assert not any(one.requires_grad for one in network.parameters())
    for change in (
        lambda: network.load_state_dict(weights),
        lambda: network.to(torch.bfloat16),
        lambda: network.join(),
    ):
        with pytest.raises(RuntimeError, match=r'joined|one engine'):
            change()
