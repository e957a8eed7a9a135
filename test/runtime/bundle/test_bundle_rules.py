"""The rules of policy.yaml: whatever does not belong together is named by its field."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from tiny_policy import aloha_spec, tiny_spec, write_tiny_policy

from vla_runtime.bundle.folder import read_bundle
from vla_runtime.bundle.rules import LIMITS, check_guidable, check_spec, dump_spec, parse_spec
from vla_runtime.bundle.schema import (
    STEP_TIMES_S,
    ActionSpec,
    BundleSpec,
    CameraSpec,
    ImageSpec,
    PoseSpec,
    StateSpec,
)
from vla_runtime.bundle.statistics import check_statistics
from vla_runtime.bundle.success import spec_identity
from vla_runtime.bundle.summary import describe
from vla_runtime.declarations.pi import PI0, PiDims
from vla_runtime.family.dimensions import limits_of
from vla_runtime.family.listing import find_family
from vla_runtime.files import typed_yaml
from vla_runtime.files.field_error import FieldError
from vla_runtime.models.shapes.bundle_contents import check_contents

PI0_TWO_CAMERAS = replace(PI0, cameras=2)

# What a hand at policy.yaml gets wrong: text there, text instead, what the error must say.
DEFECTS: dict[str, tuple[str, str, str]] = {
    'unknown key': ('denoise_steps:', 'denoise_step:', 'field denoise_step'),
    'unknown inner key': ('padding:', 'paddding:', r'field images\.paddding'),
    'missing key': ('name: tiny pi05\n', '', 'field name'),
    'format': ('format: 1', 'format: 2', 'field format'),
    'no format': ('format: 1\n', '', 'field format'),
    'family': ('family: pi05', 'family: pi5', 'field family'),
    'text for number': ('denoise_steps: 3', 'denoise_steps: three', "'three'"),
    'fraction': ('denoise_steps: 3', 'denoise_steps: 3.5', r'3\.5 \(float\) where a whole number'),
    'trained delay beyond the chunk': (
        'trained_delay_steps: 0',
        'trained_delay_steps: 9',
        'field trained_delay_steps',
    ),
    'a student without its recommended steps': (
        'trained_delay_steps: 0',
        'trained_delay_steps: 0\nstudent_steps: [1, 2]',
        r'field denoise_steps: 3 is none of student_steps, \[1, 2\]',
    ),
    'steps of a student in disorder': (
        'trained_delay_steps: 0',
        'trained_delay_steps: 0\nstudent_steps: [3, 1]',
        'field student_steps',
    ),
    'zero steps': ('denoise_steps: 3', 'denoise_steps: 0', 'field denoise_steps'),
    'too many steps': ('denoise_steps: 3', 'denoise_steps: 101', 'field denoise_steps'),
    'an image of gigabytes': ('image_size: 28', 'image_size: 3976', 'field dimensions'),
    'negative size': ('horizon: 8', 'horizon: -8', r'field dimensions\.horizon'),
    'number for text': ('name: tiny pi05', 'name: 5', 'field name'),
    'empty text': ('name: tiny pi05', "name: ''", 'field name'),
    'negative time': ('step_time_s: 0.05', 'step_time_s: -0.05', 'step_time_s'),
    'nothing for list': (
        'denoise_steps: 3',
        'poses:\ndenoise_steps: 3',
        r'poses: nothing where a l',
    ),
    'camera twice': ('{name: wrist', '{name: top', r'field cameras\[1\]\.name'),
    'camera not there': (
        '- {name: top, present: true}\n- {name: wrist, present: true}',
        '- {name: top, present: false}\n- {name: wrist, present: false}',
        'field cameras',
    ),
    'state twice': ('- {name: elbow,', '- {name: shoulder,', r'field state\[1\]\.name'),
    'unit': (
        '{name: elbow, unit: rad}',
        '{name: elbow, unit: radian}',
        r"state\[1\]\.unit: 'radian'",
    ),
    'unit without quotes': (
        '{name: elbow, unit: rad}',
        '{name: elbow, unit: 1}',
        r'1 \(int\) where',
    ),
    'vision heads': ('num_heads: 2', 'num_heads: 5', 'field dimensions'),
    'pi0 prompt': ('template: pi05_state', 'template: pi0_state', r'field prompt\.template'),
    'text of an earlier version': (
        'template: pi05_state',
        "frame: '{images}{task}', template: pi05_state",
        r'field prompt\.frame',
    ),
    'image text of an earlier version': (
        'horizon: 8',
        'image_frames: [[1], [2]]\n  horizon: 8',
        r'field dimensions\.image_frames',
    ),
    'state token': ('state_dim: 0', 'state_dim: 6', r'field dimensions\.state_dim'),
    'more actions than padded': ('action_dim: 6', 'action_dim: 2', 'field actions'),
    'absolute rate': (
        '{name: elbow, unit: rad, k',
        '{name: elbow, unit: rad/s, k',
        r'does not fit',
    ),
    'velocity of a length': ('rad, kind: absolute}', 'rad, kind: velocity}', r"kind 'velocity'"),
    'delta to nothing': (
        'rad, kind: absolute}',
        'rad, kind: delta}',
        r'field actions\[0\]\.relative_to',
    ),
    'delta to a stranger': (
        'rad, kind: absolute}',
        'rad, kind: delta, relative_to: shouler}',
        r'field actions\[0\]\.relative_to',
    ),
    'delta in another unit': (
        'name: shoulder, unit: rad, kind: absolute}',
        'name: shoulder, unit: deg, kind: delta, relative_to: shoulder}',
        r'field actions\[0\]\.unit',
    ),
    'absolute to something': (
        'rad, kind: absolute}',
        'rad, kind: absolute, relative_to: shoulder}',
        r'field actions\[0\]\.relative_to',
    ),
    'no mapping': ('format: 1', '- format: 1', r'line'),
    'machine path': ('source: {}', 'source: {from: /home/me}', r'source\.from'),
}


ALL_LIMITS = LIMITS | {
    f'dimensions.{field}': limit for field, limit in limits_of(find_family('pi05').dims).items()
}


@pytest.mark.parametrize('defect', DEFECTS, ids=str)
def test_a_defect_is_named_by_its_field(defect):
    old, new, pattern = DEFECTS[defect]
    text = dump_spec(tiny_spec())
    assert old in text
    with pytest.raises(FieldError, match=pattern):
        parse_spec(text.replace(old, new, 1))


@pytest.mark.parametrize('field', ALL_LIMITS)
def test_every_size_has_a_limit_that_a_published_policy_keeps(field):
    document = yaml.safe_load(dump_spec(replace(tiny_spec('pi0'), dims=PI0_TWO_CAMERAS)))
    assert check_spec(parse_spec(yaml.safe_dump(document))) is None
    *path, key = field.split('.')
    inner = document
    for part in path:
        inner = inner[part]
    assert inner[key] * 4 <= ALL_LIMITS[field]
    inner[key] = ALL_LIMITS[field] + 1
    with pytest.raises(FieldError):
        parse_spec(yaml.safe_dump(document))


@pytest.mark.parametrize(
    ('stack', 'changes', 'pattern'),
    [
        (('language', 'expert'), {'head_dim': 7}, 'field dimensions'),
        (('expert',), {'width': 15}, 'field dimensions'),
    ],
)
def test_halves_need_an_even_number(stack, changes, pattern):
    document = yaml.safe_load(dump_spec(tiny_spec()))
    for name in stack:
        document['dimensions'][name].update(changes)
    with pytest.raises(FieldError, match=pattern):
        parse_spec(yaml.safe_dump(document))


POSITION = ('x', 'y', 'z')
QUATERNION = ('qw', 'qx', 'qy', 'qz')


def pose_spec(**changes) -> BundleSpec:
    """A policy of one end effector; `changes` go to its pose."""
    kind = changes.get('kind', 'delta')
    pose = PoseSpec(
        **{
            'name': 'arm',
            'position': POSITION,
            'rotation': QUATERNION,
            'form': 'quaternion_wxyz',
            'kind': 'delta',
            'frame': 'base',
            'state_position': POSITION,
            'state_rotation': QUATERNION,
            **changes,
        }
    )
    base = tiny_spec()
    units = dict.fromkeys(POSITION, 'm') | dict.fromkeys(QUATERNION, '1')
    return replace(
        base,
        dims=replace(base.dims, action_dim=8),
        state=tuple(StateSpec(name, unit) for name, unit in units.items()),
        actions=tuple(ActionSpec(name, unit, kind) for name, unit in units.items()),
        poses=(pose,),
    )


class TestPoses:
    def test_a_pose_reads_back(self):
        spec = pose_spec()
        assert parse_spec(dump_spec(spec)) == spec

    @pytest.mark.parametrize(
        ('changes', 'pattern'),
        [
            ({'rotation': QUATERNION[:3]}, r'poses\[0\]\.rotation'),
            ({'position': ('x', 'y', 'w')}, r'poses\[0\]\.position\[2\]'),
            ({'position': ('x', 'y', 'y')}, r'position\[2\]'),
            ({'euler_axes': 'sxyz'}, r'poses\[0\]\.euler_axes'),
            ({'form': 'euler', 'rotation': QUATERNION[:3]}, r'poses\[0\]\.euler_axes'),
            ({'form': 'euler', 'rotation': QUATERNION[:3], 'euler_axes': 'sxxz'}, 'euler_axes'),
            ({'state_position': ()}, r'poses\[0\]\.state_position'),
            ({'state_rotation': ('qw', 'qx', 'qy', 'q')}, r'poses\[0\]\.state_rotation\[3\]'),
            ({'frame': 'world'}, r'poses\[0\]\.frame'),
        ],
    )
    def test_a_pose_that_does_not_fit_is_named(self, changes, pattern):
        with pytest.raises(FieldError, match=pattern):
            check_spec(pose_spec(**changes))

    def test_a_pose_and_its_actions_are_of_one_kind(self):
        spec = pose_spec()
        first, *rest = spec.actions
        mixed = replace(spec, actions=(replace(first, kind='absolute'), *rest))
        with pytest.raises(FieldError, match=r'position\[0\]'):
            check_spec(mixed)

    def test_units_of_a_pose_are_those_it_is_composed_in(self):
        spec = pose_spec()
        state = tuple(replace(s, unit='mm') if s.name == 'y' else s for s in spec.state)
        with pytest.raises(FieldError, match=r'state_position\[1\]'):
            check_spec(replace(spec, state=state))
        state = tuple(replace(s, unit='deg') if s.name == 'qx' else s for s in spec.state)
        with pytest.raises(FieldError, match=r'state_rotation\[1\]'):
            check_spec(replace(spec, state=state))
        actions = tuple(replace(a, unit='deg') if a.name == 'qx' else a for a in spec.actions)
        with pytest.raises(FieldError, match=r'rotation\[1\]'):
            check_spec(replace(spec, actions=actions))

    def test_an_absolute_pose_needs_no_measured_one(self):
        spec = pose_spec(kind='absolute', state_position=(), state_rotation=())
        assert parse_spec(dump_spec(spec)) == spec


names = st.text(st.characters(exclude_categories=['C', 'Z']), min_size=1, max_size=12)


@st.composite
def specs(draw: Callable) -> BundleSpec:
    """Any valid spec of joints: names of every script, every unit, kinds, both families."""
    spec = tiny_spec(draw(st.sampled_from(['pi05', 'pi0'])))
    joints = draw(st.lists(names, min_size=1, max_size=6, unique=True))
    units = [draw(st.sampled_from(['rad', 'deg', 'm', 'mm', '1', 'percent'])) for _ in joints]
    actions = []
    for joint, unit in zip(joints, units, strict=True):
        kind = draw(st.sampled_from(['absolute', 'delta', 'velocity']))
        rate = draw(st.sampled_from(['rad/s', 'deg/s', 'm/s', '1', 'percent']))
        relative_to = joint if kind == 'delta' else None
        actions.append(ActionSpec(joint, rate if kind == 'velocity' else unit, kind, relative_to))
    first, second = draw(st.lists(names, min_size=2, max_size=2, unique=True))
    digests = st.text('0123456789abcdef', min_size=64, max_size=64)
    return replace(
        spec,
        name=draw(names),
        cameras=(CameraSpec(first), CameraSpec(second, draw(st.booleans()))),
        state=tuple(StateSpec(*pair) for pair in zip(joints, units, strict=True)),
        actions=tuple(actions),
        step_time_s=draw(st.floats(*STEP_TIMES_S)),
        denoise_steps=draw(st.integers(1, 100)),
        prompt=replace(spec.prompt, advantage=draw(st.sampled_from([None, 'before_action']))),
        files={'weights.safetensors': draw(digests), 'a b/ü.json': draw(digests)},
    )


@given(specs())
def test_any_valid_spec_survives_the_way_through_yaml(spec):
    assert parse_spec(dump_spec(spec)) == spec


def test_a_format_that_is_a_long_text_is_quoted_short():
    with pytest.raises(FieldError) as error:
        parse_spec(f'format: {"x" * 5000}\n')
    assert len(str(error.value)) < 300


def test_the_types_of_a_file_are_checked_once(monkeypatch):
    checked: list[type] = []
    parse = typed_yaml.parse
    monkeypatch.setattr(
        typed_yaml, 'parse', lambda kind, *rest: (checked.append(kind), parse(kind, *rest))[1]
    )
    parse_spec(dump_spec(tiny_spec()))
    assert (checked.count(BundleSpec), checked.count(PiDims)) == (1, 1)


# --- A joint space converts certain joints: others under its name are refused by their field


def changed(group: str, index: int, **changes):
    spec = aloha_spec()
    items = list(getattr(spec, group))
    items[index] = replace(items[index], **changes)
    return replace(spec, **{group: tuple(items)})


def test_alohas_joints_are_accepted_written_and_shown():
    spec = aloha_spec()
    text = dump_spec(spec)
    assert 'joint_space: openpi_aloha' in text
    assert parse_spec(text) == spec
    assert 'openpi_aloha' in describe(spec)
    assert 'joint_space' not in dump_spec(tiny_spec())


@pytest.mark.parametrize(
    ('spec', 'words'),
    [
        (replace(tiny_spec(), joint_space='openpi_aloha'), 'field state'),
        (replace(aloha_spec(), actions=aloha_spec().actions[:13]), 'field actions'),
        (changed('state', 6, unit='m'), r'field state\[6\]\.unit'),
        (
            replace(
                changed('state', 3, unit='deg'), actions=changed('actions', 3, unit='deg').actions
            ),
            r'field state\[3\]\.unit',
        ),
        (changed('actions', 13, unit='percent'), r'field actions\[13\]\.unit'),
        (changed('actions', 6, kind='delta', relative_to='lg'), r'field actions\[6\]\.kind'),
        (changed('actions', 6, kind='velocity'), r'field actions\[6\]\.kind'),
        (changed('actions', 1, relative_to='r2'), r'field actions\[1\]\.relative_to'),
    ],
)
def test_other_joints_are_refused_by_field(spec, words):
    with pytest.raises(FieldError, match=words):
        check_spec(spec)


# --- A policy has a prompt and a tokenizer if its family has language, and neither otherwise

WITH, WITHOUT = tiny_spec('pi0'), tiny_spec('act')
# Recordings made before `normalisation.images` and policies without language name this one.
IDENTITY = '6bae8704a9a0d054a2f474252eab3a23f9af7b0df5b9d2ddd98e944dc36b3990'


@pytest.mark.parametrize(
    ('spec', 'message'),
    [
        (replace(WITH, prompt=None), 'field prompt'),
        (replace(WITH, tokenizer=None), 'field tokenizer'),
        (replace(WITHOUT, prompt=WITH.prompt), 'field prompt'),
        (replace(WITHOUT, tokenizer='a.json'), 'field tokenizer'),
        (replace(WITHOUT, images=ImageSpec('none', 'bilinear')), 'its resample is none'),
        (replace(WITHOUT, images=ImageSpec('centre', 'bilinear')), 'field images.bars'),
        (
            replace(WITHOUT, images=ImageSpec('letterbox', 'bicubic_pillow', fill=(1, 1, 1))),
            'field normalisation.images',
        ),
        (
            replace(WITHOUT, dims=replace(WITHOUT.dims, images=((9000, 64),))),
            'field dimensions.images',
        ),
    ],
)
def test_what_does_not_fit_is_refused_by_field(spec, message):
    with pytest.raises(FieldError, match=message):
        check_spec(spec)


def test_a_bundle_without_language_is_whole_without_a_tokenizer(tmp_path):
    bundle = read_bundle(write_tiny_policy(tmp_path / 'act', WITHOUT))
    check_contents(bundle)
    assert not [name for name in bundle.spec.files if 'tokenizer' in name]
    text = describe(bundle.spec)
    assert 'none: the policy has no language' in text
    assert '48x64 px, not resized' in text and 'vocabulary' not in text


def test_guidance_says_that_there_is_no_language():
    with pytest.raises(ValueError, match='cfg_enabled'):
        check_guidable(WITHOUT, 'cfg_enabled')


def test_the_identity_of_a_bundle_without_new_fields_is_what_it_was():
    assert spec_identity(WITH) == IDENTITY


@pytest.mark.parametrize('lost', ['images.top.mean', 'images.wrist.std'])
def test_statistics_of_every_camera_are_needed(tmp_path, lost):
    bundle = read_bundle(write_tiny_policy(tmp_path / 'act', WITHOUT))
    kept = {name: values for name, values in bundle.statistics.items() if name != lost}
    with pytest.raises(FieldError, match=f'field {lost}: is missing'):
        check_statistics(WITHOUT, kept)
    with pytest.raises(FieldError, match=r'images\.top\.mean'):
        check_statistics(WITHOUT, {**bundle.statistics, 'images.top.mean': np.zeros(2)})
    with pytest.raises(FieldError, match=r'images\.side\.mean'):
        check_statistics(WITHOUT, {**bundle.statistics, 'images.side.mean': np.zeros(3)})


PI05 = tiny_spec('pi05')


@pytest.mark.parametrize(
    ('spec', 'field'),
    [
        (replace(WITH, images=replace(WITH.images, averaged=(32, 32))), 'images.averaged'),
        (replace(WITHOUT, images=replace(WITHOUT.images, bars=-3.0)), 'images.bars'),
        (replace(WITH, images=replace(WITH.images, bars=-9.0)), 'images.bars'),
        (replace(WITH, prompt=replace(WITH.prompt, state_bins=32)), 'prompt.state_bins'),
        (replace(PI05, prompt=replace(PI05.prompt, state_bins=1)), 'prompt.state_bins'),
        (replace(WITHOUT, flow_times='summed'), 'flow_times'),
    ],
)
def test_what_early_releases_did_goes_with_what_it_is_about(spec, field):
    with pytest.raises(FieldError) as caught:
        check_spec(spec)
    assert caught.value.field == field


def test_what_early_releases_did_is_read_back_and_makes_another_bundle():
    prompt = replace(PI05.prompt, template='pi05_state', state_bins=32)
    early = replace(
        PI05, prompt=prompt, images=replace(PI05.images, bars=-3.0), flow_times='summed'
    )
    assert parse_spec(dump_spec(early)) == early
    assert spec_identity(early) != spec_identity(PI05)


@pytest.mark.parametrize(
    ('family', 'changes', 'field'),
    [
        ('pi05', {}, 'dimensions.horizon'),
        ('groot_n17', {'real_horizon': 5}, 'dimensions.real_horizon'),
    ],
)
def test_a_trained_delay_is_judged_by_the_actions_that_reach_the_robot(family, changes, field):
    spec = tiny_spec(family)
    spec = replace(spec, dims=replace(spec.dims, **changes))
    check_spec(replace(spec, trained_delay_steps=spec.real_horizon))
    with pytest.raises(FieldError) as refused:
        check_spec(replace(spec, trained_delay_steps=spec.real_horizon + 1))
    assert refused.value.field == 'trained_delay_steps' and f'({field})' in refused.value.message
