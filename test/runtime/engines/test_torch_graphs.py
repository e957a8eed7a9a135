"""The torch engine with CUDA graphs, recorded and replayed on a CPU, against eager runs.

The eager engine's network is not joined: its layers run one by one.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from joined_networks import EXPERTS, in_precision, kernel_of_lengths
from network_cases import random_network
from plain_lengths import attend_by_lengths
from recorded_graphs import RecordedGraphs
from thorough import thorough_but
from tiny_policy import tiny_dims

from vla_runtime.engines.protocol import StepInputs
from vla_runtime.engines.torch import cuda_graph
from vla_runtime.engines.torch import engine as torch_engine
from vla_runtime.engines.torch.cuda_graph import Capturer, vision_of
from vla_runtime.engines.torch.engine import TorchEngine
from vla_runtime.family.declaration import TOKEN_MASK, image_sizes
from vla_runtime.family.step_schedule import StepSchedule
from vla_runtime.inference.denoise import denoise, denoise_by_step, flow_times
from vla_runtime.inference.settings import row_weights
from vla_runtime.models.base.expert_network import ExpertNetwork
from vla_runtime.models.base.flow_network import FlowNetwork, build_network
from vla_runtime.models.blocks.expert_attention import SelfLayers, _PackedKeys
from vla_runtime.models.blocks.key_lengths import FirstKeys, Kernel
from vla_runtime.models.shapes.traced_shapes import row_tensors

STEPS = 3
FLOWS = ('pi05', 'pi0', 'smolvla', 'groot_n15', 'groot_n16', 'groot_n17', 'evo1')
# The others' networks are captured and laid out by the same lines.
BY_DEFAULT = ('pi05', 'smolvla', 'groot_n17')
flows = pytest.mark.parametrize('family', thorough_but(BY_DEFAULT, FLOWS))
experts = pytest.mark.parametrize('family', thorough_but(['pi05', 'smolvla'], EXPERTS))
# Rounding, through guidance and three steps; what is wrong is wrong by 1e-2.
BOUND = 1e-4


def seeded_network(family: str, dtype: torch.dtype = torch.float32, **changes) -> FlowNetwork:
    dims = replace(tiny_dims(family, horizon=4), **changes)
    if family == 'act':
        # As it is initialised: variances of frozen norms are not negative.
        torch.manual_seed(0)
        return build_network(family, dims)
    with torch.no_grad():
        network = random_network(family, dims)
    return in_precision(network, dtype)


@pytest.fixture
def engines(monkeypatch):
    """Return an engine of a family with graphs, and an eager one of the same weights, not joined.

    With a `kernel`, the network of the first attends by lengths.
    """

    def make(
        family: str, kernel: Kernel | None = None, **changes
    ) -> tuple[TorchEngine, TorchEngine]:
        network, one_by_one = (seeded_network(family, **changes) for _ in range(2))
        one_by_one.join = lambda static_shapes: None
        eager = TorchEngine(one_by_one)
        with monkeypatch.context() as patch:
            patch.setattr(torch_engine, 'captures_graphs', lambda device: True)
            patch.setattr(cuda_graph, 'CudaGraphCapture', RecordedGraphs)
            with nullcontext() if kernel is None else kernel_of_lengths(kernel):
                graphed = TorchEngine(network)
        steps = 1 if network.family.head == 'single' else STEPS
        for engine in (graphed, eager):
            engine.set_schedule(flow_times(steps), -1 / steps)
        return graphed, eager

    return make


def rows_of(inputs, rows: int, random: np.random.Generator) -> dict[str, np.ndarray]:
    """Random tokens, which padding has too, prompts of different lengths, and a random state."""
    found = {}
    for name, tensor in row_tensors(inputs, rows, 'cpu').items():
        shape = tuple(tensor.shape)
        if tensor.dtype == torch.bool:
            lengths = random.integers(shape[1] // 2, shape[1] + 1, (rows, 1))
            found[name] = np.arange(shape[1]) < lengths
        elif tensor.dtype == torch.int64:
            found[name] = random.integers(0, 264, shape)
        else:
            # The same robot in every row.
            found[name] = np.tile(random.normal(size=(1, *shape[1:])), (rows, 1)).astype(np.float32)
    return found


def encode(
    engine: TorchEngine, seed: int, rows: int, slot: int, valid: list[list[int]] | None = None
) -> None:
    """New images and prompts; `valid` are the places of the tokens of each row's prompt."""
    random = np.random.default_rng(seed)
    dims, family = engine.dims, engine._network.family
    for camera, size in enumerate(image_sizes(dims)):
        engine.encode_image(camera, random.uniform(-1, 1, (3, *size)).astype(np.float32))
    # One camera at most is hidden.
    image_mask = np.arange(dims.cameras) != random.integers(0, 2 * dims.cameras)
    inputs = rows_of(family.prefix_inputs(dims), rows, random)
    if valid is not None:
        for row, places in enumerate(valid):
            inputs[TOKEN_MASK][row] = np.isin(np.arange(dims.prompt_length), places)
    engine.encode_prefix(image_mask, inputs, slot)


