"""Networks of every GR00T against the training code's numbers, and against themselves uncached."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from groot_cases import N15, N16, N17, load_groot_case
from joint_velocity import joint_velocity
from network_cases import each_case, each_entry, largest_error, relative_error

from vla_runtime.families.groot import time_table
from vla_runtime.families.groot.head import action_code, bucket, dit_code
from vla_runtime.inference.denoise import flow_times

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
def test_the_training_forward_equals_the_reference_and_the_cached_path(path: Path, b: int):
    case = load_groot_case(path, b)
    network, tensors = case.network, case.tensors
    x = tensors['train_x_t'][b : b + 1]
    reached = tensors['train_t_bucket'][b : b + 1]
    # A flow time in the middle of the bucket.
    conditioning = network.time_conditioning(1 - (reached + 0.5) / 1000)
    joint = joint_velocity(network, *case.embedded(), x, conditioning, **case.state())
    cached = network.velocity(x, case.prefix(), conditioning, **case.state())
    assert relative_error(cached, joint) <= 1e-5
    if case.masks_padding:
        assert relative_error(-joint[0], tensors['train_v'][b]) <= BOUND


@entries
def test_buckets_and_time_codes_equal_the_reference(path: Path, b: int):
    case = load_groot_case(path, b)
    times = flow_times(case.steps)
    assert time_table.bucket(times).tolist() == case.tensors['t'][:, b].tolist()
    buckets = case.tensors['time_embedding_t']
    width = case.network.dims.dit_width
    code = torch.nn.functional.silu(case.network.time_in(dit_code(buckets)))
    assert relative_error(case.network.time_out(code), case.tensors['dit_time_embedding']) <= BOUND
    reference = case.tensors['action_time_encoding']
    # The sine of an angle of 999 rounds by the angle's own last bit, 6e-5.
    assert largest_error(action_code(buckets, width), reference) <= 1e-4
    assert largest_error(time_table.action_code(buckets.numpy(), width), reference) <= 1e-4


def test_buckets_are_those_of_whole_numbers_for_every_number_of_steps():
    for steps in (*range(1, 301), 500, 999, 1000, 4096):
        exact = [k * 1000 // steps for k in range(steps)]
        times = flow_times(steps)
        assert time_table.bucket(times).tolist() == exact, steps
        in_float32 = times.astype(np.float32)
        assert time_table.bucket(in_float32).tolist() == exact, steps
        assert bucket(torch.from_numpy(in_float32)).tolist() == exact, steps
    naive = ((1.0 - flow_times(10)) * 1000).astype(int)
    assert naive.tolist() != [k * 100 for k in range(10)]


@entries
def test_padding_changes_nothing(path: Path, b: int):
    case, padded = load_groot_case(path, b), load_groot_case(path, b, padding=6)
    x, conditioning = case.tensors['noise'][b : b + 1], torch.tensor([0.5])
    velocities = [
        one.network.velocity(
            x, one.prefix(), one.network.time_conditioning(conditioning), **one.state()
        )
        for one in (case, padded)
    ]
    assert relative_error(*velocities) <= 1e-5


@entries
@pytest.mark.parametrize('poison', [1e4, float('nan')])
def test_what_is_hidden_changes_nothing(path: Path, b: int, poison: float):
    case = load_groot_case(path, b, padding=4)
    network, rows = case.network, case.rows()
    visible = case.visible.clone()
    visible[-1] = False
    tokens = network.vision(case.pixels)
    past = network.prefix(tokens, visible, **rows)
    poisoned = network.prefix(
        torch.where(visible[:, None, None], tokens, poison),
        visible,
        **{**rows, 'tokens': torch.where(rows['token_mask'], rows['tokens'], 7)},
    )
    x, conditioning = case.tensors['noise'][b : b + 1], torch.tensor([0.5])
    row = network.time_conditioning(conditioning)
    if visible.any():
        clean = network.velocity(x, past, row, **case.state())
        assert torch.isfinite(clean).all()
        assert torch.equal(network.velocity(x, poisoned, row, **case.state()), clean)
        seen = network.velocity(x, case.prefix(), row, **case.state())
        least = 100 if case.description['kind'] == N15 else 10
        assert relative_error(clean, seen) > least * BOUND


@cases
def test_rows_together_equal_each_alone(path: Path):
    case = load_groot_case(path, 0, padding=4)
    network, one = case.network, case.rows()
    other = {**one, 'tokens': one['tokens'].flip(1)}
    keep = network.dims.image_places[-1] + 2
    other['token_mask'] = one['token_mask'] & (torch.arange(one['tokens'].shape[1]) < keep)
    tokens = network.vision(case.pixels)
    rows = {name: torch.cat([one[name], other[name]]) for name in one}
    together = network.prefix(tokens, case.visible, **rows)
    state = case.state()['state']
    states = torch.cat([state, -state])
    noise = case.tensors['noise'][:1]
    x = torch.cat([noise, -noise, noise * 0.5])
    conditioning = network.time_conditioning(torch.tensor([0.75]))
    # Three samples of row 0, then the same three of row 1.
    velocity = network.velocity(x.repeat(2, 1, 1), together, conditioning, state=states)
    for row, inputs in enumerate((one, other)):
        alone = network.prefix(tokens, case.visible, **inputs)
        for index in range(3):
            expected = network.velocity(
                x[index : index + 1], alone, conditioning, state=states[row : row + 1]
            )
            assert relative_error(velocity[3 * row + index], expected[0]) <= BOUND


@cases
def test_a_flow_time_for_each_action_equals_a_shared_one_where_they_are_alike(path: Path):
    case = load_groot_case(path, 0)
    network, past, x = case.network, case.prefix(), case.tensors['noise'][:1]
    shared = network.time_conditioning(torch.tensor([0.6]))
    each = shared[None].expand(1, x.shape[1], -1).clone()
    expected = network.velocity(x, past, shared, **case.state())
    assert relative_error(network.velocity(x, past, each, **case.state()), expected) <= 1e-5
    each[:, 0] = network.time_conditioning(torch.tensor([0.1]))
    assert relative_error(network.velocity(x, past, each, **case.state()), expected) > 100 * BOUND
