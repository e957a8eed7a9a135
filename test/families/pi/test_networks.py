"""The networks against LeRobot's own numbers, and against themselves without a cache."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from joint_velocity import joint_velocity
from network_cases import (
    NetworkCase,
    batch_entries,
    largest_error,
    load_network_case,
    network_case_paths,
)
from paths import ROOT
from reference_cases import find
from safetensors.torch import load_file
from tiny_policy import tiny_dims

from vla_runtime.families.blocks.action_time import time_embedding
from vla_runtime.families.flow_network import build_network, empty_network
from vla_runtime.families.flow_step import DenoiseStep
from vla_runtime.families.pi.dimensions import PI0, PI05
from vla_runtime.inference.denoise import flow_times

pytestmark = pytest.mark.cases

entries = pytest.mark.parametrize(
    ('path', 'b'), list(batch_entries()), ids=lambda value: getattr(value, 'stem', value)
)


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.inference_mode():
        yield


def prefix_of(case: NetworkCase, b: int, prompt: str = ''):
    pixels, image_mask = case.images(b)
    tokens, token_mask = case.prompt(b, prompt)
    image_tokens = case.network.vision(pixels)
    past = case.network.prefix(
        image_tokens, image_mask, tokens=tokens[None], token_mask=token_mask[None]
    )
    return image_tokens, past


@entries
def test_prefix_embeddings_equal_the_reference(path: Path, b: int):
    case = load_network_case(path)
    pixels, image_mask = case.images(b)
    tokens, token_mask = case.prompt(b)
    embeddings, mask = case.network.embed_prefix(
        case.network.vision(pixels)[None], image_mask[None], tokens[None], token_mask[None]
    )
    assert largest_error(embeddings[0], case.tensors['prefix_embeddings'][b]) <= 2e-5
    assert torch.equal(mask[0].cumsum(0) - 1, case.tensors['prefix_position_ids'][b])


@entries
def test_keys_and_values_equal_the_reference_where_anything_may_look(path: Path, b: int):
    # The reference computes something at padded places too; nothing ever reads it (see the
    # poisoning test below), so only valid places are compared.
    case = load_network_case(path)
    _, past = prefix_of(case, b)
    mask = past['prefix_mask']
    for ours, name in ((past['past_key'], 'prefix_keys'), (past['past_value'], 'prefix_values')):
        reference = case.tensors[name][:, b : b + 1]
        assert ours.shape == reference.shape
        valid = mask[0]
        assert valid.any()
        assert largest_error(ours[..., valid, :], reference[..., valid, :]) <= 2e-5


@entries
def test_each_steps_velocity_and_the_chunk_equal_the_reference(path: Path, b: int):
    case = load_network_case(path)
    _, past = prefix_of(case, b)
    step = DenoiseStep(case.network)
    times = torch.tensor(flow_times(case.steps), dtype=torch.float32)
    assert torch.equal(times, case.tensors['t'][:, b])
    x = case.tensors['noise'][b : b + 1]
    for k, t in enumerate(times):
        table = case.network.time_conditioning(t[None])
        x, velocity = step(
            x,
            past,
            table,
            t,
            torch.tensor(-1.0 / case.steps),
            torch.ones(1),
            torch.zeros_like(x),
            torch.zeros(1, x.shape[1], 1),
            case.head_inputs(b),
        )
        assert largest_error(velocity[0], case.tensors['v_t'][k, b]) <= 2e-5, f'step {k}'
    assert largest_error(x[0], case.tensors['actions'][b]) <= 2e-5


@entries
def test_joint_forward_equals_the_cached_path_and_the_reference(path: Path, b: int):
    case = load_network_case(path)
    network, tensors = case.network, case.tensors
    image_tokens, past = prefix_of(case, b)
    _, image_mask = case.images(b)
    tokens, token_mask = case.prompt(b)
    x = tensors['joint_x_t'][b : b + 1]
    conditioning = network.time_conditioning(tensors['joint_t'][b : b + 1])
    embeddings, joint_mask = network.embed_prefix(
        image_tokens[None], image_mask[None], tokens[None], token_mask[None]
    )
    joint = joint_velocity(network, embeddings, joint_mask, x, conditioning, **case.head_inputs(b))
    cached = network.velocity(x, past, conditioning, **case.head_inputs(b))
    assert largest_error(joint, cached) <= 1e-5
    # The reference states the squared error of its velocity; an error e of ours changes it by
    # 2 e |u - v| to first order.
    difference = (tensors['joint_u_t'][b] - joint[0]).abs()
    bound = 1e-5 * (2 * difference + 1e-5) + 1e-6 * difference.square()
    assert (difference.square() - tensors['joint_sq_err'][b]).abs().le(bound).all()


@pytest.mark.parametrize('path', network_case_paths(), ids=lambda path: path.stem)
def test_a_batched_joint_forward_equals_one_entry_at_a_time(path: Path):
    case = load_network_case(path)
    network = case.network
    (one_pixels, one_mask), (tokens, token_mask) = case.images(0), case.prompt(0)
    # A second entry that differs in everything: images swapped, shorter prompt, other x.
    pixels = torch.stack([one_pixels, one_pixels.flip(0)])
    image_mask = torch.stack([one_mask, torch.ones_like(one_mask)])
    shorter = token_mask & (torch.arange(len(tokens)) < int(token_mask.sum()) - 2)
    image_tokens = network.vision(pixels.flatten(0, 1)).unflatten(0, pixels.shape[:2])
    embeddings, mask = network.embed_prefix(
        image_tokens, image_mask, tokens.expand(2, -1), torch.stack([token_mask, shorter])
    )
    x = torch.cat([case.tensors['noise'][:1], case.tensors['actions'][:1]])
    conditioning = network.time_conditioning(torch.tensor([0.7, 0.3]))
    rows = {name: torch.cat([value, -value]) for name, value in case.head_inputs(0).items()}
    together = joint_velocity(network, embeddings, mask, x, conditioning, **rows)
    for b in range(2):
        s = slice(b, b + 1)
        one = {name: value[s] for name, value in rows.items()}
        alone = joint_velocity(network, embeddings[s], mask[s], x[s], conditioning[s], **one)
        assert largest_error(together[s], alone) <= 2e-5


@entries
def test_poisoned_padding_and_masked_cameras_change_nothing(path: Path, b: int):
    case = load_network_case(path)
    image_tokens, past = prefix_of(case, b)
    mask = past['prefix_mask']
    _, image_mask = case.images(b)
    tokens, token_mask = case.prompt(b)
    if mask.all():
        pytest.skip('nothing is padded or masked in this case')
    poisoned_images = torch.where(image_mask[:, None, None], image_tokens, 1e4)
    poisoned_tokens = torch.where(token_mask, tokens, 7)
    poisoned = case.network.prefix(
        poisoned_images, image_mask, tokens=poisoned_tokens[None], token_mask=token_mask[None]
    )
    hidden = ~mask[0]
    spoilt = {name: tensor.clone() for name, tensor in past.items()}
    spoilt['past_key'][..., hidden, :], spoilt['past_value'][..., hidden, :] = 1e4, -1e4
    x = case.tensors['noise'][b : b + 1]
    conditioning = case.network.time_conditioning(torch.tensor([0.5]))
    clean, *others = (
        case.network.velocity(x, prefix, conditioning, **case.head_inputs(b))
        for prefix in (past, poisoned, spoilt)
    )
    assert all(torch.equal(other, clean) for other in others)


@pytest.mark.parametrize('path', find('processing_*.safetensors'), ids=lambda path: path.stem)
def test_time_embedding_equals_the_reference(path: Path):
    tensors = load_file(path)
    names = [name for name in tensors if name.startswith('time_embedding_')]
    assert names
    for name in names:
        ours = time_embedding(tensors['time_values'], int(name.rpartition('_')[2]))
        assert largest_error(ours, tensors[name]) <= 1e-6


@pytest.mark.parametrize('path', network_case_paths('pi05'), ids=lambda path: path.stem)
def test_the_time_table_is_every_norms_modulation_in_order(path: Path):
    network = load_network_case(path).network
    t = torch.tensor([0.37])
    embedded = time_embedding(t, network.dims.expert.width)
    silu = torch.nn.functional.silu
    condition = silu(network.time_out(silu(network.time_in(embedded))))
    first = network.expert.layers[0].input_norm.modulation(condition)
    final = network.expert.norm.modulation(condition)
    split = network.modulations(network.time_conditioning(t))
    assert len(split) == 2 * network.dims.expert.depth + 1
    for modulation, projected in ((split[0], first), (split[-1], final)):
        scale, shift, gate = projected[:, None].chunk(3, dim=-1)
        for found, expected in zip(modulation, (1.0 + scale, shift, gate), strict=True):
            assert largest_error(found, expected) <= 1e-6


@pytest.mark.parametrize(
    ('family', 'dims', 'expected'),
    [('pi05', PI05, 3_353_433_872), ('pi0', PI0, 3_238_048_528)],
)
def test_full_size_networks_have_the_published_size(family, dims, expected):
    with torch.device('meta'):
        network = build_network(family, dims)
    count = sum(parameter.numel() for parameter in network.parameters())
    assert count == expected
    if family == 'pi05':
        # Published checkpoints also carry the expert's unused vocabulary head.
        head = dims.vocabulary * dims.expert.width
        assert round((count + head) / 1e9, 2) == 3.62


@pytest.mark.parametrize('family', ['pi05', 'pi0'])
def test_an_empty_network_has_the_names_and_shapes_of_a_real_one(family):
    empty = empty_network(family, tiny_dims(family)).state_dict()
    real = build_network(family, tiny_dims(family)).state_dict()
    assert {name: value.shape for name, value in empty.items()} == {
        name: value.shape for name, value in real.items()
    }
    assert {value.device.type for value in empty.values()} == {'meta'}


@pytest.mark.thorough
def test_an_empty_network_needs_nothing_of_pytorchs_compiler():
    code = (
        'import sys; from vla_runtime.families.pi.dimensions import PI05, PI0;'
        'from vla_runtime.families.flow_network import empty_network;'
        'empty_network("pi05", PI05); empty_network("pi0", PI0);'
        'sys.exit("torch._dynamo" in sys.modules or "sympy" in sys.modules)'
    )
    assert subprocess.run([sys.executable, '-c', code], cwd=ROOT, timeout=120).returncode == 0


def test_prefix_key_values_of_a_full_size_policy_take_35_7_megabytes():
    language = PI05.language
    numbers = 2 * language.depth * language.num_kv_heads * PI05.prefix_length * language.head_dim
    assert PI05.prefix_length == 968
    assert numbers * 4 / 1e6 == pytest.approx(35.7, abs=0.05)
