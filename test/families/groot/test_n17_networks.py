"""GR00T N1.7's networks against the training code's numbers, and against themselves uncached."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from groot_n17_cases import GrootN17Case, load_n17_case, n17_case_paths, n17_entries
from network_cases import relative_error
from vla_runtime.families.groot.interleaving import separated

from vla_runtime.families.flow_step import DenoiseStep
from vla_runtime.families.groot import time_table
from vla_runtime.families.groot.head import action_code, dit_code
from vla_runtime.inference.denoise import flow_times

pytestmark = pytest.mark.cases

# Relative to the largest value: float32's own noise is 2e-5 in the features.
BOUND = 5e-5

entries = pytest.mark.parametrize(
    ('path', 'b'), list(n17_entries()), ids=lambda value: getattr(value, 'stem', value)
)
cases = pytest.mark.parametrize('path', n17_case_paths(), ids=lambda path: path.stem)


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.inference_mode():
        yield


def embedded(case: GrootN17Case) -> tuple[torch.Tensor, torch.Tensor]:
    """Embeddings (1, P, (1 + D) * M) and mask (1, P)."""
    tokens = case.network.vision(case.pixels)
    return case.network.embed_prefix(tokens[None], case.visible[None], **case.rows())


def denoised(case: GrootN17Case) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(x, velocity) of every step, as the engines run them."""
    past, step = case.prefix(), DenoiseStep(case.network)
    x = case.tensors['noise'][case.b : case.b + 1]
    states = []
    for t in torch.tensor(flow_times(case.steps), dtype=torch.float32):
        table = case.network.time_conditioning(t[None])
        dt, none = torch.tensor(-1.0 / case.steps), torch.zeros(1, x.shape[1], 1)
        x, velocity = step(
            x, past, table, t, dt, torch.ones(1), torch.zeros_like(x), none, case.state()
        )
        states.append((x, velocity))
    return states


def of_entry(case: GrootN17Case, name: str) -> torch.Tensor:
    """A tensor of the case's images, those of this entry."""
    tensor, cameras = case.tensors[name], case.description['cameras']
    count = tensor.shape[-2] // (case.batch * cameras) * cameras
    return tensor[..., case.b * count : (case.b + 1) * count, :]


@entries
def test_patches_are_cut_in_the_reference_s_order(path: Path, b: int):
    case = load_n17_case(path, b)
    found = case.network.vision.cut(case.pixels)
    frames = torch.stack([found, found], dim=3)
    assert torch.equal(frames.flatten(2), case.patches)


@entries
def test_the_vision_tower_equals_the_reference(path: Path, b: int):
    case = load_n17_case(path, b)
    vision, width = case.network.vision, case.network.dims.language.width
    rows, columns = case.grid
    x = vision.patch_embedding(vision.cut(case.pixels))
    # The reference's patch embeddings are without their positions.
    assert relative_error(x.flatten(0, 1), of_entry(case, 'patch_embeddings')) <= BOUND
    x = x + vision.positions(rows, columns)
    for index, block in enumerate(vision.blocks):
        x = block(x, vision.rotary(rows, columns, x.device))
        reference = of_entry(case, 'vision_layers')[index]
        assert relative_error(x.flatten(0, 1), reference) <= BOUND, f'block {index}'
    image, *deep = vision(case.pixels).flatten(0, 1).split(width, dim=-1)
    assert relative_error(image, of_entry(case, 'image_features')) <= BOUND
    for index, tokens in enumerate(deep):
        reference = of_entry(case, 'deepstack_features')[index]
        assert relative_error(tokens, reference) <= BOUND, f'deepstack {index}'


@entries
def test_embeddings_positions_and_masks_equal_the_reference(path: Path, b: int):
    case = load_n17_case(path, b)
    network = case.network
    embeddings, mask = embedded(case)
    assert mask.all()
    width = network.dims.language.width
    reference = case.tensors['input_embeddings'][b, case.valid]
    assert relative_error(embeddings[0, :, :width], reference) <= BOUND
    positions = network.starts(mask)[0, :, None] + network.offsets(mask.device)
    assert torch.equal(positions.T, case.tensors['position_ids'][:, b, case.valid])
    images = torch.tensor([token == case.description['image_token'] for token in case.ids])
    assert torch.equal(images, case.tensors['image_mask'][b, case.valid])
    text, seen = separated(images[None], network.dims.image_places, network.dims.image_tokens)
    assert not text.any() and seen.all()


