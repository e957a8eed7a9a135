"""Conditions and the studies that are declared with them."""

from dataclasses import asdict, replace

import pytest

from vla_tabletop.study.catalogue import BASE, STUDIES, Study
from vla_tabletop.study.condition import Condition, grid, value_text, varied_fields


def test_a_grid_has_every_combination_the_last_field_running_fastest():
    found = grid(BASE, variant=('still', 'moving'), replan_interval=(1, 8))
    assert [(c.variant, c.replan_interval) for c in found] == [
        ('still', 1),
        ('still', 8),
        ('moving', 1),
        ('moving', 8),
    ]
    assert varied_fields(found) == ('variant', 'replan_interval')


def test_a_grid_over_an_unknown_field_is_an_error():
    with pytest.raises(TypeError, match='speed'):
        grid(BASE, speed=(1, 2))


@pytest.mark.parametrize(
    ('field', 'value', 'message'),
    [
        ('variant', 'upside_down', "'upside_down'"),
        ('families', ('touch',), "'touch'"),
        ('families', (), 'families is empty'),
        ('colours', ('pink',), "'pink'"),
        ('colours', ('red',), 'position family without a task'),
        ('policy_family', 'pi7', 'policy_family'),
        ('absent_cameras', ('top',), 'absent_cameras'),
        ('absent_cameras', ('front', 'wrist'), 'absent_cameras'),
        ('delay_steps', -1.0, 'delay_steps'),
        ('delay_steps', float('nan'), 'delay_steps'),
        ('belt_speed', -1.0, 'belt_speed'),
        ('handover', 'jump', "'jump'"),
        ('handover', 'rtc', "'rtc'"),
        ('rtc_mode', 'soft', 'rtc_mode'),
    ],
)
def test_a_condition_that_cannot_be_is_an_error_that_names_the_field(field, value, message):
    with pytest.raises(ValueError, match=message):
        Condition(**{field: value})


def test_values_read_well():
    assert value_text('beta', None) == 'off'
    assert value_text('denoise_steps', None) == 'default'
    assert value_text('cache_max_image_change', None) == 'no limit'
    assert value_text('delay_steps', 2.0) == '2'
    assert value_text('absent_cameras', ()) == 'none'
    assert value_text('families', ('colour', 'position')) == 'colour + position'


@pytest.mark.parametrize('study', STUDIES.values(), ids=lambda study: study.name)
def test_every_study_varies_what_it_is_plotted_over(study):
    assert study.x in varied_fields(study.conditions)
    assert study.episodes >= 20
    # Two conditions of one curve at one place of the axis could not be told apart.
    others = [name for name in varied_fields(study.conditions) if name != study.x]
    places = [
        (getattr(c, study.x), *(getattr(c, name) for name in others)) for c in study.conditions
    ]
    assert len(set(places)) == len(places)


def test_the_base_condition_is_what_the_executor_ships_with(request):
    import yaml

    path = request.config.rootpath / 'config' / 'executor.yaml'
    shipped = yaml.safe_load(path.read_text())['/**']['ros__parameters']
    assert asdict(BASE)['replan_interval'] == shipped['replan_interval']
    assert BASE.handover == shipped['handover_mode']
    assert BASE.overrun == shipped['overrun']
    assert BASE.max_overrun_steps == shipped['max_overrun_steps']


def test_a_study_does_not_run_a_condition_twice():
    with pytest.raises(ValueError, match='named twice'):
        Study('s', 't', 'q', (BASE, BASE), x='variant', episodes=20)


def test_a_study_needs_its_reference_among_its_conditions():
    with pytest.raises(ValueError, match='reference'):
        Study('s', 't', 'q', grid(BASE, beta=(1.0, 2.0)), x='beta', episodes=20, reference=BASE)


def test_a_reference_of_each_condition_must_be_in_the_study():
    with pytest.raises(ValueError, match='reference'):
        Study(
            's',
            't',
            'q',
            grid(BASE, precision=('bfloat16', 'float16')),
            x='precision',
            episodes=20,
            reference={'precision': 'float32'},
        )


@pytest.mark.parametrize('precision', ['int8', 'fp8', 'nvfp4'])
def test_8_bits_that_a_backend_does_not_have_are_refused(precision):
    with pytest.raises(ValueError, match=f"precision '{precision}' is of backend"):
        replace(BASE, backend='torch', precision=precision)


def test_a_study_says_whose_bundle_runs_all_of_its_conditions_or_none() -> None:
    conditions = (BASE, replace(BASE, policy_family='act'))
    with pytest.raises(ValueError, match='policy_family'):
        Study('half', 'Half', '?', conditions, 'policy_family', 1)
