"""The policy node's ways to infer, each turned on and off while it runs, seen in its reports."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from graph import graph
from std_srvs.srv import Trigger
from test_policy_node import TASK, Executor, aligned, start
from tiny_policy import JOINTS, tiny_spec, write_tiny_policy
from tiny_robot import write_robot

from vla_runtime.inference.prefix_cache import CachePolicy
from vla_runtime.inference.settings import PolicySettings
from vla_runtime.messages.diagnostics import values_of
from vla_runtime.messages.trajectories import message_to_chunk
from vla_runtime.policy import Policy

pytestmark = pytest.mark.graph

# Chunks in a row of which one at least is tied to its plan.
_TRIES = 20

# What tests change, as it is at first; the modes go before the limits that they need.
PARAMETERS = {
    'cache_mode': 'exact',
    'rtc_mode': 'guided',
    'cfg_enabled': False,
    'cfg_mode': 'auto',
    'cfg_beta': 1.5,
    'advantage': 'positive',
    'real_time_chunking': False,
    'plan_schedule': 'exp',
    'max_guidance_weight': 10.0,
    'rtc_horizon': 0,
    'pipeline': 'latency',
    'denoise_steps': 0,
    'cache_max_age_s': 0.0,
    'cache_max_reuses': 0,
    'cache_max_image_change': 0.0,
    'cache_max_state_bins': 0,
}
# What that means: without `real_time_chunking` no chunk is tied, whatever `rtc_mode` is.
DEFAULTS = PolicySettings()
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

    def __init__(self, executor: Executor, bundle: Path) -> None:
        self.executor = executor
        self._policy = Policy.load(bundle)
        self._expected = DEFAULTS

    def set(self, *, means: Mapping[str, Any] | None = None, **parameters: Any) -> None:
        """Change live parameters of the node, and the settings of our own policy by hand.

        Args:
            means: the settings that the parameters are, where not those of the same names.
            parameters: parameters of the node, set in this order.
        """
        for name, value in parameters.items():
            result = self.executor.graph.set_parameter(self.executor.node, name, value)
            assert result.successful, result.reason
        self._expected = replace(self._expected, **(parameters if means is None else means))

    def begin(self) -> None:
        """Default parameters and a new episode on both sides."""
        drivers = self.executor.drivers
        drivers.heal()
        # The node holds a state while the next one is still on its way: this one holds anyway.
        drivers.moving = False
        drivers._random = np.random.default_rng(1)
        self.set(means=vars(DEFAULTS), **PARAMETERS)
        reset = self.executor.graph.call(Trigger, f'{self.executor.node}/reset', Trigger.Request())
        assert reset.success
        self._policy.reset()

    def chunk(self) -> Mapping[str, str]:
        """One chunk from the node, equal to our own; returns its report."""
        (received, header), report = self.executor.chunk(rows=ROWS, certain=CERTAIN)
        self._policy.settings = self._expected
        plan = aligned(self.executor, report, ROWS, CERTAIN)
        chunk, ours = self._policy.infer(self.executor.drivers.observed(report, TASK), plan=plan)
        assert ours.number == int(report['number']) == header.number
        np.testing.assert_allclose(received.actions, chunk.actions, rtol=0, atol=1e-4)
        assert header.tied == (report['rtc_mode'] != 'off')
        return report

    def chunk_with(self, key: str, words: str) -> Mapping[str, str]:
        """The first of the next chunks whose report says so; frames from before are on the way."""
        for _ in range(50):
            report = self.chunk()
            if words in report[key]:
                return report
        raise AssertionError(f'no report says {words!r} under {key!r}; the last: {report[key]!r}')

    def refusal(self, name: str, value: Any) -> str:
        """Return the reason of a refusal; the value in force must stay."""
        before = self.chunk()[f'parameter.{name}']
        result = self.executor.graph.set_parameter(self.executor.node, name, value)
        assert not result.successful
        assert self.chunk()[f'parameter.{name}'] == before
        return result.reason


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
        yield Pair(executor, bundle)


@pytest.fixture
def pair(running: Pair) -> Pair:
    running.begin()
    return running


def test_the_cache_goes_off_exact_and_bounded(pair: Pair) -> None:
    drivers = pair.executor.drivers
    drivers._random = Still()
    report = pair.chunk_with('cache.prefix', 'hit (')
    assert report['runs.vision'] == '0'
    assert re.fullmatch(
        r'top: hit \(\d.\d+ s old\), wrist: hit \(\d.\d+ s old\)', report['cache.vision']
    )
    pair.set(cache_mode='off', means={'cache': CachePolicy('off')})
    report = pair.chunk()
    assert [report[f'runs.{network}'] for network in ('vision', 'prefix')] == ['2', '1']
    assert report['cache.prefix'] == 'off'
    pair.set(cache_max_age_s=10.0, cache_max_reuses=1000, cache_max_image_change=2.0, means={})
    bounded = CachePolicy('bounded', max_age_s=10.0, max_reuses=1000, max_image_change=2.0)
    pair.set(cache_mode='bounded', means={'cache': bounded})
    pair.chunk()
    drivers._random = Nearly()
    for camera in ('top', 'wrist'):
        pair.chunk_with('cache.vision', f'{camera}: reused (')
    pair.set(cache_mode='exact', means={'cache': CachePolicy()})
    assert 'reused' not in pair.chunk()['cache.vision']


def test_what_does_not_go_together_is_refused_by_name(pair: Pair) -> None:
    assert 'cache_max_age_s' in pair.refusal('cache_mode', 'bounded')
    pair.set(cfg_enabled=True, cfg_beta=1.5, cfg_mode='serial')
    pair.set(real_time_chunking=True, means={'rtc_mode': 'guided'})
    assert 'jacobian' in pair.refusal('rtc_mode', 'jacobian')
    assert all(bound in pair.refusal('denoise_steps', -1) for bound in ('0', '1000'))


def test_everything_at_once_is_what_the_policy_gives(pair: Pair) -> None:
    pair.set(cfg_enabled=True, cfg_beta=2.0)
    pair.set(real_time_chunking=True, means={'rtc_mode': 'guided'})
    for mode in ('guided', 'jacobian', 'hard_prefix'):
        pair.set(rtc_mode=mode)
        # On a busy machine a plan may be over before the frame that its chunk is made of.
        reports = (pair.chunk() for _ in range(_TRIES))
        report = next(report for report in reports if report['rtc_mode'] != 'off')
        assert (report['guidance'], report['beta'], report['rtc_mode']) == ('fused', '2.0', mode)
    pair.set(cfg_mode='serial', cfg_beta=3.5)
    pair.set(real_time_chunking=False, means={'rtc_mode': 'off'})
    report = pair.chunk()
    assert (report['guidance'], report['beta'], report['plan_rows']) == ('serial', '3.5', '0')
    pair.set(cfg_enabled=False)
    assert pair.chunk()['guidance'] == 'none'


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
        numbers = [message_to_chunk(chunk)[1].number for chunk in executor.chunks]
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