def inputs_for(engine: TorchEngine, seed: int, rows: int, **changes) -> StepInputs:
    random, dims = np.random.default_rng(seed), engine.dims
    steps = len(engine._schedules.require().times)
    x, plan = random.normal(size=(2, dims.horizon, dims.action_dim)).astype(np.float32)
    head = rows_of(engine._network.family.head_inputs(dims), rows, random)
    weight = random.uniform(0, 1, (steps, dims.horizon)).astype(np.float32)
    row_weight = changes.pop('row_weight', row_weights(2.0 if rows == 2 else None))
    return StepInputs(x, row_weight, plan, weight, head, **changes)


def chunk(engine: TorchEngine, seed: int, rows: int, slot: int, **changes) -> np.ndarray:
    engine.use_prefix(rows, slot)
    return denoise(engine, inputs_for(engine, seed, rows, **changes))


def assert_close(found: np.ndarray, expected: np.ndarray) -> None:
    assert np.abs(found - expected).max() <= BOUND * max(1.0, np.abs(expected).max())


@flows
@pytest.mark.parametrize('rows', [1, 2])
def test_chunks_of_changing_observations_are_those_of_eager_runs(engines, family, rows):
    graphed, eager = engines(family)
    variants = ({}, {'clean_actions': 2}, {'jacobian': True})
    for seed in range(3):
        for engine in (graphed, eager):
            encode(engine, seed, rows, slot=0)
        for variant in variants:
            found, expected = (chunk(e, seed, rows, 0, **variant) for e in (graphed, eager))
            assert_close(found, expected)
    assert set(graphed.cuda_graph.values()) == {'captured'}


def test_graphs_that_may_replay_at_once_share_no_capture_and_so_no_memory(engines):
    """Those of the cameras, of the prefix and of the denoise loop."""
    graphed, _ = engines('pi05')
    captures = {id(capturer._capture) for capturer in graphed._capturers.values()}
    assert len(captures) == graphed.dims.cameras + 3


def test_a_camera_whose_capture_fails_is_reported_and_named(engines, caplog):
    graphed, eager = engines('pi05')
    last = graphed.dims.cameras - 1
    assert last > 0

    def fail(work):
        raise RuntimeError('not today')

    graphed._capturers[vision_of(last)]._capture = fail
    for engine in (graphed, eager):
        encode(engine, 0, rows=1, slot=0)
    assert_close(*(chunk(engine, 0, 1, 0) for engine in (graphed, eager)))
    assert graphed.cuda_graph['vision'] == 'eager: failed while capturing'
    assert f'vision of camera {last} runs without a CUDA graph' in caplog.text


def test_a_camera_that_was_not_seen_yet_says_nothing_of_the_others(engines):
    graphed, _ = engines('pi05')
    assert graphed.cuda_graph['vision'] == 'eager'
    size = image_sizes(graphed.dims)[0]
    graphed.encode_image(0, np.zeros((3, *size), dtype=np.float32))
    assert graphed.cuda_graph['vision'] == 'captured'


def test_a_head_of_one_pass_replays_as_it_runs(engines):
    graphed, eager = engines('act')
    for seed in range(3):
        for engine in (graphed, eager):
            encode(engine, seed, 1, slot=0)
        assert_close(chunk(graphed, seed, 1, 0), chunk(eager, seed, 1, 0))
    assert set(graphed.cuda_graph.values()) == {'captured'}


@flows
def test_each_slot_is_laid_out_apart_and_again_when_it_has_changed(engines, family):
    graphed, eager = engines(family)
    held = {}
    for seed, (rows, slot) in enumerate([(1, 0), (1, 1), (2, 0), (1, 0), (2, 1), (1, 1), (2, 0)]):
        for engine in (graphed, eager):
            encode(engine, seed, rows, slot)
        held[rows, slot] = seed
        for of_rows, of_slot in held:
            found, expected = (chunk(e, 9, of_rows, of_slot) for e in (graphed, eager))
            assert_close(found, expected)


