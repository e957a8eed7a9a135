"""An engine whose head runs in Triton kernels, interpreted on a CPU: compared, timed and chosen."""

from __future__ import annotations

import importlib.util
import logging
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_torch_graphs import chunk, encode, seeded_network
from tiny_policy import observation, tiny_dims, tiny_spec, write_tiny_policy
from triton_package import interpreted, needs_triton  # noqa: F401

from vla_runtime.engines.recorded_cases import Bounds
from vla_runtime.engines.torch import layer_trial
from vla_runtime.engines.torch.engine import TorchEngine
from vla_runtime.engines.torch.layer_trial import triton_layers
from vla_runtime.inference.denoise import flow_times
from vla_runtime.models.blocks.expert import JoinedExpert
from vla_runtime.policy import Policy

pytestmark = [needs_triton, pytest.mark.usefixtures('interpreted')]

BOUND = 1e-5
# The fewest that tell one head from another; `test_triton_expert` has other numbers of them.
TWO_HEADS = {
    part: replace(getattr(tiny_dims('pi05'), part), num_heads=2) for part in ('language', 'expert')
}
# Enough for a test of what is chosen, not of every layer's numbers.
ONE_LAYER = {part: replace(dims, depth=1) for part, dims in TWO_HEADS.items()}


@pytest.fixture(autouse=True)
def _timed_once(monkeypatch):
    """An interpreter takes seconds for what the kernels do in microseconds."""


def chunks(engine: TorchEngine, rows: int = 1, **changes: Any) -> np.ndarray:
    engine.set_schedule(flow_times(3), -1 / 3)
    encode(engine, 3, rows, slot=0)
    return chunk(engine, 3, rows, 0, **changes)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ('family', 'rows', 'changes'),
    [
        ('pi05', 2, TWO_HEADS),
        *(pytest.param(family, 1, {}, marks=pytest.mark.slow) for family in ('pi0', 'smolvla')),
    ],
)
def test_an_engine_gives_the_chunks_of_the_operators(family, rows, changes):
    plain, engine = (
        TorchEngine(seeded_network(family, **changes), max_rows=rows) for _ in range(2)
    )
    layer_trial.choose_layers(engine, 'float32')
    assert engine.triton == 'on'
    assert 'denoise in Triton kernels' in engine.why_triton
    expected = chunks(plain, rows)
    assert np.abs(chunks(engine, rows) - expected).max() <= BOUND * max(1, np.abs(expected).max())
    assert laid_out_in(engine) == [triton_layers()]


@pytest.mark.thorough
def test_a_prefix_of_known_actions_runs_in_the_kernels_where_the_policy_was_trained_for_it():
    plain, engine = (TorchEngine(seeded_network('pi05', **ONE_LAYER), max_rows=1) for _ in range(2))
    layer_trial.choose_layers(engine, 'float32', action_times=True)
    assert engine.triton == 'on', engine.why_triton
    found, expected = (chunks(e, clean_actions=2) for e in (engine, plain))
    assert np.abs(found - expected).max() <= BOUND * max(1, np.abs(expected).max())
    assert laid_out_in(engine) == [triton_layers()]


@pytest.mark.thorough
def test_steps_that_were_not_compared_run_in_the_operators():
    plain, engine = (TorchEngine(seeded_network('pi05', **ONE_LAYER), max_rows=1) for _ in range(2))
    layer_trial.choose_layers(engine, 'float32')
    assert engine.triton == 'on'
    assert np.array_equal(*(chunks(one, clean_actions=2) for one in (engine, plain)))
    assert laid_out_in(engine) == [JoinedExpert]


# Faults in what a modulation for each token runs alone, by the text of the kernels.
BY_TOKEN_FAULTS = {
    'gate': ('at = batch * gate_batch + token * gate_token', 'at = batch * gate_batch'),
    'scale': (
        'tl.load(scale + at, mask=inside',
        'tl.load(scale + batch * batch_stride + column, mask=inside',
    ),
    'shift': (
        'tl.load(shift + at, mask=inside',
        'tl.load(shift + batch * batch_stride + column, mask=inside',
    ),
}


