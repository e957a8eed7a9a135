"""Cost against sizes and settings: the roofline's own figures, inferences of the stated kind."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tiny_policy import tiny_spec, write_tiny_policy

from vla_runtime.bundle.folder import read_bundle
from vla_runtime.family.listing import performance_figures, preset
from vla_runtime.models.shapes.operation_counts import count_operations, counts_of
from vla_tools.performance import bench, cost_sweep
from vla_tools.performance.bench import BenchOptions
from vla_tools.performance.cost_page import cost_page
from vla_tools.performance.cost_sweep import (
    KINDS,
    Setup,
    least_times,
    published_floors,
    published_predictions,
    run_sweep,
    setups_of,
    sizes_of,
)
from vla_tools.performance.devices import DEVICES
from vla_tools.performance.roofline import Rates, phase_floors, predicted_ms, published_rates

RATES = Rates(1e12, 1e10, 'the test')
BASE = Setup(views=2, steps=3, rows=1)


@pytest.fixture(scope='module')
def bundle(tmp_path_factory):
    spec = tiny_spec(advantage='task_newline')
    return write_tiny_policy(tmp_path_factory.mktemp('sweep') / 'bundle', spec)


@pytest.mark.parametrize('rows', [1, 2])
def test_the_least_times_are_those_of_the_roofline(bundle, rows):
    counts = counts_of(read_bundle(bundle))
    floors = phase_floors(counts, RATES, precision='float32', rows=rows, steps=3, views=2)
    found = least_times(counts, RATES, 'float32', replace(BASE, rows=rows))
    assert found == pytest.approx({kind: floors[kind].milliseconds for kind in ('miss', 'hit')})


def test_every_setup_is_measured_with_what_it_says(bundle, monkeypatch):
    seen = []
    measure = cost_sweep.measure_kinds

    def noted(policy, spec, kinds, rounds):
        infer = policy.infer

        def infer_noted(observation, settings):
            chunk, report = infer(observation, settings=settings)
            rows = 2 if settings.guided else 1
            setup = Setup(report.runs['vision'], report.denoise_steps, rows)
            seen.append(setup)
            return chunk, report

        monkeypatch.setattr(policy, 'infer', infer_noted)
        return measure(policy, spec, kinds, rounds)

    monkeypatch.setattr(cost_sweep, 'measure_kinds', noted)
    options = BenchOptions(backend='torch', precision='float32', repeats=1)
    found = run_sweep(bundle, options, BASE, RATES)
    assert found['notes'] == []
    assert list(found['axes']) == ['views', 'tokens', 'horizon', 'steps', 'rows']
    for axis in ('views', 'steps', 'rows'):
        for point in found['axes'][axis]:
            setup = replace(BASE, **{axis: point['value']})
            assert setup in seen, 'its miss'
            assert replace(setup, views=0) in seen, 'its hit'
            assert set(point['measured_ms']) == set(point['least_ms']) == {'miss', 'hit'}
            assert point['as_is'] == (setup == BASE)
    for axis in ('tokens', 'horizon'):
        points = found['axes'][axis]
        assert [bool(point['measured_ms']) for point in points] == [
            point['as_is'] for point in points
        ]
        least = [point['least_ms']['miss'] for point in points]
        assert least == sorted(least) and least[0] < least[-1]


def test_axes_without_a_choice_and_sizes_that_cannot_be_are_left_out(tmp_path):
    bundle = read_bundle(write_tiny_policy(tmp_path / 'act', tiny_spec('act')))
    # No language: no tokens, no second row; a head that runs once: no steps.
    assert list(setups_of(bundle, Setup(views=2, steps=1, rows=1))) == ['views']
    assert list(sizes_of(bundle)) == ['horizon']
    own = bundle.spec.dims.horizon
    assert own in sizes_of(bundle)['horizon']


@pytest.mark.parametrize(('name', 'steps'), [('act', 1), ('groot_n15', 4)])
def test_published_sizes_have_the_roofline_of_every_device(name, steps, monkeypatch):
    """With the steps that the family's policies are run with."""
    monkeypatch.setattr(cost_sweep, 'preset_names', lambda: (name,))
    found = published_floors()
    family, dims = preset(name)
    counts = count_operations(family, dims)
    assert set(found[name]) == set(DEVICES)
    floors = phase_floors(
        counts,
        published_rates(DEVICES['thor'], 'bfloat16'),
        precision='bfloat16',
        rows=1,
        steps=steps,
        views=dims.cameras,
    )
    assert found[name]['thor']['miss'] == pytest.approx(floors['miss'].milliseconds)


def test_sizes_whose_kernels_were_counted_have_predictions_which_the_page_shows(monkeypatch):
    monkeypatch.setattr(cost_sweep, 'preset_names', lambda: ('act', 'pi05'))
    published = published_floors()
    found = published_predictions(published)
    assert list(found) == ['pi05, torch', 'pi05, triton']
    family, dims = preset('pi05')
    floors = phase_floors(
        count_operations(family, dims),
        published_rates(DEVICES['thor'], 'bfloat16'),
        precision='bfloat16',
        rows=1,
        steps=10,
        views=dims.cameras,
    )
    kernels = performance_figures('pi05').kernels['triton']
    wanted = predicted_ms(floors, kernels, views=dims.cameras, steps=10)
    for kind in KINDS:
        assert found['pi05, triton']['thor'][kind] == pytest.approx(wanted[kind])
    figures = {
        'policy': 'one',
        'backend': 'torch',
        'precision': 'float32',
        'device_name': 'a device',
        **dict.fromkeys(('threads', 'views', 'rows', 'steps', 'repeats'), 1),
        'rates': None,
        'cost': {'axes': {}, 'notes': []},
        'published': published,
        'predicted': found,
    }
    page = cost_page({'figures': figures, 'command': 'bench', 'date': 'today'})
    assert '<th>pi05, triton</th>' in page and 'predicted</h2>' in page
    assert page.count(f'<td class="name">{DEVICES["thor"].name}</td>') == 2


def test_a_policy_is_closed_when_an_inference_fails(bundle, monkeypatch):
    closed = []
    load = bench.load_policy

    def loaded(*arguments):
        policy = load(*arguments)
        monkeypatch.setattr(policy, 'close', lambda: closed.append(True))
        return policy

    def fails(*_):
        raise RuntimeError('out of memory')

    monkeypatch.setattr(cost_sweep, 'load_policy', loaded)
    monkeypatch.setattr(cost_sweep, 'measure_kinds', fails)
    options = BenchOptions(backend='torch', precision='float32', repeats=1)
    with pytest.raises(RuntimeError, match='memory'):
        run_sweep(bundle, options, BASE, None)
    assert closed == [True]