@flows
def test_guidance_row_by_row_replays_over_both_slots(engines, family):
    graphed, eager = engines(family)
    schedule = StepSchedule(flow_times(STEPS), -1.0 / STEPS)
    for seed in range(2):
        found = []
        for engine in (graphed, eager):
            for slot in range(2):
                encode(engine, 2 * seed + slot, 1, slot)
            inputs = replace(inputs_for(engine, seed, 2), plan_weight=np.zeros((STEPS, 4), 'f4'))
            found.append(denoise_by_step(engine, inputs, schedule, ((1, 0), (1, 1))))
        assert_close(*found)


@pytest.mark.thorough
@experts
@pytest.mark.parametrize('rows', [1, 2])
def test_in_bfloat16_replays_are_those_of_eager_runs_up_to_its_rounding(engines, family, rows):
    graphed, eager = engines(family, dtype=torch.bfloat16)
    # A SmolVLA of random weights makes less of what it sees.
    bound = 8e-3 if family == 'smolvla' else 3e-2
    chunks = []
    for seed in range(2):
        for engine in (graphed, eager):
            encode(engine, seed, rows, slot=0)
        # Rounding is not amplified by guidance here: all weight is on one row.
        weights = np.array([1.0, 0.0], 'f4')[:rows]
        found, expected = (chunk(e, 3, rows, 0, row_weight=weights) for e in (graphed, eager))
        assert np.abs(found - expected).max() <= bound * np.abs(expected).max()
        chunks.append(expected)
    # The observation moves it by far more than that.
    assert np.abs(chunks[0] - chunks[1]).max() > 3 * bound * np.abs(expected).max()
    assert set(graphed.cuda_graph.values()) == {'captured'}


def addresses_of(prepared: object) -> list[int]:
    """Addresses of the tensors of a joined expert, and of what its layers attend with."""
    found = []
    for value in vars(prepared).values():
        if isinstance(value, torch.Tensor):
            found.append(value.data_ptr())
        elif type(value).__module__ in (SelfLayers.__module__, FirstKeys.__module__):
            found += addresses_of(value)
    return found


@experts
@pytest.mark.parametrize('kernel', [None, attend_by_lengths], ids=['masked', 'packed'])
def test_after_its_first_chunk_a_slot_is_laid_out_at_the_same_addresses(engines, family, kernel):
    graphed, _ = engines(family, kernel)
    addresses, graphs = [], []
    for seed in range(3):
        encode(graphed, seed, 1, slot=0)
        chunk(graphed, seed, 1, 0)
        (prepared,) = graphed._prepared.values()
        addresses.append(addresses_of(prepared.value))
        graphs.append(RecordedGraphs.captured)
    assert len(addresses[0]) > 10
    assert addresses[0] == addresses[1] == addresses[2]
    assert graphs[0] == graphs[1] == graphs[2], 'a later chunk waits for no capture'


@experts
def test_what_is_laid_out_into_new_buffers_is_seen_by_no_graph(engines, family, monkeypatch):
    """A negative control: the fault that the addresses are kept for."""
    prepare_prefix = ExpertNetwork.prepare_prefix
    monkeypatch.setattr(
        ExpertNetwork,
        'prepare_prefix',
        lambda network, past, into=None: prepare_prefix(network, past),
    )
    graphed, eager = engines(family)
    for seed in range(2):
        for engine in (graphed, eager):
            encode(engine, seed, 1, slot=0)
        found, expected = (chunk(e, seed, 1, 0) for e in (graphed, eager))
        error = np.abs(found - expected).max()
        assert error <= BOUND if seed == 0 else error > 1e-2


@experts
def test_shapes_that_depend_on_numbers_end_a_capture(engines, family, monkeypatch):
    """A negative control: dropping padded tokens, as on a CPU."""
    kind = type(seeded_network(family))
    join = kind.join
    monkeypatch.setattr(kind, 'join', lambda network, static_shapes: join(network, False))
    graphed, _ = engines(family)
    encode(graphed, 0, 1, slot=0)
    assert graphed.cuda_graph['prefix'] == 'eager: failed while capturing'


def length_of(engine: TorchEngine, rows: int, slot: int) -> int:
    """Prompt length at which a slot was encoded: zeros follow."""
    values = next(x for name, x in engine._buffers[rows].slots[slot].items() if 'value' in name)
    written = values.ne(0).any(dim=-1).any(dim=2).any(dim=1).any(dim=0)
    return engine.dims.prompt_length - (len(written) - 1 - int(written.nonzero().max()))


