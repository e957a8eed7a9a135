"""The policy node's ways to infer, each turned on and off while it runs, seen in its reports."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import pytest
from graph import graph
from std_srvs.srv import Trigger
from test_policy_node import TASK, Executor, observed, start
from tiny_policy import JOINTS, tiny_spec, write_tiny_policy
from tiny_robot import write_robot

from vla_runtime.policy import Policy
from vla_runtime.ros.conversions import message_to_chunk
from vla_runtime.ros.diagnostics import values_of
from vla_runtime.ros.policy_parameters import POLICY_PARAMETERS, settings_from
from vla_runtime.types import CommittedPlan

pytestmark = pytest.mark.graph

DEFAULTS = {row.name: row.default for row in POLICY_PARAMETERS}
ROWS = np.cumsum(np.full((6, len(JOINTS)), 0.05), axis=0)
CERTAIN = 3


class Still:
    """In place of a driver's random numbers: every image is the same."""

    def integers(self, low: int, high: int, shape: tuple[int, ...], dtype: type) -> np.ndarray:
        return np.full(shape, (low + high) // 3, dtype=dtype)


class Nearly(Still):
    """Every image is one grey level off the still one."""

    def integers(self, low: int, high: int, shape: tuple[int, ...], dtype: type) -> np.ndarray:
        return super().integers(low, high, shape, dtype) + dtype(1)


class Pair:
    """The node, and a policy of our own that does the same in step with it."""

    def __init__(self, executor: Executor, policy: Policy) -> None:
        self.executor, self._policy = executor, policy
        self._given = dict(DEFAULTS)

    def set(self, **parameters: Any) -> None:
        """Change live parameters on both sides."""
        for name, value in parameters.items():
            result = self.executor.graph.set_parameter(self.executor.node, name, value)
            assert result.successful, result.reason
        self._given.update(parameters)

    def begin(self) -> None:
        """Default parameters and a new episode on both sides."""
        drivers = self.executor.drivers
        drivers.heal()
        # The node holds a state while the next one is still on its way: this one holds anyway.
        drivers.moving = False
        drivers._random = np.random.default_rng(1)
        # Backwards: the modes go before the limits that they need.
        self.set(cache_mode='exact', rtc_mode='guided', samples=1, cfg_enabled=False)
        self.set(real_time_chunking=False, rtc_horizon=0, cfg_mode='auto', cfg_beta=1.5)
        self.set(pipeline='latency', denoise_steps=0)
        self.set(cache_max_age_s=0.0, cache_max_reuses=0, cache_max_image_change=0.0)
        reset = self.executor.graph.call(Trigger, f'{self.executor.node}/reset', Trigger.Request())
        assert reset.success
        self._policy.reset()

    def chunk(self) -> Mapping[str, str]:
        """One chunk from the node, equal to our own; returns its report."""
        received, report = self.executor.chunk(rows=ROWS, certain=CERTAIN)
        self._policy.settings = settings_from(self._given)
        plan = _seen(report) if int(report['plan_rows']) else None
        chunk, ours = self._policy.infer(observed(self.executor, report), plan=plan)
        assert ours.number == int(report['number']) == received.number
        # A sample chosen by a plan that the chunk is not tied to: the report has no such plan.
        if plan is not None or report['sample_distances'] == '':
            np.testing.assert_allclose(received.chunk.actions, chunk.actions, rtol=0, atol=1e-4)
        assert received.tied == (report['rtc_mode'] != 'off')
        return report

    def chunk_with(self, key: str, words: str) -> Mapping[str, str]:
        """The first of the next chunks whose report says so; frames from before are on the way."""
        for _ in range(50):
            report = self.chunk()
            if words in report[key]:
                return report
        raise AssertionError(f'no report says {words!r} under {key!r}; the last: {report[key]!r}')

    def refusal(self, name: str, value: Any) -> str:
        """Why a value is refused; what was in force must stay."""
        result = self.executor.graph.set_parameter(self.executor.node, name, value)
        assert not result.successful
        assert self.chunk()[f'parameter.{name}'] == _text(self._given[name])
        return result.reason


def _seen(report: Mapping[str, str]) -> CommittedPlan:
    """The plan as the node saw it from its observation's time: cut, or continued backwards."""
    count, delay = int(report['plan_rows']), int(report['plan_delay_steps'])
    over = CERTAIN - delay if delay else len(ROWS) - count
    rows = np.concatenate([np.repeat(ROWS[:1], max(0, -over), axis=0), ROWS[max(0, over) :]])
    return CommittedPlan(rows[:count], delay, count)


def _text(value: Any) -> str:
    return f'{value:g}' if isinstance(value, float) else str(value)


@pytest.fixture(scope='module')
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp('policy')
    bundle = write_tiny_policy(folder / 'tiny', tiny_spec(advantage='task_newline'))
    robot = write_robot(folder / 'tiny.yaml')
    with graph() as made:
        start(made, bundle, robot)
        executor = Executor(made)
        executor.drivers.moving = False
        executor.prepare()
        yield Pair(executor, Policy.load(bundle))


@pytest.fixture
def pair(running: Pair) -> Pair:
    running.begin()
    return running


def test_guidance_goes_on_and_off_fused_and_serial_with_at_most_one_prefix_run(pair: Pair) -> None:
    pair.executor.drivers._random = Still()
    report = pair.chunk()
    assert (report['guidance'], len(report['tokens'].split())) == ('none', 1)
    for mode, expected, expert in (('auto', 'fused', '3'), ('serial', 'serial', '6')):
        pair.set(cfg_mode=mode, cfg_enabled=True, cfg_beta=2.0)
        report = pair.chunk()
        assert (report['guidance'], report['beta']) == (expected, '2')
        assert len(report['tokens'].split()) == 2
        assert report['runs.expert'] == expert
        pair.set(cfg_beta=3.5)
        assert pair.chunk()['beta'] == '3.5'
        pair.set(cfg_enabled=False)
        report = pair.chunk()
        assert (report['guidance'], report['beta'], report['runs.expert']) == ('none', '1', '3')


@pytest.mark.parametrize('mode', ['guided', 'jacobian', 'hard_prefix'])
def test_each_way_to_tie_a_chunk_goes_on_and_off(pair: Pair, mode: str) -> None:
    assert pair.chunk()['rtc_mode'] == 'off'
    pair.set(rtc_mode=mode, real_time_chunking=True)
    for _ in range(2):
        report = pair.chunk()
        assert report['rtc_mode'] == mode
        assert int(report['plan_rows']) > 0
    pair.set(rtc_horizon=4)
    assert pair.chunk()['parameter.rtc_horizon'] == '4'
    pair.set(real_time_chunking=False)
    report = pair.chunk()
    assert (report['rtc_mode'], report['plan_rows']) == ('off', '0')


def test_several_samples_go_on_and_off(pair: Pair) -> None:
    report = pair.chunk()
    assert (report['samples'], report['sample'], report['sample_distances']) == ('1', '0', '')
    pair.set(samples=5)
    for tied in (False, True):
        pair.set(real_time_chunking=tied)
        report = pair.chunk()
        distances = [float(text) for text in report['sample_distances'].split()]
        assert len(distances) == int(report['samples']) == 5
        assert distances[int(report['sample'])] == min(distances)
    pair.set(samples=1)
    assert pair.chunk()['sample_distances'] == ''


def test_the_cache_goes_off_exact_and_bounded(pair: Pair) -> None:
    drivers = pair.executor.drivers
    drivers._random = Still()
    report = pair.chunk_with('cache.prefix', 'hit (')
    assert report['runs.vision'] == '0'
    assert re.fullmatch(
        r'top: hit \(\d.\d+ s old\), wrist: hit \(\d.\d+ s old\)', report['cache.vision']
    )
    pair.set(cache_mode='off')
    report = pair.chunk()
    assert [report[f'runs.{network}'] for network in ('vision', 'prefix')] == ['2', '1']
    assert report['cache.prefix'] == 'off'
    pair.set(cache_max_age_s=10.0, cache_max_reuses=1000, cache_max_image_change=2.0)
    pair.set(cache_mode='bounded')
    pair.chunk()
    drivers._random = Nearly()
    for camera in ('top', 'wrist'):
        pair.chunk_with('cache.vision', f'{camera}: reused (')
    pair.set(cache_mode='exact')
    assert 'reused' not in pair.chunk()['cache.vision']


@pytest.mark.parametrize('beta', [0.99, float('nan'), float('inf'), float('-inf'), 5.5])
def test_a_beta_that_is_no_guidance_is_refused_while_guiding(pair: Pair, beta: float) -> None:
    pair.set(cfg_enabled=True, cfg_beta=2.0)
    assert 'cfg_beta' in pair.refusal('cfg_beta', beta)


def test_what_does_not_go_together_is_refused_by_name(pair: Pair) -> None:
    assert 'cache_max_age_s' in pair.refusal('cache_mode', 'bounded')
    pair.set(cfg_enabled=True, cfg_mode='serial')
    pair.set(real_time_chunking=True)
    assert 'jacobian' in pair.refusal('rtc_mode', 'jacobian')
    assert all(bound in pair.refusal('samples', 17) for bound in ('1', '16'))


def test_everything_at_once_is_what_the_policy_gives(pair: Pair) -> None:
    pair.set(cfg_enabled=True, cfg_beta=2.0, real_time_chunking=True, samples=3)
    for mode in ('guided', 'jacobian', 'hard_prefix'):
        pair.set(rtc_mode=mode)
        report = pair.chunk()
        assert (report['guidance'], report['rtc_mode'], report['samples']) == ('fused', mode, '3')


def test_the_pipeline_goes_to_throughput_and_back_with_the_same_chunks(pair: Pair) -> None:
    for mode in ('latency', 'throughput', 'latency'):
        pair.set(pipeline=mode)
        for _ in range(2):
            report = pair.chunk()
            assert report['pipeline'] == mode
            # Nobody asked for the next one meanwhile.
            assert float(report['overlap_ms']) == 0.0


def test_requests_in_quick_succession_overlap_in_throughput_alone(pair: Pair) -> None:
    executor = pair.executor

    def overlaps(mode: str) -> list[float]:
        reports = [values_of(report.status[0]) for report in executor.reports]
        return [float(told['overlap_ms']) for told in reports if told['pipeline'] == mode]

    def enough(mode: str) -> bool:
        found = overlaps(mode)
        return len(found) >= 5 and (mode == 'latency' or any(found))

    def ask() -> None:
        executor.drivers()
        executor.drivers.request(rows=ROWS, certain=CERTAIN)

    # Long enough for a request to come meanwhile.
    pair.set(denoise_steps=100)
    for mode in ('throughput', 'latency'):
        executor.chunks.clear()
        executor.reports.clear()
        pair.set(pipeline=mode)
        executor.graph.wait_for(partial(enough, mode), f'chunks in {mode}', meanwhile=ask)
        assert any(overlaps(mode)) == (mode == 'throughput')
        numbers = [message_to_chunk(chunk).number for chunk in executor.chunks]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))


def test_a_deactivation_in_the_midst_of_overlapping_requests_is_clean(pair: Pair) -> None:
    executor = pair.executor
    pair.set(denoise_steps=100, pipeline='throughput')
    for _ in range(3):
        count = len(executor.chunks)
        executor.graph.wait_for(
            lambda count=count: len(executor.chunks) > count + 1,
            'chunks',
            meanwhile=lambda: (executor.drivers(), executor.drivers.request(rows=ROWS)),
        )
        assert executor.graph.transition(executor.node, 'deactivate')
        assert executor.graph.transition(executor.node, 'activate')
        executor.drivers.instruct(TASK)
    pair.begin()
    pair.chunk()
