"""Networks that run compiled: with stand-ins for the compiler, and once with the compiler."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from recorded_graphs import RecordedGraphs
from test_torch_graphs import BY_DEFAULT, FLOWS, chunk, encode, inputs_for, seeded_network
from thorough import thorough_but
from tiny_policy import observation, tiny_spec, write_tiny_policy

from vla_runtime.engines.bounds import BOUNDS
from vla_runtime.engines.protocol import DenoiseLoop
from vla_runtime.engines.torch import compilation, compiled_parts, cuda_graph
from vla_runtime.engines.torch import engine as torch_engine
from vla_runtime.engines.torch.compilation import Compilation, Part, Verdict, largest_error
from vla_runtime.engines.torch.compiler import Compiled, remedy
from vla_runtime.engines.torch.engine import TorchEngine
from vla_runtime.engines.torch_compile import NETWORKS, check_torch_compile, word_for, word_of
from vla_runtime.inference.denoise import denoise_serially, flow_times
from vla_runtime.inference.guidance import row_weights
from vla_runtime.policy import Policy

BOUND = BOUNDS['float32'].tensor
Call = Callable[..., Any]


class Clock:
    """Every reading is a millisecond later."""

    now = 0.0

    def __call__(self) -> float:
        self.now += 1e-3
        return self.now


class Compiler:
    """Stands in for `torch.compile`.

    Args:
        clock: put forward by every call of what it makes.
        ms: put forward by, may be negative.
        change: changes what a call of a network returns.
        broken: networks that it cannot compile.
    """

    def __init__(
        self, clock: Clock, ms: float = -0.1, change: Any = None, broken: str = ''
    ) -> None:
        self.clock, self.ms, self.change, self.broken = clock, ms, change, broken
        self.compiled: list[str] = []
        self.called: list[str] = []

    def __call__(self, name: str, call: Call) -> Call:
        if name in self.broken:
            raise RuntimeError('InvalidCxxCompiler: No working C++ compiler found')
        self.compiled.append(name)

        def run(*args: Any, **kwargs: Any) -> Any:
            self.called.append(name)
            self.clock.now += self.ms * 1e-3
            found = call(*args, **kwargs)
            return self.change(name, found) if self.change else found

        return run


@pytest.fixture
def load(monkeypatch):
    """Load a tiny policy with a stand-in for the compiler; also return the stand-in."""
    clock = Clock()
    monkeypatch.setattr(compilation, 'perf_counter', clock)
    # Every trial takes the stand-in as long as the one before.
    monkeypatch.setattr(compilation, '_MOST_TRIALS', compilation._LEAST_TRIALS)

    def make(word: str, family: str = 'pi05', graphs: bool = False, **changes):
        compiler = Compiler(clock, **changes)
        with monkeypatch.context() as patch:
            patch.setattr(compiled_parts, 'Compiled', compiler)
            if graphs:
                patch.setattr(torch_engine, 'captures_graphs', lambda device: True)
                patch.setattr(cuda_graph, 'CudaGraphCapture', RecordedGraphs)
            engine = TorchEngine(seeded_network(family))
            if word != 'none':
                compiled_parts.compile_networks(engine, word, 'float32')
        compiler.called.clear()
        return engine, compiler

    return make


def chunks(engine: TorchEngine, steps: int = 3, rows: int = 1, **changes) -> np.ndarray:
    """A chunk of an observation with padding, in slot 0."""
    engine.set_schedule(flow_times(steps), -1 / steps)
    encode(engine, 3, rows, slot=0)
    return chunk(engine, 3, rows, 0, **changes)


@pytest.mark.thorough
@pytest.mark.parametrize('family', thorough_but([*BY_DEFAULT, 'act'], [*FLOWS, 'act']))
@pytest.mark.parametrize('rows', [1, 2])
def test_compiled_networks_give_the_chunks_of_eager_ones(load, family, rows):
    if family == 'act' and rows == 2:
        pytest.skip('ACT has no guidance')
    engine, compiler = load('all', family)
    plain, _ = load('none', family)
    steps = 1 if family == 'act' else 3
    assert np.abs(chunks(engine, steps, rows) - chunks(plain, steps, rows)).max() <= BOUND
    assert engine.torch_compile == 'all'
    assert set(compiler.called) == set(NETWORKS)


@pytest.mark.parametrize('family', thorough_but(BY_DEFAULT, FLOWS))
def test_compiled_networks_are_captured(load, family):
    engine, compiler = load('all', family, graphs=True)
    plain, _ = load('none', family)
    for rows in (1, 2):
        assert np.abs(chunks(engine, 3, rows) - chunks(plain, 3, rows)).max() <= BOUND
    assert set(engine.cuda_graph.values()) == {'captured'}
    compiler.called.clear()
    chunks(engine)
    assert not compiler.called, 'replays call nothing'
    # Steps that run one by one lay nothing out, so no graph is missing for them.
    assert not engine.captures(DenoiseLoop(3, alone=True))


def test_auto_takes_what_is_faster_and_says_so(load):
    engine, compiler = load('auto')
    assert engine.torch_compile == 'all'
    assert 'denoise compiled (eager 2.00 ms, compiled 1.60 ms)' in engine.why_compiled
    chunks(engine)
    assert set(compiler.called) == set(NETWORKS)


@pytest.mark.parametrize(('word', 'taken'), [('auto', 'none'), ('all', 'all')])
def test_a_slower_network_runs_for_all_alone(load, word, taken):
    engine, compiler = load(word, ms=5.0)
    assert engine.torch_compile == taken
    chunks(engine)
    assert bool(compiler.called) == (taken == 'all')


@pytest.mark.parametrize('wrong', NETWORKS)
def test_a_network_with_wrong_numbers_runs_eagerly(load, wrong):
    def spoil(name: str, found: Any) -> Any:
        if name != wrong:
            return found
        if name == 'prefix':
            return {**found, 'past_value': found['past_value'] + 1e-3}
        return (found[0], found[1] + 1e-3) if name == 'denoise' else found + 1e-3

    engine, compiler = load('all', change=spoil)
    assert engine.torch_compile == word_of(name for name in NETWORKS if name != wrong)
    assert f'{wrong} eager (compiled differs by' in engine.why_compiled
    plain, _ = load('none')
    assert np.abs(chunks(engine) - chunks(plain)).max() <= BOUND
    assert wrong not in compiler.called


def test_a_prefix_that_is_wrong_on_padded_prompts_alone_runs_eagerly(load):
    def show_padding(name: str, found: Any) -> Any:
        if name == 'prefix':
            return {**found, 'prefix_mask': torch.ones_like(found['prefix_mask'])}
        return found

    engine, _ = load('all', change=show_padding)
    assert engine.torch_compile == 'vision+denoise'


def test_numbers_that_are_none_are_wrong(load):
    def spoil(name: str, found: Any) -> Any:
        return found * torch.nan if name == 'vision' else found

    assert load('all', change=spoil)[0].torch_compile == 'prefix+denoise'


def test_what_cannot_be_compiled_runs_eagerly_with_one_warning(load, caplog):
    with caplog.at_level(logging.WARNING):
        engine, _ = load('auto', broken='vision, denoise')
    assert engine.torch_compile == 'prefix'
    (said,) = [text for text in caplog.messages if 'cannot' in text]
    assert 'vision, denoise: cannot be compiled' in said
    assert "'apt install g++'" in said
    reason = 'cannot be compiled: RuntimeError: InvalidCxxCompiler: No working C++ compiler found'
    for network in ('vision', 'denoise'):
        assert f'{network} eager ({reason})' in engine.why_compiled
    assert np.isfinite(chunks(engine)).all()


@pytest.mark.parametrize('word', ['prefix', 'vision+denoise'])
def test_networks_by_name_are_the_only_ones_compiled(load, word):
    engine, compiler = load(word)
    assert engine.torch_compile == word
    assert set(compiler.compiled) == set(word.split('+'))


def test_nothing_is_compiled_after_load_whatever_changes(load):
    engine, compiler = load('all')
    plain, _ = load('none')
    compiled = list(compiler.compiled)
    for steps, rows, changes in [
        (3, 1, {}),
        (5, 1, {}),
        (2, 2, {}),
        (3, 1, {'samples': 2}),
        (3, 1, {'clean_actions': 2}),
        (3, 1, {'jacobian': True}),
        (3, 1, {}),
    ]:
        compiler.called.clear()
        found, expected = (chunks(e, steps, rows, **changes) for e in (engine, plain))
        assert np.abs(found - expected).max() <= BOUND
        # Other forms of the step were not compiled.
        assert ('denoise' in compiler.called) == (not changes)
    assert compiler.compiled == compiled


def test_guidance_row_by_row_runs_over_both_slots(load):
    found = []
    for engine in (load('all')[0], load('none')[0]):
        engine.set_schedule(flow_times(3), -1 / 3)
        for slot in range(2):
            encode(engine, slot, 1, slot)
        inputs = replace(
            inputs_for(engine, 3, 2, row_weight=row_weights(2.0)),
            plan_weight=np.zeros((3, 4), np.float32),
        )
        found.append(denoise_serially(engine, inputs, flow_times(3), (0, 1)))
    assert np.abs(found[0] - found[1]).max() <= BOUND


def test_a_compiled_network_that_cannot_be_captured_runs_eagerly(load):
    def wait(name: str, found: Any) -> Any:
        return found * (1.0 + 0.0 * found.sum().item()) if name == 'vision' else found

    engine, _ = load('all', graphs=True, change=wait)
    assert engine.torch_compile == 'prefix+denoise'
    assert 'vision eager (cannot be captured: RuntimeError: operation' in engine.why_compiled
    chunks(engine)
    assert set(engine.cuda_graph.values()) == {'captured'}


@pytest.mark.parametrize(('error', 'looks'), [(0.5 * BOUND, 1), (2 * BOUND, 0)])
def test_a_network_beyond_its_bound_is_not_looked_at_closer(error, looks):
    key, output, runs, looked_at = ('denoise', 0), torch.zeros(2), {}, []

    def work() -> None:
        output.fill_(runs[key]() if key in runs else 0.0)

    def inspect(part: Part, run: Call) -> str:
        looked_at.append(part.key)
        return ''

    part = Part(key, lambda: error, work, lambda: {'x': output.clone()})
    compared = Compilation([part], runs, lambda name, call: call, BOUND, inspect=inspect)
    compared.compare()
    assert looked_at == looks * [key]
    taken, why = compared.choose('all')
    assert taken == looks * ['denoise'] and ('differs by' in why) == (not looks)


def test_the_reason_has_the_first_line_of_an_error_and_no_more():
    verdict = Verdict('vision', fault='cannot be compiled', failure=f'\nE: {"x" * 400}\nand more')
    said = verdict.describe('all')
    assert said.startswith('vision eager (cannot be compiled: E: xxx') and len(said) < 260
    assert 'more' not in said


def test_errors_are_in_units_of_the_largest_number():
    reference = {'a': torch.tensor([0.0, 10.0]), 'seen': torch.tensor([True])}
    assert largest_error({**reference, 'a': torch.tensor([1.0, 10.0])}, reference) == 0.1
    assert largest_error({**reference, 'seen': torch.tensor([False])}, reference) == np.inf
    assert largest_error({**reference, 'a': torch.tensor([np.nan, 10.0])}, reference) == np.inf


@pytest.mark.parametrize(
    ('error', 'what'),
    [
        ('Cannot find a working triton installation', 'pip install triton'),
        ('fatal error: Python.h: No such file', 'python3-dev'),
        ('InvalidCxxCompiler: No working C++ compiler found', 'g++'),
        ('ImportError: /tmp/a.main.so: file too short', 'remove'),
        ('Unsupported: generator', 'TORCH_LOGS'),
    ],
)
def test_a_remedy_is_named(error, what):
    assert what in remedy(error)
    assert remedy(error, 'report it') == ('report it' if what == 'TORCH_LOGS' else remedy(error))


def test_words_are_checked_before_anything_is_loaded():
    with pytest.raises(ValueError, match=r"'on' is unknown; known are: none, auto, all, vision"):
        check_torch_compile('on', 'torch')
    for backend in ('onnxruntime', 'tensorrt'):
        with pytest.raises(ValueError, match=f"'auto': backend '{backend}' does not run PyTorch"):
            check_torch_compile('auto', backend)
        check_torch_compile('none', backend)
        assert word_for('auto', backend) == 'none'
        with pytest.raises(ValueError, match='does not run'):
            word_for('denoise', backend)
    assert word_for('auto', 'torch') == 'auto'


def test_a_policy_says_what_runs_compiled_and_why(tmp_path, monkeypatch):
    monkeypatch.setattr(compilation, 'perf_counter', clock := Clock())
    monkeypatch.setattr(compiled_parts, 'Compiled', Compiler(clock))
    bundle = write_tiny_policy(tmp_path / 'tiny', tiny_spec())
    options = {'precision': 'float32', 'threads': 1, 'verify': False}
    with closing(Policy.load(bundle, 'torch', torch_compile='vision+denoise', **options)) as policy:
        assert policy.torch_compile == 'vision+denoise'
        assert policy.why.startswith('vision compiled (eager ')
        found, _ = policy.infer(observation())
    with closing(Policy.load(bundle, 'torch', **options)) as policy:
        assert (policy.torch_compile, policy.why) == ('none', '')
        expected, _ = policy.infer(observation())
    assert np.abs(found.actions - expected.actions).max() <= BOUND
    with pytest.raises(ValueError, match="'all': backend 'onnxruntime' does not run PyTorch's"):
        Policy.load(bundle, 'onnxruntime', torch_compile='all')


# With the compiler: tens of seconds each.


@pytest.mark.slow
@pytest.mark.parametrize('family', ['pi05', 'smolvla', 'act'])
def test_the_compiler_gives_the_numbers_of_eager_networks(family, caplog):
    engine, plain = (TorchEngine(seeded_network(family)) for _ in range(2))
    compiled_parts.compile_networks(engine, 'all', 'float32')
    assert engine.torch_compile == 'all', f'{engine.why_compiled} {caplog.text}'
    steps = 1 if family == 'act' else 3
    for rows in (1, 2)[: 1 if family == 'act' else 2]:
        assert np.abs(chunks(engine, steps, rows) - chunks(plain, steps, rows)).max() <= BOUND


@pytest.mark.slow
def test_a_sealed_network_runs_eagerly_where_it_would_be_compiled_anew(caplog):
    compiled = Compiled('vision', torch.nn.Linear(3, 2))
    with torch.inference_mode():
        x = torch.randn(4, 3)
        before = compiled(x)
        compiled.seal()
        threads = torch.get_num_threads()
        torch.set_num_threads(threads + 1)
        try:
            with caplog.at_level(logging.WARNING):
                assert torch.allclose(compiled(x), before)
        finally:
            torch.set_num_threads(threads)
        assert torch.equal(compiled(x), before)
    assert 'was compiled under other settings' in caplog.text
