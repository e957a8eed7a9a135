"""GR00T N1.7's networks against the training code's numbers, and against themselves uncached."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from groot_cases import N17, GrootN17Case, load_groot_case
from network_cases import denoised, each_case, each_entry, relative_error

from vla_runtime.families.blocks.interleaving import separated

pytestmark = pytest.mark.cases

# Relative to the largest value: float32's own noise is 2e-5 in the features.
BOUND = 5e-5

entries = each_entry(N17)
cases = each_case(N17)


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.inference_mode():
        yield


def of_entry(case: GrootN17Case, name: str) -> torch.Tensor:
    """A tensor of the case's images, those of this entry."""
    tensor, cameras = case.tensors[name], case.description['cameras']
    count = tensor.shape[-2] // (case.batch * cameras) * cameras
    return tensor[..., case.b * count : (case.b + 1) * count, :]


@entries
def test_patches_are_cut_in_the_reference_s_order(path: Path, b: int):
    case = load_groot_case(path, b)
    found = case.network.vision.cut(case.pixels)
    frames = torch.stack([found, found], dim=3)
    assert torch.equal(frames.flatten(2), case.patches)


@entries
def test_the_vision_tower_equals_the_reference(path: Path, b: int):
    case = load_groot_case(path, b)
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
    case = load_groot_case(path, b)
    network = case.network
    embeddings, mask = case.embedded()
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
    case = load_groot_case(path, b)
    network = case.network
    embeddings, mask = case.embedded()
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
    case = load_groot_case(path, b)
    encoded = case.network.state_encoder(case.state()['state'])
    assert relative_error(encoded, case.tensors['state_features'][b]) <= BOUND
    noise = case.tensors['noise'][b : b + 1]
    steps = denoised(case.network, case.prefix(), noise, case.steps, rows=case.state())
    if case.valid.all():
        for k, (_, velocity) in enumerate(steps):
            # Ours runs from 1 to 0.
            assert relative_error(-velocity[0], case.tensors['v_t'][k, b]) <= BOUND, f'step {k}'
    assert relative_error(steps[-1][0][0], case.actions()) <= BOUND
    # The order of text and images matters.
    assert relative_error(steps[-1][0][0], case.tensors['actions_without_alternation'][b]) > 1e-3


@cases
def test_a_hidden_image_takes_no_positions(path: Path):
    case = load_groot_case(path, 0)
    network = case.network
    visible = case.visible.clone()
    visible[0] = False
    tokens = network.vision(case.pixels)
    _, mask = network.embed_prefix(tokens[None], visible[None], **case.rows())
    starts = network.starts(mask)
    text, _ = separated(starts, network.dims.image_places, network.dims.image_tokens)
    first = network.dims.image_places[0]
    assert torch.equal(text[0, : first + 1], torch.arange(first + 1))
