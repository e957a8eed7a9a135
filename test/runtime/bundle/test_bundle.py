"""The bundle on disk: what is written is read back, and whatever is wrong is named."""

import json
import os
import re
import struct
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny_policy import JOINTS, TOKENIZER, tiny_spec
from written_bundle import write_bundle

from vla_runtime.bundle.folder import Bundle, BundleError, read_bundle
from vla_runtime.bundle.rules import parse_spec
from vla_runtime.bundle.schema import BundleSpec, CameraSpec
from vla_runtime.bundle.summary import describe
from vla_runtime.bundle.tensors import TensorsError, read_arrays, read_header
from vla_runtime.bundle.writer import new_bundle, seal
from vla_runtime.files.safetensors_reader import SafetensorsReader

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
def folder(tmp_path):
    return write(tmp_path / 'bundle').folder


def edit(folder: Path, old: str, new: str) -> None:
    """Change policy.yaml by hand, as a user would."""
    path = folder / 'policy.yaml'
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def read_spec(folder: Path) -> BundleSpec:
    return parse_spec((folder / 'policy.yaml').read_text())


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
    assert 'known actions' not in text
    assert 'up to 4 known actions' in describe(replace(tiny_spec(), trained_delay_steps=4))


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

    @pytest.mark.parametrize(
        'name',
        [
            '.gitattributes',
            'README.md',
            '.cache/huggingface/.gitignore',
            '.cache/huggingface/download/policy.yaml.metadata',
            '.DS_Store',
            'onnx/.DS_Store',
        ],
    )
    def test_what_moving_a_bundle_leaves_beside_it_is_neither_read_nor_listed(self, folder, name):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        # Opened, it would be waited for without end.
        os.mkfifo(folder / name)
        spec = read_bundle(folder).spec
        assert seal(folder, spec).files == spec.files

    def test_a_readme_that_is_listed_is_held_to_its_hash(self, folder):
        (folder / 'README.md').write_text('a card')
        spec = read_spec(folder)
        seal(
            folder, replace(spec, files={**spec.files, 'README.md': sha256(b'a card').hexdigest()})
        )
        (folder / 'README.md').write_text('another card')
        fails(folder, r'README\.md: has changed')

    @pytest.mark.parametrize(
        'name',
        [
            'notes.txt',
            '.hidden',
            '.cache/other',
            '.cache/huggingface',
            '.gitattributes~',
            'a.DS_Store',
            'onnx/README.md',
            'onnx/vision.onnx',
            'model.pkl',
        ],
    )
    def test_an_extra_file_is_named_dotfiles_too(self, folder, name):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text('x')
        fails(folder, rf'{re.escape(name)}: is not listed in policy\.yaml')

    def test_a_linked_folder_is_refused_with_the_reason(self, folder, tmp_path):
        (folder / 'onnx').symlink_to(tmp_path, target_is_directory=True)
        fails(folder, 'onnx: is not listed.*is a link to a folder; of links only those to files')

    @pytest.mark.parametrize('verify', [True, False])
    @pytest.mark.parametrize(
        'name', ['weights.safetensors', 'statistics.safetensors', 'tokenizer.json', 'policy.yaml']
    )
    def test_a_fifo_is_refused_and_not_waited_for(self, folder, name, verify):
        (folder / name).unlink()
        os.mkfifo(folder / name)
        fails(folder, rf'{name}: is a FIFO \(named pipe\); expected a regular file', verify=verify)

    @pytest.mark.parametrize('name', ['weights.safetensors', 'tokenizer.json', 'policy.yaml'])
    def test_a_link_that_leads_nowhere_says_where_it_leads(self, folder, name):
        (folder / name).rename(folder.parent / 'moved')
        (folder / name).symlink_to('../blobs/gone')
        fails(folder, rf'{name}: is a link to \.\./blobs/gone, which is not there')

    def test_a_policy_yaml_of_many_megabytes_is_not_read(self, folder):
        with (folder / 'policy.yaml').open('ab') as file:
            file.truncate(300_000_000)
        fails(folder, r'policy\.yaml: is larger than 524,288 bytes; is it the right file\?')

    def test_nothing_new_is_sealed_that_is_no_file(self, folder):
        os.mkfifo(folder / 'more')
        with pytest.raises(BundleError):
            seal(folder, replace(read_spec(folder), files={}))

    @pytest.mark.parametrize('dtype', [np.int32, np.float64, np.uint8])
    def test_weights_of_a_kind_that_networks_do_not_load_are_refused(self, folder, dtype):
        save_file({'a': np.zeros(1, dtype)}, str(folder / 'weights.safetensors'))
        fails(
            folder,
            r"weights\.safetensors: tensor 'a' is (I32|F64|U8); expected one of F32, BF16, F16",
            verify=False,
        )

    @pytest.mark.parametrize('dtype', ['F4', 'F8_E4M3', 'F8_E8M0', 'BF16'])
    def test_statistics_of_a_kind_that_numpy_lacks_are_refused(self, folder, dtype):
        path = folder / 'statistics.safetensors'
        size = 2 if dtype == 'F4' else 4 * (1 + (dtype == 'BF16'))
        entry = {'dtype': dtype, 'shape': [4], 'data_offsets': [0, size]}
        header = json.dumps({'actions.mean': entry}).encode()
        path.write_bytes(struct.pack('<Q', len(header)) + header + bytes(size))
        said = rf"statistics\.safetensors: tensor 'actions\.mean' is {dtype}; expected F32 or F64"
        fails(folder, rf'{said}; export the bundle again', verify=False)

    def test_engines_made_on_this_machine_need_no_listing(self, folder):
        engine = folder / 'engines' / 'h200-trt10.3' / 'vision.plan'
        engine.parent.mkdir(parents=True)
        engine.write_bytes(b'made here')
        assert 'engines' not in str(read_bundle(folder).spec.files)

    def test_no_folder_and_no_bundle_are_told_apart(self, tmp_path):
        fails(tmp_path / 'nowhere', 'nowhere: no such folder; expected a policy bundle')
        fails(tmp_path, r'policy\.yaml: is missing; is this folder a policy bundle\?')