@experts
def test_a_prompt_is_encoded_at_the_shortest_length_that_holds_every_row(engines, family):
    graphed, eager = engines(family, prompt_length=110)
    prompts = [
        (48, [range(7)]),
        (110, [range(97)]),
        (48, [range(48)]),
        (96, [range(49)]),
        (96, [range(96), range(3)]),
        (48, [range(2), range(48)]),
        (110, [range(5), range(110)]),
        # A token behind a gap counts.
        (96, [[0, 1, 2, 60]]),
    ]
    for seed, (length, valid) in enumerate(prompts):
        rows, slot = len(valid), seed % 2
        for engine in (graphed, eager):
            encode(engine, seed, rows, slot, [list(places) for places in valid])
        assert length_of(graphed, rows, slot) == length
        for variant in ({}, {'jacobian': True}):
            found, expected = (chunk(e, seed, rows, slot, **variant) for e in (graphed, eager))
            assert_close(found, expected)
    assert set(graphed.cuda_graph.values()) == {'captured'}


@experts
def test_no_prompt_waits_for_a_capture_after_the_first(engines, family):
    graphed, _ = engines(family)
    encode(graphed, 0, 1, 0, [list(range(3))])
    chunk(graphed, 0, 1, 0)
    before = RecordedGraphs.captured
    for seed, tokens in enumerate((64, 48, 49, 1)):
        encode(graphed, seed, 1, 0, [list(range(tokens))])
        chunk(graphed, seed, 1, 0)
    assert RecordedGraphs.captured == before


@experts
def test_a_long_prompt_that_overflowed_spoils_no_shorter_one(engines, family):
    graphed, eager = engines(family)
    for engine in (graphed, eager):
        encode(engine, 0, 1, 0, [list(range(60))])
    for tensor in graphed._buffers[1].slots[0].values():
        tensor.fill_(torch.nan if tensor.is_floating_point() else True)
    for engine in (graphed, eager):
        encode(engine, 1, 1, 0, [list(range(9))])
    assert_close(chunk(graphed, 1, 1, 0), chunk(eager, 1, 1, 0))


@experts
@pytest.mark.parametrize('rows', [1, 2])
def test_a_graph_without_masks_serves_any_number_of_valid_tokens(engines, family, rows):
    """Captured over a long prompt; the lengths that it reads lie on the device."""
    graphed, eager = engines(family, attend_by_lengths)
    assert graphed._network.kernel is attend_by_lengths
    longest = graphed.dims.prompt_length
    for seed, tokens in enumerate([longest, 3, longest - 1, 1, 20]):
        # The second row is shorter, and has a gap.
        valid = [list(range(tokens)), [0, *range(2, 2 + tokens // 2)]][:rows]
        for engine in (graphed, eager):
            encode(engine, seed, rows, 0, valid)
        for variant in ({}, {'clean_actions': 2}):
            found, expected = (chunk(e, seed, rows, 0, **variant) for e in (graphed, eager))
            assert_close(found, expected)
        if seed == 0:
            before = RecordedGraphs.captured
    assert RecordedGraphs.captured == before
    assert set(graphed.cuda_graph.values()) == {'captured'}


def test_lengths_of_the_first_prompt_are_wrong_for_the_next(engines, monkeypatch):
    """A negative control: lengths that no later prompt changes."""
    see, seen = _PackedKeys._see, []
    monkeypatch.setattr(
        _PackedKeys, '_see', lambda keys, mask: seen or seen.append(see(keys, mask))
    )
    graphed, eager = engines('pi05', attend_by_lengths)
    for seed, tokens in enumerate([40, 5]):
        for engine in (graphed, eager):
            encode(engine, seed, 1, 0, [list(range(tokens))])
        error = np.abs(chunk(graphed, seed, 1, 0) - chunk(eager, seed, 1, 0)).max()
        assert error <= BOUND if seed == 0 else error > 1e-3


@pytest.mark.parametrize('family', ['groot_n15', 'groot_n16', 'groot_n17', 'evo1', 'act'])
def test_a_family_with_images_in_its_prompt_or_without_one_has_a_single_length(engines, family):
    graphed, _ = engines(family)
    assert {len(works) for works in graphed._prefix.values()} == {1}


def test_an_engine_without_graphs_has_a_single_length():
    engine = TorchEngine(seeded_network('pi05'))
    assert {len(works) for works in engine._prefix.values()} == {1}


def test_a_recorded_graph_keeps_its_addresses_and_its_choices():
    """The stand-in itself: it replays what was captured, on the tensors of the capture."""
    held = {'x': torch.tensor([1.0]), 'out': torch.zeros(1)}
    replay = Capturer('test', RecordedGraphs(torch.device('cpu'))).capture(
        lambda: held['out'].copy_((held['x'] * 2).view(1).add_(1))
    )
    out = held['out']
    held['x'].fill_(5.0)
    replay()
    assert out.item() == 11.0
    held['x'], held['out'] = torch.tensor([7.0]), torch.zeros(1)
    replay()
    assert (out.item(), held['out'].item()) == (11.0, 0.0)
