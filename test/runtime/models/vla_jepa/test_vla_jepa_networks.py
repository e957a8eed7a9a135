"""VLA-JEPA against LeRobot's own numbers: images, prompts, every stage and every step."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from network_cases import each_case, each_entry, relative_error
from torch import Tensor
from vla_jepa_cases import VlaJepaCase, load_vla_jepa_case

from vla_runtime.declarations.vla_jepa import PROMPT, VLA_JEPA
from vla_runtime.family.declaration import prompt_marks
from vla_runtime.family.dit import DitTimeTable
from vla_runtime.family.listing import find_family
from vla_runtime.models.blocks.attention import causal_attention
from vla_runtime.processing.plain_images import signed_table, stretched_levels, to_levels
from vla_runtime.processing.prompts import PromptFormat, prompt_parts
from vla_runtime.processing.tokenizer import Tokenizer

pytestmark = pytest.mark.cases

# Relative to the largest value.
BOUND = 5e-5

entries = each_entry('vla_jepa')
cases = each_case('vla_jepa')


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.inference_mode():
        yield


def times(case: VlaJepaCase) -> Tensor:
    """Flow times of the steps, from 1 on."""
    return 1 - torch.arange(case.steps) / case.steps


@entries
def test_images_become_the_references_pixels(path: Path, b: int):
    case = load_vla_jepa_case(path, b)
    averaged = case.description['resize_images_to']
    for camera, expected in enumerate(case.pixels):
        out = np.empty(tuple(expected.shape), np.float32)
        raw = case.tensors[f'raw_image_{camera}'][b].numpy()
        levels = stretched_levels(raw, out.shape[1:], averaged and tuple(averaged))
        to_levels(levels, signed_table(), out)
        assert np.abs(out - expected.numpy()).max() <= 1e-5
        # Rounded to grey levels it would be another image.
        assert np.abs(np.rint(levels) - levels).max() > 0.1


@entries
def test_prompts_become_the_references_tokens(path: Path, b: int):
    case = load_vla_jepa_case(path, b)
    vocabulary = Tokenizer.load(path.with_suffix('.tokenizer.json'), bos=False)
    dims = case.network.dims
    layout = find_family('vla_jepa').layout(PromptFormat('chat', 'lerobot'), dims)
    task = case.description['tasks'][b]
    parts = prompt_parts(layout, PromptFormat('chat', 'lerobot'), task, None)
    pieces = layout.pieces(dims.cameras, parts, vocabulary.special)
    tokens, mask = vocabulary.encode_pieces(pieces, dims.prompt_length)
    expected = case.rows()
    assert tokens[mask].tolist() == expected['tokens'][expected['token_mask']].tolist()
    read = vocabulary.id_of('<|embodied_action|>')
    places = case.network.places(expected['token_mask'])[0]
    assert {int(token) for token in expected['tokens'][0, places]} == {read}
    assert int((expected['tokens'] == read).sum()) == dims.future_tokens


@entries
def test_every_layer_of_the_language_model_equals_the_reference(path: Path, b: int):
    case = load_vla_jepa_case(path, b)
    of, network = case.tensors, case.network
    rows = case.rows()
    images = network.vision(case.pixels)[None]
    embeddings, mask = network.embed_prefix(
        images, case.visible[None], rows['tokens'], rows['token_mask']
    )
    depth = len(network.dims.vision.deepstack)
    x, *added = embeddings.chunk(1 + depth, dim=-1)
    assert relative_error(x[0], of['input_embeddings'][b, case.valid]) <= BOUND
    rotation = network.rotary_positions(network.starts(mask))
    seen = causal_attention(mask)
    for layer, block in enumerate(network.language.blocks):
        x = block(x, seen, rotation)
        # Deepstack is added behind what the reference recorded.
        assert relative_error(x[0], of['language_layers'][layer, b, case.valid]) <= BOUND, layer
        x = x + added[layer] if layer < len(added) else x
    context = network.read(x, rows['token_mask'])
    assert relative_error(context[0], of['context'][b]) <= BOUND


@entries
def test_every_step_of_the_head_equals_the_reference(path: Path, b: int):
    case = load_vla_jepa_case(path, b)
    of, network, past = case.tensors, case.network, case.prefix()
    table = network.time_conditioning(times(case))
    width = network.dims.dit_width
    assert relative_error(network.encode_state(**case.state()), of['state_features'][b]) <= BOUND
    for k in range(case.steps):
        x, row = of['x_t'][k, b : b + 1], table[k : k + 1]
        actions = network.action_encoder(x, row[:, None, :width])
        assert relative_error(actions[0], of['action_features'][k, b]) <= BOUND, k
        found = network.velocity(x, past, row, **case.state())
        assert relative_error(-found[0], of['v_t'][k, b]) <= BOUND, k
    tokens, _ = network.embed_tokens(
        of['x_t'][0, b : b + 1], network.encode_state(**case.state()), table[:1]
    )
    assert relative_error(tokens[0], of['dit_input'][b]) <= BOUND


@entries
def test_a_policy_without_a_state_leaves_its_token_out(path: Path, b: int):
    case = load_vla_jepa_case(path, b)
    x, past = case.tensors['noise'][b : b + 1].clone(), case.prefix()
    for row in case.blind.time_conditioning(times(case))[:, None]:
        x = x - case.blind.velocity(x, past, row) / case.steps
    assert relative_error(x[0], case.tensors['actions_normalised_without_state'][b]) <= BOUND


def test_the_published_prompt_has_a_token_of_each_frame_and_those_that_are_read():
    marks = prompt_marks(VLA_JEPA)
    text = find_family('vla_jepa').layout(PromptFormat('chat', 'lerobot'), VLA_JEPA).text
    assert text.count('<|embodied_action|>') == VLA_JEPA.future_tokens
    assert [text.count(f'<|action_{n}|>') for n in range(4)] == [8, 8, 8, 0]
    assert all(mark in PROMPT.text and mark not in text for mark in marks)


@cases
def test_the_time_table_is_that_of_either_layout(path: Path):
    case = load_vla_jepa_case(path, 0)
    network = case.network

    class Weights:
        def read(self, name: str) -> np.ndarray:
            return network.state_dict()[name].numpy()

    table = DitTimeTable(network.dims, Weights())  # type: ignore[arg-type]
    found = table(times(case).numpy())
    assert found.shape == (case.steps, table.width)
    assert relative_error(torch.from_numpy(found), network.time_conditioning(times(case))) <= 1e-5