@pytest.mark.parametrize(
    ('old', 'new', 'pattern'),
    [
        ('horizon: 8', 'horizon: -8', r'field dimensions\.horizon: -8 where at least 1'),
        ('name: tiny pi05', 'name: [', r'line \d+, column \d+'),
        ('name: tiny pi05', 'name: !!python/name:os.system', r'line \d+'),
        ('  weights.safetensors:', '  other.txt:', "field files: 'weights.safetensors' is missing"),
        ('  tokenizer.json:', '  other.txt:', "field files: 'tokenizer.json' is missing"),
        (
            '  tokenizer.json: ',
            '  tokenizer.json: x',
            r"field files\['to.*'\]: .* is not a SHA-256",
        ),
        ('tokenizer: ', 'tokenizer: ../', 'field tokenizer: .* plain relative file name'),
        *(
            ('  tokenizer.json:', f"  '{name}':", r'field files\[.*plain relative file name')
            for name in ('../outside', '/etc/passwd', 'a/../b', './a', 'a//b', '.hidden', r'a\b')
        ),
    ],
)
def test_a_defect_in_policy_yaml_is_named_by_file_and_field(folder, old, new, pattern):
    edit(folder, old, new)
    fails(folder, rf'/policy\.yaml: {pattern}')


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
        with pytest.raises(BundleError, match=r'actions\.min'):
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
        with pytest.raises(BundleError, match='--force'):
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
        with pytest.raises(BundleError), new_bundle(target):
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
        with pytest.raises(BundleError):
            write(tmp_path / 'thesis', force=True)
        assert (tmp_path / 'thesis' / 'chapter1.tex').read_text() == 'years of work'

    def test_a_failure_leaves_nothing_behind(self, tmp_path):
        with pytest.raises(RuntimeError, match='disk'), new_bundle(tmp_path / 'b') as work:
            (work / 'weights.safetensors').write_text('half')
            raise RuntimeError('disk on fire')
        assert list(tmp_path.iterdir()) == []

    def test_a_failure_under_force_keeps_the_old_bundle(self, folder):
        with pytest.raises(RuntimeError), new_bundle(folder, force=True):
            raise RuntimeError('interrupted')
        assert read_bundle(folder).spec.name == 'tiny pi05'

    def test_an_unsealed_folder_never_takes_the_name(self, tmp_path):
        with pytest.raises(BundleError, match=r'policy\.yaml'), new_bundle(tmp_path / 'b'):
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
        with pytest.raises(BundleError, match=r'weights\.safetensors'):
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
        with pytest.raises(BundleError, match=r'tokenizer\.json'):
            seal(folder, spec)

    def test_weights_without_tensors_are_no_weights(self, folder):
        spec = replace(read_bundle(folder).spec, files={})
        save_file({}, str(folder / 'weights.safetensors'))
        with pytest.raises(BundleError, match=r'weights\.safetensors'):
            seal(folder, spec)


# --- Safetensors files that are larger than any policy's are refused before they are read


def sparse(path: Path, header: bytes, size: int, length: int | None = None) -> Path:
    """A file of this size that takes no room on the disk."""
    with path.open('wb') as file:
        file.write(struct.pack('<Q', len(header) if length is None else length) + header)
        file.truncate(size)
    return path


def test_statistics_of_a_gigabyte_are_refused_unread(tmp_path):
    size = 1 << 30
    header = b'{"a":{"dtype":"F32","shape":[%d],"data_offsets":[0,%d]}}'
    header %= (size // 4, size)
    path = sparse(tmp_path / 'statistics.safetensors', header, 8 + len(header) + size)
    with pytest.raises(TensorsError, match=r'statistics\.safetensors'):
        read_arrays(path)


@pytest.mark.parametrize('read', [read_header, read_arrays, SafetensorsReader])
def test_a_header_of_many_megabytes_is_refused_unread(tmp_path, read):
    path = sparse(tmp_path / 'weights.safetensors', b'', (1 << 30) + 8, length=1 << 29)
    with pytest.raises(ValueError, match='header'):
        read(path)


@pytest.mark.parametrize('read', [read_header, read_arrays, SafetensorsReader])
@pytest.mark.parametrize(
    'header',
    [
        b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,16]}}',
        b'{"a":{"dtype":"F32","shape":[9],"data_offsets":[0,36]}}',
        b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]},'
        b'"b":{"dtype":"F32","shape":[2],"data_offsets":[8,16]}}',
        b'[]',
        b'{"a"',
    ],
)
def test_a_header_that_does_not_fit_its_file_is_refused_by_all_that_read_it(tmp_path, read, header):
    path = sparse(tmp_path / 'weights.safetensors', header, 8 + len(header) + 16)
    with pytest.raises(ValueError, match=r'weights\.safetensors'):
        read(path)
