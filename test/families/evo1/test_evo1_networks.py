"""Evo-1's networks against LeRobot's own numbers, and against themselves without a cache."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from evo1_cases import Evo1Case, load_evo1_case
from network_cases import (
    committed_plan,
    denoised,
    each_case,
    each_entry,
    largest_error,
    network_case_paths,
    relative_error,
)
from torch.nn import functional as F

from vla_runtime.families.evo1 import time_table
from vla_runtime.families.evo1.networks import time_rows
from vla_runtime.inference.denoise import flow_times

pytestmark = pytest.mark.cases

# Relative to the largest value: float32's own noise is up to 3e-6 in the actions.
BOUND = 5e-5

entries = each_entry('evo1')
cases = each_case('evo1')


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.inference_mode():
        yield


def features_of(case: Evo1Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Embeddings, mask and features, without the batch axis."""
    rows = case.rows()
    images = torch.where(case.image_mask[:, None, None], case.network.vision(case.pixels), 0.0)
    embeddings, mask = case.network.embed_prefix(
        images[None], case.image_mask[None], rows['tokens'], rows['token_mask']
    )
    return embeddings[0], mask[0], case.network.encode_prefix(embeddings, mask)[0]


def chunk_of(case: Evo1Case, plan=None, weights=None) -> list[tuple[torch.Tensor, torch.Tensor]]:
    noise = case.of('noise')[None].clone()
    noise[..., case.network.dims.real_actions :] = 0.0
    return denoised(case.network, case.prefix(), noise, case.steps, plan, weights)


@entries
def test_image_features_equal_the_reference(path: Path, b: int):
    case = load_evo1_case(path, b)
    views = slice(b * case.views, (b + 1) * case.views)
    ours = case.network.vision.features(case.pixels)
    assert relative_error(ours, case.tensors['vision_features'][views]) <= BOUND
    ours = case.network.vision(case.pixels)
    assert relative_error(ours, case.tensors['image_features'][views]) <= BOUND


@entries
def test_embeddings_sight_and_features_equal_the_reference(path: Path, b: int):
    case = load_evo1_case(path, b)
    embeddings, mask, features = features_of(case)
    places = case.places
    theirs = case.of('context_valid')[places]
    assert torch.equal(mask[: len(places)], theirs)
    assert not mask[len(places) :].any()
    for ours, name in ((embeddings, 'input_embeddings'), (features, 'backbone_features')):
        reference = case.of(name)[places][theirs]
        assert relative_error(ours[: len(places)][theirs], reference) <= BOUND, name


@entries
def test_context_keys_and_values_equal_the_reference(path: Path, b: int):
    case = load_evo1_case(path, b)
    *_, features = features_of(case)
    places, state = case.places, case.rows()['state']
    theirs = case.of('context_valid')[places]
    # The state token is the last place of both.
    ours = torch.cat([theirs.nonzero()[:, 0], torch.tensor([features.shape[0]])])
    last = torch.tensor([case.of('context').shape[0] - 1])
    reference = torch.cat([places[theirs], last])
    context = case.network.context(features[None], state)[0]
    assert relative_error(context[ours], case.of('context')[reference]) <= BOUND
    past = case.prefix()
    for name, recorded in (('cross_key', 'cross_keys'), ('cross_value', 'cross_values')):
        found = past[name][:, 0][:, :, ours]
        expected = case.tensors[recorded][:, b][:, :, reference]
        assert relative_error(found, expected) <= BOUND, name


@entries
def test_velocities_and_the_chunk_equal_the_reference(path: Path, b: int):
    case = load_evo1_case(path, b)
    steps = chunk_of(case)
    for k, (_, velocity) in enumerate(steps):
        # Evo-1's velocity points the other way.
        assert relative_error(-velocity[0], case.tensors['v_t'][k, b]) <= BOUND, f'step {k}'
    assert relative_error(steps[-1][0][0], case.of('actions')) <= BOUND
    # Without the mask of the context the reference says something else.
    if not case.of('context_valid').all():
        assert largest_error(steps[-1][0][0], case.of('actions_without_context_mask')) > 100 * BOUND


