"""SmolVLA's networks against LeRobot's own numbers, and against themselves without a cache."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from joint_velocity import joint_velocity
from network_cases import (
    committed_plan,
    denoised,
    each_case,
    each_entry,
    largest_error,
    relative_error,
)
from smolvla_cases import SmolVlaCase, load_smolvla_case

from vla_runtime.families.blocks.action_time import time_embedding
from vla_runtime.inference.denoise import flow_times

pytestmark = pytest.mark.cases

# Relative to the largest value: float32's own noise is up to 8e-6 in the actions.
BOUND = 5e-5

entries = each_entry('smolvla')
cases = each_case('smolvla')


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.inference_mode():
        yield


def embedded(case: SmolVlaCase, b: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Embeddings (1, P, W) and mask (1, P) of batch entry b."""
    pixels, image_mask = case.images(b)
    return case.network.embed_prefix(
        case.network.vision(pixels)[None], image_mask[None], **case.rows(b)
    )


def chunk_of(
    case: SmolVlaCase, b: int, plan=None, weights=None
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    noise = case.tensors['noise'][b : b + 1]
    return denoised(case.network, case.prefix(b), noise, case.steps, plan, weights)


@entries
def test_image_features_equal_the_reference(path: Path, b: int):
    case = load_smolvla_case(path)
    pixels, _ = case.images(b)
    for i, features in enumerate(case.network.vision(pixels)):
        assert relative_error(features, case.tensors[f'image_features_{i}'][b]) <= BOUND, i


@entries
def test_prefix_embeddings_and_sight_equal_the_reference(path: Path, b: int):
    case = load_smolvla_case(path)
    embeddings, mask = embedded(case, b)
    assert torch.equal(mask[0], case.tensors['prefix_valid'][b])
    assert torch.equal(mask[0].cumsum(0) - 1, case.tensors['prefix_position_ids'][b])
    valid = mask[0]
    reference = case.tensors['prefix_embeddings'][b]
    assert relative_error(embeddings[0, valid], reference[valid]) <= BOUND


@entries
def test_keys_and_values_equal_the_reference_where_anything_may_look(path: Path, b: int):
    case = load_smolvla_case(path)
    embeddings, mask = embedded(case, b)
    past = case.network.encode_prefix(embeddings, mask)
    valid = mask[0]
    for which, name in enumerate(('prefix_keys', 'prefix_values')):
        ours = torch.stack([layer[which] for layer in past])
        reference = case.tensors[name][:, b : b + 1]
        assert ours.shape == reference.shape
        assert relative_error(ours[..., valid, :], reference[..., valid, :]) <= BOUND, name


@entries
def test_each_steps_velocity_and_the_chunk_equal_the_reference(path: Path, b: int):
    case = load_smolvla_case(path)
    times = torch.tensor(flow_times(case.steps), dtype=torch.float32)
    assert torch.equal(times, case.tensors['t'][:, b])
    steps = chunk_of(case, b)
    for k, (_, velocity) in enumerate(steps):
        assert relative_error(velocity[0], case.tensors['v_t'][k, b]) <= BOUND, f'step {k}'
    actions = steps[-1][0][0]
    assert relative_error(actions, case.tensors['actions'][b]) <= BOUND
    chunk = case.tensors['chunk'][b]
    assert relative_error(actions[:, : chunk.shape[1]], chunk) <= BOUND


@entries
@pytest.mark.parametrize('schedule', ['linear', 'exp'])
def test_real_time_chunking_equals_the_reference(path: Path, b: int, schedule: str):
    case = load_smolvla_case(path)
    previous = case.tensors['rtc_previous_chunk'][b]
    plan, weights = committed_plan(previous, case.network.dims.horizon, case.steps, schedule)
    reference = case.tensors[f'rtc_actions_{schedule}'][b]
    tied = chunk_of(case, b, plan, weights)[-1][0][0]
    assert relative_error(tied, reference) <= BOUND
    assert relative_error(chunk_of(case, b)[-1][0][0], reference) > 100 * BOUND


@entries
def test_joint_forward_equals_the_cached_path_and_the_reference(path: Path, b: int):
    case = load_smolvla_case(path)
    network, tensors = case.network, case.tensors
    x = tensors['joint_x_t'][b : b + 1]
    conditioning = network.time_conditioning(tensors['joint_t'][b : b + 1])
    joint = joint_velocity(network, *embedded(case, b), x, conditioning)
    cached = network.velocity(x, case.prefix(b), conditioning)
    assert relative_error(cached, joint) <= 1e-5
    # The reference states the squared error of its velocity; an error e of ours changes it by
    # 2 e |u - v| to first order.
    difference = (tensors['joint_u_t'][b] - joint[0]).abs()
    bound = 1e-5 * (2 * difference + 1e-5) + 1e-6 * difference.square()
    assert (difference.square() - tensors['joint_sq_err'][b]).abs().le(bound).all()


@cases
def test_rows_together_equal_each_alone(path: Path):
    case = load_smolvla_case(path)
    network = case.network
    # Two prompts over the same images: the second shorter, with another state.
    rows = case.rows(0, 0)
    rows['token_mask'] = rows['token_mask'].clone()
    rows['token_mask'][1, int(rows['token_mask'][1].sum()) - 2 :] = False
    rows['state'] = torch.stack([rows['state'][0], -rows['state'][1]])
    pixels, image_mask = case.images(0)
    image_tokens = network.vision(pixels)
    together = network.prefix(image_tokens, image_mask, **rows)
    x, conditioning = case.tensors['noise'][:1], network.time_conditioning(torch.tensor([0.7]))
    velocity = network.velocity(x, together, conditioning)
    assert relative_error(velocity[0], velocity[1]) > 100 * BOUND, 'the rows differ'
    for row in range(2):
        one = {name: value[row : row + 1] for name, value in rows.items()}
        alone = network.prefix(image_tokens, image_mask, **one)
        assert relative_error(velocity[row], network.velocity(x, alone, conditioning)[0]) <= BOUND


@cases
def test_batch_rows_of_a_joint_forward_equal_one_entry_at_a_time(path: Path):
    case = load_smolvla_case(path)
    network = case.network
    both = [embedded(case, b) for b in (0, case.batch - 1)]
    embeddings = torch.cat([both[0][0], both[1][0] * 0.9])
    mask = torch.cat([both[0][1], both[1][1]])
    x = torch.cat([case.tensors['noise'][:1], case.tensors['actions'][:1]])
    conditioning = network.time_conditioning(torch.tensor([0.7, 0.3]))
    together = joint_velocity(network, embeddings, mask, x, conditioning)
    for b in range(2):
        s = slice(b, b + 1)
        alone = joint_velocity(network, embeddings[s], mask[s], x[s], conditioning[s])
        assert relative_error(together[s], alone) <= BOUND


@cases
def test_several_samples_of_a_row_equal_one_at_a_time(path: Path):
    case = load_smolvla_case(path)
    network = case.network
    rows = case.rows(0, 0)
    rows['state'] = torch.stack([rows['state'][0], -rows['state'][1]])
    pixels, image_mask = case.images(0)
    past = network.prefix(network.vision(pixels), image_mask, **rows)
    noise = case.tensors['noise'][:1]
    x = torch.cat([noise, -noise, noise * 0.5])
    conditioning = network.time_conditioning(torch.tensor([0.4]))
    # Three samples of row 0, then the same three of row 1.
    together = network.velocity(x.repeat(2, 1, 1), past, conditioning)
    for index in range(3):
        alone = network.velocity(x[index : index + 1], past, conditioning)
        assert relative_error(together[[index, index + 3]], alone) <= BOUND


@cases
def test_a_flow_time_for_each_action_equals_a_shared_one_where_they_are_alike(path: Path):
    case = load_smolvla_case(path)
    network, past = case.network, case.prefix(0)
    x = case.tensors['noise'][:1]
    shared = network.time_conditioning(torch.tensor([0.6]))
    each = shared[None].expand(1, x.shape[1], -1)
    expected = network.velocity(x, past, shared)
    assert relative_error(network.velocity(x, past, each), expected) <= 1e-6
    # An action at another time changes those that see it, and none before it.
    late = each.clone()
    late[:, -1] = network.time_conditioning(torch.tensor([0.1]))
    changed = network.velocity(x, past, late)
    assert torch.equal(changed[:, :-1], network.velocity(x, past, each)[:, :-1])
    assert not torch.equal(changed[:, -1], expected[:, -1])


@entries
@pytest.mark.parametrize('poison', [1e4, float('nan')])
def test_what_is_hidden_changes_nothing(path: Path, b: int, poison: float):
    case = load_smolvla_case(path)
    network = case.network
    pixels, image_mask = case.images(b)
    hides = ~image_mask
    # A case without a hidden camera is given one.
    hides[-1] = True
    rows = case.rows(b)
    image_tokens = network.vision(pixels)
    past = network.prefix(image_tokens, ~hides, **rows)
    poisoned_images = torch.where(hides[:, None, None], poison, image_tokens)
    poisoned_rows = {**rows, 'tokens': torch.where(rows['token_mask'], rows['tokens'], 7)}
    poisoned = network.prefix(poisoned_images, ~hides, **poisoned_rows)
    x = case.tensors['noise'][b : b + 1]
    conditioning = network.time_conditioning(torch.tensor([0.5]))
    clean = network.velocity(x, past, conditioning)
    assert torch.isfinite(clean).all()
    assert torch.equal(network.velocity(x, poisoned, conditioning), clean)
    hidden = ~past['prefix_mask'][0]
    spoilt = {
        name: value if name == 'prefix_mask' else value.masked_fill(hidden[:, None], 1e4)
        for name, value in past.items()
    }
    assert torch.equal(network.velocity(x, spoilt, conditioning), clean)


@cases
def test_the_state_is_seen_by_the_actions_and_not_by_the_images(path: Path):
    case = load_smolvla_case(path)
    network = case.network
    rows = case.rows(0)
    pixels, image_mask = case.images(0)
    image_tokens = network.vision(pixels)
    past = network.prefix(image_tokens, image_mask, **rows)
    moved = network.prefix(image_tokens, image_mask, **{**rows, 'state': rows['state'] + 1.0})
    for name in past:
        if name != 'prefix_mask':
            # Equal to rounding: every token is computed beside the state's.
            assert relative_error(past[name][..., :-1, :], moved[name][..., :-1, :]) <= 1e-6
            assert relative_error(past[name][..., -1, :], moved[name][..., -1, :]) > 1e-3
    x, conditioning = case.tensors['noise'][:1], network.time_conditioning(torch.tensor([0.5]))
    assert (
        largest_error(
            network.velocity(x, past, conditioning), network.velocity(x, moved, conditioning)
        )
        > 1e-3
    )


@cases
def test_time_embedding_equals_the_reference(path: Path):
    case = load_smolvla_case(path)
    reference = case.tensors['time_embedding']
    ours = time_embedding(case.tensors['time_embedding_t'].float(), reference.shape[1])
    assert largest_error(ours, reference) <= 1e-6
