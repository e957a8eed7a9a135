"""What every family's PyTorch network must satisfy: the training code's numbers, and its own."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
import torch
from contract_cases import (
    Entry,
    assert_close,
    bound_of,
    each_entry,
    image_tokens_of,
    load,
    result_of,
    seen_by,
    visible,
)
from family_contracts import contract_of, contracts
from family_contracts.declaration import Case
from network_cases import committed_plan, denoised, relative_error
from torch import Tensor

from vla_runtime.family.listing import family_names, find_family

pytestmark = pytest.mark.cases


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.inference_mode():
        yield


def prefix_of(case: Case) -> Mapping[str, Tensor]:
    return case.network.prefix(image_tokens_of(case), case.image_mask, **case.rows)


@each_entry()
def test_image_tokens_and_prefix_equal_the_reference(entry: Entry):
    case, bound = load(entry), bound_of(entry)
    tokens = image_tokens_of(case)
    for camera, expected in enumerate(case.image_tokens):
        found = tokens[camera, : len(expected), : expected.shape[1]]
        assert_close(found, expected, bound, f'camera {camera}')
    past = case.network.prefix(tokens, case.image_mask, **case.rows)
    for name, expected in case.past.items():
        assert_close(visible(past, name), expected, bound, name)


@each_entry('flow')
def test_every_velocity_and_the_chunk_equal_the_reference(entry: Entry):
    case, bound = load(entry), bound_of(entry)
    if case.actions is None or case.noise is None:
        pytest.skip('the training code sees padding in this case')
    steps = denoised(case.network, prefix_of(case), case.noise[None], case.steps, rows=case.head)
    for k, (_, velocity) in enumerate(steps):
        if case.velocities is not None:
            assert_close(velocity[0], case.velocities[k], bound, f'step {k}')
    chunk = steps[-1][0][0]
    assert_close(chunk, case.actions, bound)
    if case.unlike is not None:
        assert relative_error(chunk, case.unlike) > 20 * bound


@each_entry('single', 'tokens')
def test_actions_of_one_pass_equal_the_reference(entry: Entry):
    case, bound = load(entry), bound_of(entry)
    if case.actions is None:
        pytest.skip('the case has no actions to compare with')
    past = prefix_of(case)
    if case.tokens is not None:
        tokens, logits = case.network.answer(past)
        # The training code may have stopped at a token that ends the answer.
        length = len(case.tokens)
        assert torch.equal(tokens[0, :length], case.tokens)
        assert_close(logits[0, :length], case.logits, bound)
    else:
        assert_close(case.network.actions(past, **case.head)[0], case.actions, bound)


@each_entry('flow')
def test_real_time_chunking_equals_the_reference(entry: Entry):
    case, bound = load(entry), bound_of(entry)
    if not case.tied:
        pytest.skip('the case has no such chunks')
    past = prefix_of(case)

    def chunk(plan: Tensor | None = None, weights: np.ndarray | None = None) -> Tensor:
        noise = case.noise[None]
        return denoised(case.network, past, noise, case.steps, plan, weights, case.head)[-1][0][0]

    for schedule, tied in case.tied.items():
        plan = committed_plan(tied.previous, len(case.noise), case.steps, schedule, tied.overlap)
        found = chunk(*plan)
        assert_close(found, tied.actions, bound, schedule)
        assert relative_error(chunk(), tied.actions) > 100 * bound


@each_entry('flow')
def test_velocities_on_a_cached_prefix_equal_one_forward_of_the_training_code(entry: Entry):
    case, contract = load(entry), contract_of(entry[0])
    given = case.training
    if given is None:
        pytest.skip('the case has no such forward')
    found = case.network.velocity(given.x, prefix_of(case), given.conditioning, **case.head)
    if given.velocity is not None:
        real = getattr(case.network.dims, 'real_actions', given.velocity.shape[1])
        assert_close(found[0, :, :real], given.velocity[:, :real], contract.bound)
    if given.squared_error is not None:
        # An error e of ours changes the squared one by 2 e |u - v| to first order.
        difference = (given.target - found[0]).abs()
        bound = 1e-5 * (2 * difference + 1e-5) + 1e-6 * difference.square()
        assert (difference.square() - given.squared_error).abs().le(bound).all()


def spoilt(past: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A prefix with large numbers in all places that the head does not see."""
    masks = {name: seen_by(past, name) for name in past}
    return {
        name: value if (mask := masks[name]) is None else value.masked_fill(~mask[0][:, None], 1e4)
        for name, value in past.items()
    }


