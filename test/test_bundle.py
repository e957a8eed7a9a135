"""The bundle on disk: what is written is read back, and whatever is wrong is named."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from tiny_policy import JOINTS, TOKENIZER, tiny_spec

from vla_runtime.bundle import (
    ActionSpec,
    Bundle,
    BundleError,
    BundleSpec,
    CameraSpec,
    PoseSpec,
    StateSpec,
    new_bundle,
    read_bundle,
    seal,
    write_bundle,
)
from vla_runtime.bundle_rules import dump_spec, parse_spec
from vla_runtime.bundle_summary import describe

COUNT = len(JOINTS)


def statistics() -> dict[str, np.ndarray]:
    return {
        'state.q01': np.full(COUNT, -1.0),
        'state.q99': np.full(COUNT, 1.0),
        'actions.mean': np.zeros(COUNT, np.float32),
        'actions.std': np.ones(COUNT, np.float32),
    }


def write(
    target: Path, spec: BundleSpec | None = None, *, force: bool = False, **changes
) -> Bundle:
    return write_bundle(
        target,
        spec or tiny_spec(),
        weights={'action_in.weight': np.arange(6, dtype=np.float32).reshape(2, 3)},
        statistics={**statistics(), **changes},
        tokenizer=TOKENIZER,
        force=force,
    )


@pytest.fixture
def folder(tmp_path) -> Path:
    return write(tmp_path / 'bundle').folder


def edit(folder: Path, old: str, new: str) -> None:
    """Change policy.yaml by hand, as a user would."""
    path = folder / 'policy.yaml'
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def fails(folder: Path, pattern: str, *, verify: bool = True) -> None:
    with pytest.raises(BundleError, match=pattern):
        read_bundle(folder, verify=verify)


def test_a_bundle_reads_back_as_it_was_written(tmp_path):
    spec = tiny_spec('pi0', advantage='before_action', delta=True)
    written = write(tmp_path / 'a' / 'bundle', spec)
    bundle = read_bundle(tmp_path / 'a' / 'bundle')
    assert replace(bundle.spec, files={}) == spec
    assert bundle.spec == written.spec
    assert set(bundle.spec.files) == {
        'weights.safetensors',
        'statistics.safetensors',
        'tokenizer.json',
    }
    for key, value in statistics().items():
        assert bundle.statistics[key].dtype == value.dtype
        np.testing.assert_array_equal(bundle.statistics[key], value)
    assert load_file(bundle.weights_path)['action_in.weight'].shape == (2, 3)
    assert bundle.tokenizer_path.read_bytes() == TOKENIZER.read_bytes()


def test_every_file_can_be_read_by_whoever_may_read_the_folder(folder):
    for path in folder.iterdir():
        assert path.stat().st_mode & 0o044 == 0o044, path.name


def test_summary_names_policy_units_and_kinds():
    text = describe(tiny_spec(advantage='task_newline', delta=True))
    for words in ('tiny pi05 (pi05)', 'shoulder [rad] delta to shoulder', 'advantage task_newline'):
        assert words in text


class TestFiles:
    def test_a_changed_file_is_named(self, folder):
        path = folder / 'tokenizer.json'
        path.write_text(path.read_text().replace('1.0', '1.1'))
        fails(folder, r'tokenizer\.json: has changed: its SHA-256 is .* policy\.yaml says')

    def test_without_verification_only_names_and_headers_are_checked(self, folder):
        path = folder / 'tokenizer.json'
        path.write_text('{}')
        assert read_bundle(folder, verify=False).spec.name == 'tiny pi05'

    @pytest.mark.parametrize('name', ['weights.safetensors', 'statistics.safetensors'])
    def test_a_truncated_file_is_named_even_without_verification(self, folder, name):
        path = folder / name
        path.write_bytes(path.read_bytes()[:-8])
        fails(folder, rf'{name}: is not a whole safetensors file', verify=False)

    @pytest.mark.parametrize(
        'name', ['weights.safetensors', 'statistics.safetensors', 'tokenizer.json']
    )
    def test_a_missing_file_is_named(self, folder, name):
        (folder / name).unlink()
        fails(folder, rf'{name}: is missing, but policy\.yaml lists it')

    @pytest.mark.parametrize('name', ['notes.txt', '.hidden', 'onnx/vision.onnx', 'model.pkl'])
    def test_an_extra_file_is_named_dotfiles_too(self, folder, name):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text('x')
        fails(folder, rf'{re.escape(name)}: is not listed in policy\.yaml')

    def test_a_linked_folder_counts_as_an_extra_file(self, folder, tmp_path):
        (folder / 'onnx').symlink_to(tmp_path, target_is_directory=True)
        fails(folder, 'onnx: is not listed')

    def test_engines_made_on_this_machine_need_no_listing(self, folder):
        engine = folder / 'engines' / 'h200-trt10.3' / 'vision.plan'
        engine.parent.mkdir(parents=True)
        engine.write_bytes(b'made here')
        assert 'engines' not in str(read_bundle(folder).spec.files)

    @pytest.mark.parametrize('name', ['weights.safetensors', 'tokenizer.json'])
    def test_a_file_that_a_bundle_needs_must_be_listed(self, folder, name):
        edit(folder, f'  {name}:', '  other.txt:')
        fails(folder, rf"policy\.yaml: field files: '{name}' is missing")

    @pytest.mark.parametrize(
        'name', ['../outside', '/etc/passwd', 'a/../b', './a', 'a//b', '.hidden', r'a\b']
    )
    def test_a_file_name_never_leaves_the_folder(self, folder, name):
        edit(folder, '  tokenizer.json:', f"  '{name}':")
        fails(folder, r'policy\.yaml: field files\[.*plain relative file name')

    def test_a_tokenizer_name_never_leaves_the_folder(self, folder):
        edit(folder, 'tokenizer: tokenizer.json', 'tokenizer: ../tokenizer.json')
        fails(folder, r'policy\.yaml: field tokenizer: .* plain relative file name')

    def test_a_hash_is_a_hash(self, folder):
        edit(folder, '  tokenizer.json: ', '  tokenizer.json: x')
        fails(folder, r"field files\['tokenizer\.json'\]: .* is not a SHA-256")

    def test_no_folder_and_no_bundle_are_told_apart(self, tmp_path):
        fails(tmp_path / 'nowhere', 'nowhere: no such folder; expected a policy bundle')
        fails(tmp_path, r'policy\.yaml: is missing; is this folder a policy bundle\?')


# What a hand at policy.yaml gets wrong: text there, text instead, what the error must say.
DEFECTS: dict[str, tuple[str, str, str]] = {
    'unknown key': ('denoise_steps:', 'denoise_step:', r"field denoise_step: .*'denoise_steps'"),
    'unknown inner key': ('padding:', 'paddding:', r"field images\.paddding: .*'padding'"),
    'missing key': ('name: tiny pi05\n', '', r'field name: is missing'),
    'key twice': ('family: pi05', 'name: other\nfamily: pi05', r"line 3.*'name' is given twice"),
    'format': ('format: 1', 'format: 2', r'field format: 2 where 1 is expected'),
    'no format': ('format: 1\n', '', r'field format: None where 1'),
    'family': ('family: pi05', 'family: pi5', r"field family: 'pi5' .* did you mean 'pi05'"),
    'text for number': (
        'denoise_steps: 3',
        'denoise_steps: three',
        r"'three' \(str\) where a whole",
    ),
    'bool for number': ('denoise_steps: 3', 'denoise_steps: true', r'true where a whole number'),
    'fraction': ('denoise_steps: 3', 'denoise_steps: 3.5', r'3\.5 \(float\) where a whole number'),
    'zero steps': (
        'denoise_steps: 3',
        'denoise_steps: 0',
        r'field denoise_steps: 0 where at least',
    ),
    'negative size': (
        'horizon: 8',
        'horizon: -8',
        r'field dimensions\.horizon: -8 where at least 1',
    ),
    'number for text': ('name: tiny pi05', 'name: 5', r'field name: 5 \(int\) .* put it in quotes'),
    'empty text': ('name: tiny pi05', "name: ''", r"field name: '' is empty"),
    'NaN': ('step_time_s: 0.05', 'step_time_s: .nan', r'field step_time_s: nan where a finite'),
    'infinity': (
        'step_time_s: 0.05',
        'step_time_s: .inf',
        r'field step_time_s: inf where a finite',
    ),
    'negative time': (
        'step_time_s: 0.05',
        'step_time_s: -0.05',
        r'step_time_s: -0\.05 where seconds',
    ),
    'list for mapping': (
        'images: {padding: centre, resample: bilinear}',
        'images: []',
        r'a list wh',
    ),
    'mapping for list': ('- {name: top, present: true}\n', '', r'field cameras: 1 entries but dim'),
    'nothing for list': (
        'denoise_steps: 3',
        'poses:\ndenoise_steps: 3',
        r'poses: nothing where a l',
    ),
    'camera twice': ('{name: wrist', '{name: top', r"field cameras\[1\]\.name: 'top' is given 2"),
    'camera not there': (
        '- {name: top, present: true}\n- {name: wrist, present: true}',
        '- {name: top, present: false}\n- {name: wrist, present: false}',
        r'field cameras: none is present',
    ),
    'state twice': ('- {name: elbow,', '- {name: shoulder,', r'field state\[1\]\.name: .* 2 times'),
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
    'vision heads': ('num_heads: 2', 'num_heads: 5', r'field dimensions: vision: width 24 is not'),
    'pi0 prompt': (
        'template: pi05_state',
        'template: pi0_state',
        r'field prompt\.template: .*pi05_s',
    ),
    'state token': ('state_dim: 0', 'state_dim: 6', r'field dimensions\.state_dim: 6 where 0'),
    'more actions than padded': ('action_dim: 6', 'action_dim: 2', r'field actions: 3 entries but'),
    'absolute rate': (
        '{name: elbow, unit: rad, k',
        '{name: elbow, unit: rad/s, k',
        r'does not fit',
    ),
    'velocity of a length': ('rad, kind: absolute}', 'rad, kind: velocity}', r"kind 'velocity'"),
    'delta to nothing': (
        'rad, kind: absolute}',
        'rad, kind: delta}',
        r'field actions\[0\]\.relative_to: is missing',
    ),
    'delta to a stranger': (
        'rad, kind: absolute}',
        'rad, kind: delta, relative_to: shouler}',
        r"field actions\[0\]\.relative_to: 'shouler' .* did you mean 'shoulder'",
    ),
    'delta in another unit': (
        'name: shoulder, unit: rad, kind: absolute}',
        'name: shoulder, unit: deg, kind: delta, relative_to: shoulder}',
        r"field actions\[0\]\.unit: 'deg' but its state 'shoulder' is in 'rad'",
    ),
    'absolute to something': (
        'rad, kind: absolute}',
        'rad, kind: absolute, relative_to: shoulder}',
        r"field actions\[0\]\.relative_to: 'shoulder' is only for the kind 'delta'",
    ),
    'Python object': (
        'name: tiny pi05',
        'name: !!python/object/apply:os.getcwd []',
        r'could not det',
    ),
    'not YAML': ('name: tiny pi05', 'name: [', r'policy\.yaml: line \d+'),
    'no mapping': ('format: 1', '- format: 1', r'policy\.yaml: line'),
    'machine path': (
        'source: {}',
        'source: {from: /home/me}',
        r'source\.from',
    ),
}


@pytest.mark.parametrize('defect', DEFECTS, ids=str)
def test_a_defect_in_policy_yaml_is_named_by_file_and_field(folder, defect):
    old, new, pattern = DEFECTS[defect]
    edit(folder, old, new)
    fails(folder, rf'policy\.yaml: .*{pattern}' if 'policy' not in pattern else pattern)


class TestStatistics:
    @pytest.mark.parametrize(
        ('key', 'value', 'pattern'),
        [
            (
                'state.q01',
                np.zeros(COUNT + 1),
                r'field state\.q01: float64 of shape \(4,\) .* \(3,\)',
            ),
            ('state.q01', np.zeros(COUNT, np.int64), r'field state\.q01: int64 of shape'),
            ('state.q01', np.array([0, np.nan, 0.0]), r"field state\.q01: .*'elbow' is not finite"),
            ('actions.std', np.array([1, -1, 1.0]), r'field actions\.std: has a negative number'),
            ('state.q01', np.full(COUNT, 2.0), r'field state\.q01: is above state\.q99'),
            ('action.mean', np.zeros(COUNT), r"field action\.mean: unknown .*'actions\.mean'"),
        ],
    )
    def test_unusable_numbers_are_named(self, tmp_path, key, value, pattern):
        with pytest.raises(BundleError, match=rf'statistics\.safetensors: {pattern}'):
            write(tmp_path / 'bundle', **{key: value})
        assert list(tmp_path.iterdir()) == []

    def test_what_the_normaliser_reads_must_be_there(self, tmp_path):
        spec = tiny_spec()
        spec = replace(spec, normalisation=replace(spec.normalisation, actions='min_max'))
        with pytest.raises(
            BundleError, match=r"actions\.min: is missing; the normaliser 'min_max'"
        ):
            write(tmp_path / 'bundle', spec)

    def test_identity_needs_no_numbers(self, tmp_path):
        spec = tiny_spec()
        spec = replace(spec, normalisation=replace(spec.normalisation, actions='identity'))
        numbers = {key: value for key, value in statistics().items() if key.startswith('state')}
        bundle = write_bundle(
            tmp_path / 'bundle',
            spec,
            weights={'w': np.zeros(1, np.float32)},
            statistics=numbers,
            tokenizer=TOKENIZER,
        )
        assert set(bundle.statistics) == set(numbers)


class TestWriting:
    def test_an_existing_target_is_left_alone(self, folder):
        before = (folder / 'policy.yaml').read_text()
        with pytest.raises(BundleError, match=r'exists already; .* --force'):
            write(folder, replace(tiny_spec(), name='other'))
        assert (folder / 'policy.yaml').read_text() == before

    def test_force_replaces_a_bundle(self, folder):
        (folder / 'engines').mkdir()
        write(folder, replace(tiny_spec(), name='other'), force=True)
        assert read_bundle(folder).spec.name == 'other'
        assert not (folder / 'engines').exists(), 'engines belong to the old weights'
        assert [path.name for path in folder.parent.iterdir()] == ['bundle']

    @pytest.mark.parametrize('target', ['.', '..', '/'])
    def test_a_bundle_needs_a_name(self, target):
        with pytest.raises(BundleError, match='has no name of its own'), new_bundle(target):
            pass

    def test_a_link_to_a_bundle_is_replaced_and_its_target_kept(self, folder, tmp_path):
        link = tmp_path / 'link'
        link.symlink_to(folder, target_is_directory=True)
        write(link, replace(tiny_spec(), name='other'), force=True)
        assert read_bundle(link).spec.name == 'other'
        assert read_bundle(folder).spec.name == 'tiny pi05'

    def test_force_never_replaces_what_is_not_a_bundle(self, tmp_path):
        (tmp_path / 'thesis').mkdir()
        (tmp_path / 'thesis' / 'chapter1.tex').write_text('years of work')
        with pytest.raises(BundleError, match=r'is not a policy bundle .* remove it yourself'):
            write(tmp_path / 'thesis', force=True)
        assert (tmp_path / 'thesis' / 'chapter1.tex').read_text() == 'years of work'

    def test_a_failure_leaves_nothing_behind(self, tmp_path):
        with pytest.raises(RuntimeError, match='disk on fire'), new_bundle(tmp_path / 'b') as work:
            (work / 'weights.safetensors').write_text('half')
            raise RuntimeError('disk on fire')
        assert list(tmp_path.iterdir()) == []

    def test_a_failure_under_force_keeps_the_old_bundle(self, folder):
        with pytest.raises(RuntimeError), new_bundle(folder, force=True):
            raise RuntimeError('interrupted')
        assert read_bundle(folder).spec.name == 'tiny pi05'

    def test_an_unsealed_folder_never_takes_the_name(self, tmp_path):
        with (
            pytest.raises(BundleError, match=r'policy\.yaml: is missing'),
            new_bundle(tmp_path / 'b'),
        ):
            pass
        assert list(tmp_path.iterdir()) == []

    def test_an_invalid_spec_is_refused_before_it_is_on_disk(self, tmp_path):
        spec = replace(tiny_spec(), cameras=(CameraSpec('top'),))
        with pytest.raises(BundleError, match=rf'{tmp_path}/b/policy\.yaml: field cameras: 1 ent'):
            write(tmp_path / 'b', spec)
        assert list(tmp_path.iterdir()) == []


class TestSealing:
    def test_sealing_again_lists_a_new_file(self, folder):
        spec = read_bundle(folder).spec
        (folder / 'verification.json').write_text('{}')
        sealed = seal(folder, spec)
        assert 'verification.json' in sealed.files
        assert read_bundle(folder).spec == sealed

    def test_sealing_never_blesses_a_changed_file(self, folder):
        spec = read_bundle(folder).spec
        save_file({'w': np.zeros(1, np.float32)}, str(folder / 'weights.safetensors'))
        with pytest.raises(BundleError, match=r'weights\.safetensors: has changed'):
            seal(folder, spec)

    def test_a_dropped_entry_is_hashed_anew(self, folder):
        spec = read_bundle(folder).spec
        save_file({'w': np.zeros(1, np.float32)}, str(folder / 'weights.safetensors'))
        kept = {k: v for k, v in spec.files.items() if k != 'weights.safetensors'}
        seal(folder, replace(spec, files=kept))
        assert read_bundle(folder).spec.files != spec.files

    def test_a_file_that_is_not_there_cannot_be_sealed(self, folder):
        spec = read_bundle(folder).spec
        (folder / 'tokenizer.json').unlink()
        with pytest.raises(BundleError, match=r'tokenizer\.json: is missing; a bundle needs it'):
            seal(folder, spec)

    def test_weights_without_tensors_are_no_weights(self, folder):
        spec = replace(read_bundle(folder).spec, files={})
        save_file({}, str(folder / 'weights.safetensors'))
        with pytest.raises(BundleError, match=r'weights\.safetensors: holds no tensors'):
            seal(folder, spec)


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
            (
                {'rotation': QUATERNION[:3]},
                r'poses\[0\]\.rotation: 3 names but quaternion_wxyz has 4',
            ),
            ({'position': ('x', 'y', 'w')}, r"poses\[0\]\.position\[2\]: 'w' is not in actions"),
            (
                {'position': ('x', 'y', 'y')},
                r"position\[2\]: 'y' is already used by poses\[0\]\.po",
            ),
            ({'euler_axes': 'sxyz'}, r"poses\[0\]\.euler_axes: is for the form 'euler'"),
            ({'form': 'euler', 'rotation': QUATERNION[:3]}, r'poses\[0\]\.euler_axes'),
            (
                {'form': 'euler', 'rotation': QUATERNION[:3], 'euler_axes': 'sxxz'},
                r"euler_axes: 'sxxz' where s or r and three axes",
            ),
            ({'state_position': ()}, r'poses\[0\]\.state_position: 0 names where 3 state names'),
            (
                {'state_rotation': ('qw', 'qx', 'qy', 'q')},
                r"poses\[0\]\.state_rotation\[3\]: 'q' is not in state",
            ),
            ({'frame': 'world'}, r"poses\[0\]\.frame: 'world' is unknown"),
        ],
    )
    def test_a_pose_that_does_not_fit_is_named(self, tmp_path, changes, pattern):
        with pytest.raises(BundleError, match=pattern):
            write(tmp_path / 'bundle', pose_spec(**changes))

    def test_a_pose_and_its_actions_are_of_one_kind(self, tmp_path):
        spec = pose_spec()
        first, *rest = spec.actions
        mixed = replace(spec, actions=(replace(first, kind='absolute'), *rest))
        with pytest.raises(
            BundleError, match=r"position\[0\]: 'x' has kind 'absolute' but the pose"
        ):
            write(tmp_path / 'bundle', mixed)

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
        step_time_s=draw(st.floats(1e-6, 1e3)),
        denoise_steps=draw(st.integers(1, 1000)),
        prompt=replace(spec.prompt, advantage=draw(st.sampled_from([None, 'before_action']))),
        files={'weights.safetensors': draw(digests), 'a b/ü.json': draw(digests)},
    )


@given(specs())
def test_any_valid_spec_survives_the_way_through_yaml(spec):
    assert parse_spec(dump_spec(spec)) == spec