@entries
def test_padded_actions_stay_out(path: Path, b: int):
    case = load_evo1_case(path, b)
    network, real = case.network, case.network.dims.real_actions
    if real == network.dims.action_dim:
        pytest.skip('no padded action dimensions')
    x = case.of('noise')[None].clone()
    conditioning = network.time_conditioning(torch.tensor([0.5]))
    velocity = network.velocity(x, case.prefix(), conditioning)
    x[..., real:] = float('nan')
    assert torch.equal(network.velocity(x, case.prefix(), conditioning), velocity)
    assert not velocity[..., real:].any()


@entries
@pytest.mark.parametrize('schedule', ['linear', 'exp'])
def test_real_time_chunking_equals_the_reference(path: Path, b: int, schedule: str):
    case = load_evo1_case(path, b)
    if f'rtc_actions_{schedule}' not in case.tensors:
        pytest.skip('the case has no such chunks')
    previous = case.of('rtc_previous_chunk')
    plan, weights = committed_plan(previous, case.network.dims.horizon, case.steps, schedule)
    reference = case.of(f'rtc_actions_{schedule}')
    tied = chunk_of(case, plan, weights)[-1][0][0]
    assert relative_error(tied, reference) <= BOUND
    assert relative_error(chunk_of(case)[-1][0][0], reference) > 100 * BOUND


@entries
def test_the_training_forward_equals_the_reference(path: Path, b: int):
    case = load_evo1_case(path, b)
    t = case.of('train_t')
    x = (1 - t) * case.of('train_noise') + t * case.of('train_actions')
    row = case.network.time_rows[0, case.of('train_t_index').reshape(1)]
    velocity = -case.network.velocity(x[None], case.prefix(), row)[0]
    real = case.network.dims.real_actions
    assert relative_error(velocity[:, :real], case.of('train_v')[:, :real]) <= BOUND


@entries
def test_the_cached_path_equals_attention_over_the_whole_context(path: Path, b: int):
    case = load_evo1_case(path, b)
    network = case.network
    *_, features = features_of(case)
    mask = case.prefix()['prefix_mask']
    context = network.context(features[None], case.rows()['state'])
    x = case.of('noise')[None]
    conditioning = network.time_conditioning(torch.tensor([0.7]))
    real = torch.arange(network.dims.action_dim) < network.dims.real_actions
    h = network.action_encoder(x * real, network.action_positions)
    for block in network.layers:
        parts = [getattr(block.attention, name) for name in ('q', 'k', 'v')]
        attended, _ = F.multi_head_attention_forward(
            block.norm1(h).transpose(0, 1),
            context.transpose(0, 1),
            context.transpose(0, 1),
            h.shape[2],
            network.dims.head.num_heads,
            torch.cat([part.weight for part in parts]),
            torch.cat([part.bias for part in parts]),
            None,
            None,
            False,
            0.0,
            block.attention.out.weight,
            block.attention.out.bias,
            key_padding_mask=~mask,
        )
        h = h + attended.transpose(0, 1)
        h = h + block.mlp(block.norm2(h) + conditioning[:, None])
    joint = network.velocity_head(network.pool(network.norm(h).flatten(1)))
    joint = -joint.view_as(x) * real
    assert relative_error(network.velocity(x, case.prefix(), conditioning), joint) <= 1e-5