@entries
def test_features_and_what_the_head_reads_equal_the_reference(path: Path, b: int):
    case = load_n17_case(path, b)
    network = case.network
    embeddings, mask = embedded(case)
    x, *added = embeddings.split(network.dims.language.width, dim=-1)
    rotary = network.rotary_positions(network.starts(mask))
    seen = torch.ones(1, x.shape[1], x.shape[1], dtype=torch.bool).tril()
    for index, block in enumerate(network.language.layers):
        x = block(x, rotary, seen)
        reference = case.tensors['backbone_layers'][index, b, case.valid]
        assert relative_error(x[0], reference) <= BOUND, f'layer {index}'
        if index < len(added):
            x = x + added[index]
    features = network.features(embeddings, mask)
    reference = case.tensors['backbone_features'][b, case.valid]
    assert relative_error(features[0], reference) <= BOUND
    if not case.valid.all():
        # The head of the training code does not mask padding.
        return
    context = network.encode_context(features, mask)
    assert relative_error(context[0], case.tensors['vl_embeddings'][b]) <= BOUND
    places, count, past = network.dims.image_places, network.dims.image_tokens, case.prefix()
    for ours, theirs in (('key', 'cross_keys'), ('value', 'cross_values')):
        for order, block in enumerate(network.dims.cross_blocks):
            whole = case.tensors[theirs][order, b].transpose(0, 1)[None]
            parts = dict(zip(('text', 'images'), separated(whole, places, count), strict=True))
            part = 'text' if block in network.dims.text_blocks else 'images'
            index = network.readers[part].index(block)
            found = past[f'{part}_{ours}'][index].transpose(1, 2)
            assert relative_error(found, parts[part]) <= BOUND, (ours, block)


@entries
def test_each_steps_velocity_and_the_chunk_equal_the_reference(path: Path, b: int):
    case = load_n17_case(path, b)
    encoded = case.network.state_encoder(case.state()['state'])
    assert relative_error(encoded, case.tensors['state_features'][b]) <= BOUND
    steps = denoised(case)
    if case.valid.all():
        for k, (_, velocity) in enumerate(steps):
            # Ours runs from 1 to 0.
            assert relative_error(-velocity[0], case.tensors['v_t'][k, b]) <= BOUND, f'step {k}'
    assert relative_error(steps[-1][0][0], case.actions()) <= BOUND
    # The order of text and images matters.
    assert relative_error(steps[-1][0][0], case.tensors['actions_without_alternation'][b]) > 1e-3


@entries
def test_the_training_forward_equals_the_reference_and_the_cached_path(path: Path, b: int):
    case = load_n17_case(path, b)
    network, tensors = case.network, case.tensors
    x = tensors['train_x_t'][b : b + 1]
    reached = tensors['train_t_bucket'][b : b + 1]
    # A flow time in the middle of the bucket.
    conditioning = network.time_conditioning(1 - (reached + 0.5) / 1000)
    joint = network.joint_velocity(*embedded(case), x, conditioning, **case.state())
    cached = network.velocity(x, case.prefix(), conditioning, **case.state())
    assert relative_error(cached, joint) <= 1e-5
    if case.valid.all():
        assert relative_error(-joint[0], tensors['train_v'][b]) <= BOUND


@entries
def test_buckets_and_time_codes_equal_the_reference(path: Path, b: int):
    case = load_n17_case(path, b)
    times = flow_times(case.steps)
    assert time_table.bucket(times).tolist() == case.tensors['t'][:, b].tolist()
    buckets = case.tensors['time_embedding_t']
    code = torch.nn.functional.silu(case.network.time_in(dit_code(buckets)))
    found = case.network.time_out(code)
    assert relative_error(found, case.tensors['dit_time_embedding']) <= BOUND
    found = action_code(buckets, case.network.dims.dit_width)
    # The sine of an angle of 999 rounds by the angle's own last bit, 6e-5.
    assert float((found - case.tensors['action_time_encoding']).abs().max()) <= 1e-4


@entries
def test_padding_changes_nothing(path: Path, b: int):
    case, padded = load_n17_case(path, b), load_n17_case(path, b, padding=6)
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
    case = load_n17_case(path, b, padding=4)
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
        assert relative_error(clean, seen) > 10 * BOUND


@cases
def test_a_hidden_image_takes_no_positions(path: Path):
    case = load_n17_case(path, 0)
    network = case.network
    visible = case.visible.clone()
    visible[0] = False
    tokens = network.vision(case.pixels)
    _, mask = network.embed_prefix(tokens[None], visible[None], **case.rows())
    starts = network.starts(mask)
    text, _ = separated(starts, network.dims.image_places, network.dims.image_tokens)
    first = network.dims.image_places[0]
    assert torch.equal(text[0, : first + 1], torch.arange(first + 1))


@cases
def test_rows_together_equal_each_alone(path: Path):
    case = load_n17_case(path, 0, padding=4)
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