@pytest.mark.thorough
@pytest.mark.parametrize('fault', BY_TOKEN_FAULTS)
def test_a_fault_in_modulations_by_token_is_found_at_load(fault, monkeypatch, tmp_path):
    from vla_runtime.models.triton import expert as triton_expert

    monkeypatch.setattr(triton_expert, 'kernels', spoiled(*BY_TOKEN_FAULTS[fault], tmp_path))
    plain, engine = (TorchEngine(seeded_network('pi05', **ONE_LAYER), max_rows=1) for _ in range(2))
    layer_trial.choose_layers(engine, 'float32', action_times=True)
    assert engine.triton == 'off'
    assert 'denoise eager (in Triton kernels ' in engine.why_triton
    for changes in ({}, {'clean_actions': 2}):
        assert np.array_equal(chunks(engine, **changes), chunks(plain, **changes))


# Faults in what lies around the layers.
AROUND_FAULTS = {
    'bias left out': ('+ tl.load(bias + output, mask=is_output, other=0.0)', ''),
    'input left out': ('is_inner = inner < inputs', 'is_inner = inner < inputs - 1'),
    'row left out': ('for row in range(rows)', 'for row in range(1, rows)'),
    'plan by token': ('tl.load(plan + at,', 'tl.load(plan + (at + 1) % chunk,'),
    'plan of another sign': ('mixed -= weight', 'mixed += weight'),
    'half a step': ('old + tl.load(step) * mixed', 'old + 0.5 * tl.load(step) * mixed'),
    'one weight for all rows': ('row_weight + here', 'row_weight + 0 * here'),
    'one weight for all actions': ('plan_weight + at // actions', 'plan_weight + 0 * at'),
}


@pytest.mark.thorough
@pytest.mark.parametrize('fault', AROUND_FAULTS)
def test_a_fault_around_the_layers_is_found_at_load(fault, monkeypatch, tmp_path):
    from vla_runtime.models.triton import step as triton_step

    monkeypatch.setattr(
        triton_step, 'kernels', spoiled(*AROUND_FAULTS[fault], tmp_path, triton_step.kernels)
    )
    plain, engine = (TorchEngine(seeded_network('pi05', **ONE_LAYER), max_rows=2) for _ in range(2))
    # A bound that lets the fault pass where whole networks are compared, as in 16 bits.
    monkeypatch.setitem(layer_trial.BOUNDS, 'float32', Bounds(1e9, 1e9, 1e9))
    layer_trial.choose_layers(engine, 'float32')
    assert engine.triton == 'off'
    assert 'denoise eager (in Triton kernels ' in engine.why_triton
    assert np.array_equal(chunks(engine), chunks(plain))


def spoiled(text: str, instead: str, folder: Path, module: Any = None) -> Any:
    """A module of kernels, by default of the layers', with another text in it."""
    from vla_runtime.models.triton import kernels as triton_kernels

    source = Path((module or triton_kernels).__file__).read_text()
    assert source.count(text) == 1
    file = folder / 'spoiled_kernels.py'
    file.write_text(source.replace(text, instead))
    found = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def laid_out_in(engine: TorchEngine) -> list[type]:
    return [type(prepared.value) for prepared in engine._prepared.values()]


def test_kernels_that_share_more_memory_than_the_gpu_has_are_not_used(monkeypatch):
    from triton.runtime.errors import OutOfResources

    from vla_runtime.models.triton import expert as triton_expert

    real = triton_expert.kernels

    class TooLarge:
        def __getitem__(self, grid: Any) -> Any:
            raise OutOfResources(237568, 232448, 'shared memory')

    class Kernels:
        def __getattr__(self, name: str) -> Any:
            return TooLarge() if name == 'gated_kernel' else getattr(real, name)

    monkeypatch.setattr(triton_expert, 'kernels', Kernels())
    plain, engine = (TorchEngine(seeded_network('pi05', **ONE_LAYER), max_rows=1) for _ in range(2))
    layer_trial.choose_layers(engine, 'float32')
    assert engine.triton == 'off'
    assert 'cannot be compiled: OutOfResources: out of resource: shared' in engine.why_triton
    assert np.array_equal(chunks(engine), chunks(plain))