@each_entry()
@pytest.mark.parametrize('poison', [1e4, float('nan')])
def test_what_is_hidden_changes_nothing(entry: Entry, poison: float):
    case = load(entry)
    network, rows = case.network, dict(case.rows)
    hides = ~case.image_mask
    # A case without a hidden camera is given one, if another is left.
    hides[-1] |= int(case.image_mask.sum()) > 1
    other = dict(rows)
    if 'tokens' in rows:
        rows['token_mask'] = rows['token_mask'].clone()
        rows['token_mask'][:, -1] = False
        tokens = torch.where(rows['token_mask'], rows['tokens'], 7)
        other |= {'token_mask': rows['token_mask'], 'tokens': tokens}
    images = image_tokens_of(case)
    poisoned = torch.where(hides[:, None, None], poison, images)
    past = network.prefix(images, ~hides, **rows)
    clean = result_of(case, past)
    assert torch.isfinite(clean).all()
    assert torch.equal(result_of(case, network.prefix(poisoned, ~hides, **other)), clean)
    assert torch.equal(result_of(case, spoilt(past)), clean)
    if not torch.equal(hides, ~case.image_mask):
        assert relative_error(clean, result_of(case, prefix_of(case))) > 10 * bound_of(entry)


@each_entry()
def test_rows_together_equal_each_alone(entry: Entry):
    """Two prompts over the same images: the second shorter, with another state."""
    case, bound = load(entry), bound_of(entry)
    network = case.network
    two = {name: torch.cat([value, value]) for name, value in case.rows.items()}
    if 'tokens' in two:
        two['token_mask'][1, int(two['token_mask'][1].sum()) - 2 :] = False
    if 'state' in two:
        two['state'][1] *= -1
    heads = {name: torch.cat([value, -value]) for name, value in case.head.items()}
    images = image_tokens_of(case)
    x = None
    if case.noise is not None and network.family.head == 'flow':
        x = torch.stack([case.noise, -case.noise])
    past = network.prefix(images, case.image_mask, **two)
    together = result_of(case, past, heads, x)
    assert relative_error(together[0], together[1]) > 10 * bound, 'the rows differ'
    for row in range(2):
        here = slice(row, row + 1)
        alone = network.prefix(
            images, case.image_mask, **{name: value[here] for name, value in two.items()}
        )
        head = {name: value[here] for name, value in heads.items()}
        expected = result_of(case, alone, head, None if x is None else x[here])[0]
        assert_close(together[row], expected, bound, row)


@each_entry('flow')
def test_a_flow_time_for_each_action_equals_a_shared_one_where_they_are_alike(entry: Entry):
    case, bound = load(entry), bound_of(entry)
    network, past, x = case.network, prefix_of(case), case.noise[None]
    shared, late = (network.time_conditioning(torch.tensor([time])) for time in (0.6, 0.1))
    each = shared[None].expand(1, x.shape[1], -1).clone()
    expected = network.velocity(x, past, shared, **case.head)
    assert_close(network.velocity(x, past, each, **case.head), expected, 1e-5)
    each[:, 0] = late
    changed = network.velocity(x, past, each, **case.head)
    assert relative_error(changed, expected) > bound


def test_contracts_declare_what_the_families_do():
    assert set(contracts()) == set(family_names())
    for name, contract in contracts().items():
        family = find_family(name)
        assert bool(contract.template) == family.has_language, name
        assert set(contract.parameters) == set(family.presets), name
        assert contract.faults is not None, name