@entries
@pytest.mark.parametrize('poison', [1e4, float('nan')])
def test_what_is_hidden_changes_nothing(path: Path, b: int, poison: float):
    case = load_evo1_case(path, b)
    network, rows = case.network, case.rows()
    hides = ~case.image_mask
    # A case without a hidden camera is given one.
    hides[-1] = True
    rows['token_mask'] = rows['token_mask'].clone()
    rows['token_mask'][:, -1] = False
    image_tokens = network.vision(case.pixels)
    past = network.prefix(image_tokens, ~hides, **rows)
    poisoned = network.prefix(
        torch.where(hides[:, None, None], poison, image_tokens),
        ~hides,
        **{**rows, 'tokens': torch.where(rows['token_mask'], rows['tokens'], 7)},
    )
    x = case.of('noise')[None]
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
def test_rows_together_and_several_samples_equal_each_alone(path: Path):
    case = load_evo1_case(path, 0)
    network, row = case.network, case.rows()
    rows = {name: torch.cat([value, value]) for name, value in row.items()}
    rows['token_mask'][1, -1:] = False
    rows['state'][1] *= -1
    image_tokens = network.vision(case.pixels)
    together = network.prefix(image_tokens, case.image_mask, **rows)
    noise, conditioning = case.of('noise')[None], network.time_conditioning(torch.tensor([0.4]))
    x = torch.cat([noise, -noise, noise * 0.5])
    # Three samples of row 0, then the same three of row 1.
    velocity = network.velocity(x.repeat(2, 1, 1), together, conditioning)
    assert relative_error(velocity[0], velocity[3]) > 100 * BOUND, 'the rows differ'
    for index in range(2):
        one = {name: value[index : index + 1] for name, value in rows.items()}
        alone = network.prefix(image_tokens, case.image_mask, **one)
        for sample in range(3):
            expected = network.velocity(x[sample : sample + 1], alone, conditioning)[0]
            assert relative_error(velocity[3 * index + sample], expected) <= BOUND


@cases
def test_a_flow_time_for_each_action_equals_a_shared_one_where_they_are_alike(path: Path):
    case = load_evo1_case(path, 0)
    network, past, x = case.network, case.prefix(), case.of('noise')[None]
    shared = network.time_conditioning(torch.tensor([0.6]))
    each = shared[None].expand(1, x.shape[1], -1)
    expected = network.velocity(x, past, shared)
    assert relative_error(network.velocity(x, past, each), expected) <= 1e-6
    late = each.clone()
    late[:, -1] = network.time_conditioning(torch.tensor([0.1]))
    assert not torch.equal(network.velocity(x, past, late), expected)


@cases
def test_time_rows_and_embedding_equal_the_reference(path: Path):
    case = load_evo1_case(path, 0)
    times = torch.tensor(flow_times(case.steps), dtype=torch.float32)
    assert torch.equal(1 - times, case.tensors['t'].float())
    assert torch.equal(time_rows(times), case.tensors['t_index'])
    assert largest_error(case.network.time_conditioning(times), case.tensors['time_embedding']) == 0


def test_time_rows_of_every_schedule_are_computed_as_from_whole_numbers():
    for steps in range(1, 101):
        times = flow_times(steps)
        expected = [min(int(i / steps * 999), 999) for i in range(steps)]
        assert time_table.time_rows(times).tolist() == expected, steps
        found = time_rows(torch.tensor(times, dtype=torch.float32))
        assert found.tolist() == expected, steps
    # Known actions are at flow time 0: the last row.
    assert time_table.time_rows(torch.zeros(1).numpy()).tolist() == [999]
    assert time_rows(torch.zeros(1)).tolist() == [999]


def test_a_wrong_size_is_named():
    dims = load_evo1_case(network_case_paths('evo1')[0], 0).network.dims
    for changes, words in (
        ({'image_places': dims.image_places[:-1]}, 'image_places has'),
        ({'pixel_shuffle': 3}, 'pixel_shuffle 3 does not divide'),
        ({'horizon': 1}, 'horizon 1'),
        ({'real_actions': 0}, 'real_actions 0'),
        ({'image_places': (0, *dims.image_places[1:])}, 'image_places begins with 0'),
    ):
        with pytest.raises(ValueError, match=words):
            replace(dims, **changes)