def test_in_half_precision_the_kernels_are_as_right_as_the_operators():
    engine = TorchEngine(seeded_network('pi05', torch.float16, **ONE_LAYER), max_rows=1)
    layer_trial.choose_layers(engine, 'float16')
    assert engine.triton == 'on', engine.why_triton


class Wrong:
    """Layers that leave out the last key of every row."""

    def __new__(cls, *arguments: Any) -> Any:
        from vla_runtime.models.triton.expert import TritonExpert

        class OneKeyTooFew(TritonExpert):
            def load(self, mask, self_past, cross_past=None):
                super().load(mask, self_past, cross_past)
                self._self_layers.lengths -= 1

        return OneKeyTooFew(*arguments)


def test_kernels_of_other_numbers_are_not_used(monkeypatch):
    monkeypatch.setattr(layer_trial, 'triton_layers', lambda: Wrong)
    plain, engine = (TorchEngine(seeded_network('pi05'), max_rows=1) for _ in range(2))
    layer_trial.choose_layers(engine, 'float32')
    assert engine.triton == 'off'
    assert 'denoise eager (in Triton kernels differs by' in engine.why_triton
    assert np.array_equal(chunks(engine), chunks(plain))


def test_without_triton_the_operators_run_and_the_log_says_what_to_install(monkeypatch, caplog):
    def missing() -> Any:
        raise ModuleNotFoundError("No module named 'triton'")

    monkeypatch.setattr(layer_trial, 'triton_layers', missing)
    engine = TorchEngine(seeded_network('pi05'), max_rows=1)
    with caplog.at_level(logging.WARNING):
        layer_trial.choose_layers(engine, 'float32')
    assert engine.triton == 'off'
    assert 'pip install triton' in caplog.text
    chunks(engine)


def test_a_head_of_other_blocks_runs_as_before(caplog):
    engine = TorchEngine(seeded_network('act'), max_rows=1)
    with caplog.at_level(logging.WARNING):
        layer_trial.choose_layers(engine, 'float32')
    assert engine.triton == 'off'
    assert "triton 'on': this family's head has no Triton kernels" in caplog.text
    assert 'ten seconds' not in caplog.text


def test_on_a_cpu_the_log_says_where_the_kernels_run(monkeypatch, caplog):
    monkeypatch.delenv('TRITON_INTERPRET')
    engine = TorchEngine(seeded_network('pi05'), max_rows=1)
    with caplog.at_level(logging.WARNING):
        layer_trial.choose_layers(engine, 'float32')
    assert engine.triton == 'off'
    assert 'its kernels run on device cuda, and this is cpu' in caplog.text
    assert 'install' not in caplog.text


@pytest.mark.thorough
@pytest.mark.parametrize('delay', [0, 2])
def test_a_policy_takes_the_word(delay, tmp_path):
    dims = replace(tiny_spec().dims, **ONE_LAYER)
    spec = replace(tiny_spec(), denoise_steps=1, trained_delay_steps=delay, dims=dims)
    bundle = write_tiny_policy(tmp_path / 'tiny', spec)
    options = {'precision': 'float32', 'threads': 1, 'verify': False}
    with closing(Policy.load(bundle, 'torch', triton='on', **options)) as policy:
        assert policy.triton == 'on'
        forms = {variant.action_time for variant in policy._engine._layers}
        assert forms == {False, delay > 0}
        found, _ = policy.infer(observation())
    with closing(Policy.load(bundle, 'torch', **options)) as policy:
        expected, _ = policy.infer(observation())
    assert np.abs(found.actions - expected.actions).max() <= 1e-4
