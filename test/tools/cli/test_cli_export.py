"""`vla_runtime export` and `info` as their users run them."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
import tokenizers
import torch
from checkpoint_folders import (
    copy_lerobot_folder,
    edit_json,
    edit_step,
    full_size_shapes,
    joints,
    lerobot_arguments,
    lerobot_folder,
    make_relative,
    openpi_arguments,
    openpi_statistics,
    pi0_tensors,
    save_tensors,
    tiny_tensors,
    write_openpi_folder,
    write_sparse_checkpoint,
)
from paths import ROOT
from PIL import Image
from safetensors.torch import save_file as save_torch_file

from vla_convert.checkpoints.dims import ShownDims
from vla_convert.checkpoints.tensors import read_tensors
from vla_convert.readers.pi import NAMES
from vla_runtime.bundle.folder import read_bundle
from vla_runtime.bundle.schema import ActionSpec
from vla_runtime.cli.main import main
from vla_runtime.declarations.pi import PiDims
from vla_runtime.family.listing import find_family
from vla_runtime.policy import Policy
from vla_runtime.types import Observation


def export(folder: Path, target: Path, *arguments: str) -> int:
    # Without ONNX files, which test_cli_verify.py and test/export make: they take seconds.
    return main(
        ['export', str(folder), '--out', str(target), '--onnx-precision', 'none', *arguments]
    )


def fails(capsys, folder: Path, target: Path, *arguments: str) -> str:
    """The error of an export that cannot be; nothing is left on disk."""
    assert export(folder, target, *arguments) == 2
    assert not target.exists()
    text = capsys.readouterr().err
    assert text.startswith('error: ')
    return text


def chunk_of(bundle: Path, cameras: tuple[str, ...] = ('top', 'wrist')) -> np.ndarray:
    """One seeded inference in normalised actions."""
    random = np.random.default_rng(5)
    images = {name: random.integers(0, 256, (48, 64, 3), dtype=np.uint8) for name in cameras}
    policy = Policy.load(bundle)
    state = random.uniform(-0.5, 0.5, len(policy.spec.state))
    chunk, _ = policy.infer(Observation(images, state, 'pick up the red cup'))
    return chunk.normalised


TOP, WRIST, FRONT = (f'observation.images.{name}' for name in ('top', 'wrist', 'front'))


@pytest.mark.parametrize(
    ('images', 'renamed', 'options', 'mended'),
    [
        # A fine-tune keeps a camera of its base model that its data set has not.
        ({TOP: 'video', 'observation.depth': 'float32'}, {}, [], '--cameras top,wrist=absent'),
        ({TOP: 'image'}, {}, [], '--cameras top,wrist=absent'),
        ({TOP: 'video'}, {}, ['--cameras', 'top,wrist=absent'], None),
        # Other cameras alone are another data set.
        ({FRONT: 'video'}, {}, [], ''),
        ({TOP: 'video', WRIST: 'video'}, {}, [], None),
        ({TOP: 'video', FRONT: 'video'}, {FRONT: WRIST}, [], None),
        ({TOP: 'video', WRIST: 'video'}, {FRONT: WRIST}, [], None),
        ({}, {}, [], None),
    ],
)
def test_a_camera_that_the_data_set_lacks_is_named_with_what_mends_it(
    tmp_path, capsys, images, renamed, options, mended
):
    policy, data = copy_lerobot_folder(tmp_path / 'policy'), tmp_path / 'data' / 'meta'
    edit_step(policy, 'rename_observations_processor', rename_map=renamed)
    data.mkdir(parents=True)
    features = {
        key: {'dtype': dtype, 'shape': [48, 64, 3], 'names': ['height', 'width', 'channels']}
        for key, dtype in images.items()
    }
    (data / 'info.json').write_text(json.dumps({'fps': 30, 'features': features}))
    words = [*lerobot_arguments(), '--dataset', str(data.parent), '--dry-run', *options]
    assert export(policy, tmp_path / 'bundle', *words) == 0
    said = ''.join(capsys.readouterr())
    notes = [text for text in said.splitlines() if 'data set only' in text]
    assert len(notes) == (mended is not None)
    for note in notes:
        assert note.endswith(mended) and ('absent' in note) == bool(mended)


def test_a_dry_run_says_where_each_field_came_from(tmp_path, capsys):
    words = [*lerobot_arguments(), '--dry-run']
    assert export(lerobot_folder(), tmp_path / 'b', *words) == 0
    told = capsys.readouterr().out
    for name, place in {
        'dimensions.horizon': 'config.json, chunk_size',
        'denoise_steps': 'config.json, num_inference_steps',
        'tokenizer': 'tokenizer.json',
        'step_time_s': '--rate-hz',
    }.items():
        assert f'{name}: {place}\n' in told


class TestOpenpi:
    def test_its_policy_sees_and_acts_as_openpi_says(self, tmp_path):
        numbers = openpi_statistics(32)
        folder = write_openpi_folder(tmp_path / 'p', tiny_tensors(), numbers)
        cameras = ('base', 'left', 'right')
        arguments = [item for item in openpi_arguments() if item != '--absolute']
        arguments += ['--delta', ','.join(joints().split(',')[:5]), '--cameras', ','.join(cameras)]
        assert export(folder, tmp_path / 'b', *arguments) == 0
        policy = Policy.load(tmp_path / 'b')
        assert policy.spec.normalisation.actions == 'quantiles_openpi'
        random = np.random.default_rng(3)
        state = random.uniform(-0.5, 0.5, 6)
        size = policy.spec.dims.vision.image_size
        images = {name: random.integers(0, 256, (90, 120, 3), dtype=np.uint8) for name in cameras}
        noise = random.normal(size=(12, 32)).astype(np.float32)
        chunk, report = policy.infer(Observation(images, state, ' pick_up the cup'), noise=noise)

        # Actions: openpi's quantile formula, and the state added to the first five.
        q01, q99 = (np.asarray(numbers['actions'][key])[:6] for key in ('q01', 'q99'))
        expected = (chunk.normalised[:, :6] + 1) / 2 * (q99 - q01 + 1e-6) + q01
        expected[:, :5] += state[:5]
        np.testing.assert_allclose(chunk.actions, expected, rtol=0, atol=1e-5)
        # Prompt: openpi's words, with the state in openpi's quantiles.
        q01, q99 = (np.asarray(numbers['state'][key])[:6] for key in ('q01', 'q99'))
        scaled = (state - q01) / (q99 - q01 + 1e-6) * 2 - 1
        bins = ' '.join(map(str, np.digitize(scaled, np.linspace(-1, 1, 257)[:-1]) - 1))
        prompt = f'Task: pick up the cup, State: {bins};\nAction: '
        words = tokenizers.Tokenizer.from_file(str(tmp_path / 'b' / 'tokenizer.json'))
        ids = words.encode(prompt, add_special_tokens=False).ids
        assert report.tokens == (len(ids) + 1,)
        # Images: Pillow's resize, pasted into a black square, change nothing any more.
        seen = {}
        for name, image in images.items():
            height = int(90 / (120 / size))
            square = np.zeros((size, size, 3), np.uint8)
            top = (size - height) // 2
            small = Image.fromarray(image).resize((size, height), resample=Image.BILINEAR)
            square[top : top + height] = np.asarray(small)
            seen[name] = square
        again, _ = policy.infer(Observation(seen, state, 'pick up the cup'), noise=noise)
        np.testing.assert_array_equal(again.normalised, chunk.normalised)
        other, _ = policy.infer(
            Observation({**seen, 'left': 255 - seen['left']}, state, 'pick up the cup'), noise=noise
        )
        assert not np.array_equal(other.normalised, chunk.normalised)

    def test_a_pi0_folder_becomes_a_bundle(self, tmp_path, capsys):
        folder = write_openpi_folder(tmp_path / 'p', pi0_tensors(), openpi_statistics(), horizon=10)
        arguments = openpi_arguments()
        assert 'contradict' in fails(capsys, folder, tmp_path / 'b', *arguments)
        index = arguments.index('--prompt-template')
        del arguments[index : index + 2]
        assert export(folder, tmp_path / 'b', *arguments) == 0
        spec = read_bundle(tmp_path / 'b').spec
        assert (spec.family, spec.prompt.template, spec.dims.state_dim) == ('pi0', 'pi0', 32)
        assert spec.dims.prompt_length == 48
        cameras = ('base_0_rgb', 'left_wrist_0_rgb', 'right_wrist_0_rgb')
        assert np.isfinite(chunk_of(tmp_path / 'b', cameras)).all()


def test_a_lerobot_pi0_folder_becomes_a_bundle(tmp_path):
    folder = copy_lerobot_folder(tmp_path / 'p')
    save_tensors(folder, {f'model.{name}': tensor for name, tensor in pi0_tensors().items()})
    edit_json(folder / 'config.json', lambda d: d.update(type='pi0', chunk_size=10))

    def rename(document: dict) -> None:
        step = document['steps'][4]
        assert step['registry_name'] == 'pi05_prepare_state_tokenizer_processor_step'
        step['registry_name'] = 'pi0_new_line_processor'

    edit_json(folder / 'policy_preprocessor.json', rename)
    assert export(folder, tmp_path / 'b', *lerobot_arguments()) == 0
    spec = read_bundle(tmp_path / 'b').spec
    assert (spec.family, spec.prompt.template, spec.prompt.cleaning) == ('pi0', 'pi0', 'lerobot')
    assert np.isfinite(chunk_of(tmp_path / 'b')).all()


def test_relative_actions_are_added_to_the_state_they_were_trained_against(tmp_path):
    folder = copy_lerobot_folder(tmp_path / 'p')
    assert export(folder, tmp_path / 'absolute', *lerobot_arguments()) == 0
    make_relative(folder)
    assert export(folder, tmp_path / 'relative', *lerobot_arguments()) == 0
    images = {name: np.zeros((48, 64, 3), np.uint8) for name in ('top', 'wrist')}
    observation = Observation(images, np.linspace(-0.3, 0.4, 6), 'pick up the red cup')
    absolute, relative = (
        Policy.load(tmp_path / name).infer(observation)[0] for name in ('absolute', 'relative')
    )
    np.testing.assert_array_equal(absolute.normalised, relative.normalised)
    # The gripper, last, is excluded.
    added = np.broadcast_to([*observation.state[:5], 0.0], absolute.actions.shape)
    np.testing.assert_allclose(relative.actions - absolute.actions, added, rtol=0, atol=1e-6)


def test_a_sentencepiece_tokenizer_goes_along_too(tmp_path, capsys):
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(['Task: pick up the red cup, State: 1 2 3;\nAction: '] * 9),
        model_writer=model,
        vocab_size=40,
        hard_vocab_limit=False,
        bos_piece='<bos>',
        minloglevel=2,
        num_threads=1,
    )
    tokenizer = tmp_path / 'paligemma.model'
    tokenizer.write_bytes(model.getvalue())
    folder = copy_lerobot_folder(tmp_path / 'p')
    (folder / 'tokenizer.json').unlink()
    arguments = [*lerobot_arguments(), '--tokenizer', str(tokenizer)]
    assert export(folder, tmp_path / 'b', *arguments) == 0
    assert read_bundle(tmp_path / 'b').tokenizer_path.name == 'tokenizer.model'
    tokenizer.write_bytes(b'not a model')
    assert 'paligemma.model' in fails(capsys, folder, tmp_path / 'c', *arguments)


@pytest.mark.parametrize('family', ['pi05', 'pi0'])
def test_a_full_size_policy_is_planned_without_reading_its_weights(family, tmp_path, capsys):
    folder = tmp_path / 'p'
    statistics = {'norm_stats': openpi_statistics()}
    (folder / 'assets' / 'droid').mkdir(parents=True)
    (folder / 'assets' / 'droid' / 'norm_stats.json').write_text(json.dumps(statistics))
    stored = tiny_tensors() if family == 'pi05' else pi0_tensors()
    write_sparse_checkpoint(folder / 'model.safetensors', full_size_shapes(family, NAMES, stored))
    names, tokenizer = joints(), str(lerobot_folder() / 'tokenizer.json')
    arguments = ['--state-names', names, '--action-names', names, '--units', 'rad', '--absolute']
    arguments += ['--rate-hz', '15', '--tokenizer', tokenizer, '--horizon', '50']
    arguments += ['--prompt-template', 'pi05_state' if family == 'pi05' else 'pi0']
    assert export(folder, tmp_path / 'b', *arguments, '--dry-run') == 0
    assert 'vision 27x1152, language 18x2048, expert 18x1024' in capsys.readouterr().out
    tensors = read_tensors(folder, NAMES)
    heads = {'vision.num_heads': 16, 'language.num_kv_heads': 1}
    shown = ShownDims(PiDims, tensors, heads)
    dims = shown.make(cameras=3, prompt_length=200, horizon=50)
    assert (
        replace(dims, prompt_length=find_family(family).presets[family].prompt_length)
        == find_family(family).presets[family]
    )


class TestMissing:
    def test_all_that_a_lerobot_folder_lacks_is_asked_for_at_once(self, tmp_path, capsys):
        folder = copy_lerobot_folder(tmp_path / 'p')
        (folder / 'tokenizer.json').unlink()
        text = fails(capsys, folder, tmp_path / 'b')
        asked = {line.split()[0] for line in text.splitlines() if line.startswith('  --')}
        assert asked == {
            *('--state-names', '--action-names', '--units', '--rate-hz'),
            *('--tokenizer', '--vision-heads'),
        }
        assert 'names of the 6 measured state dimensions' in text

    def test_units_still_open_are_named(self, tmp_path, capsys):
        arguments = lerobot_arguments()
        arguments[arguments.index('rad')] = 'gripper=1,elbow_flex=deg'
        text = fails(capsys, lerobot_folder(), tmp_path / 'b', *arguments)
        assert 'unit of the state shoulder_pan, shoulder_lift, wrist_flex, wrist_roll:' in text

    @pytest.mark.parametrize(('unit', 'meant'), [('deg', 'radians'), ('percent', 'radians')])
    def test_units_that_the_statistics_contradict_are_asked_about_once(
        self, tmp_path, capsys, unit, meant
    ):
        arguments = lerobot_arguments()
        arguments[arguments.index('rad')] = unit
        text = fails(capsys, lerobot_folder(), tmp_path / 'b', *arguments)
        assert f'are these {meant}' in text and '--units' in text
        # The answer that the question asks for.
        by_name = ','.join(f'{name}={unit}' for name in joints().split(','))
        assert by_name in text
        arguments[arguments.index(unit)] = by_name
        assert export(lerobot_folder(), tmp_path / 'b', *arguments) == 0

    def test_units_may_differ_between_state_and_action(self, tmp_path):
        arguments = lerobot_arguments()
        arguments[arguments.index('rad')] = 'rad,gripper=1,action:gripper=rad/s'
        arguments += ['--velocity', 'gripper']
        assert export(lerobot_folder(), tmp_path / 'b', *arguments) == 0
        spec = read_bundle(tmp_path / 'b').spec
        assert spec.state[5].unit == '1'
        assert spec.actions[5] == ActionSpec('gripper', 'rad/s', 'velocity')


def write_info(folder: Path) -> None:
    """Write a data set's description of two actions beside a folder."""
    info = {'fps': 25, 'features': {'action': {'names': ['a', 'b']}}}
    folder.with_name('info.json').write_text(json.dumps(info))


class TestContradictions:
    @pytest.mark.parametrize(
        ('arguments', 'pattern'),
        [
            (['--horizon', '50'], '--horizon says 50 but the LeRobot pi05 folder says 12'),
            (['--kv-heads', '2'], '--kv-heads says 2 but the LeRobot pi05 folder says 1'),
            (['--denoise-steps', '5'], '--denoise-steps says 5 but'),
            (['--prompt-length', '200'], '--prompt-length says 200 but'),
            (['--prompt-template', 'pi0'], '--prompt-template says pi0 but'),
            (['--vision-heads', '5'], '--vision-heads says 5, but the vision tower only divides'),
            (
                ['--cameras', 'left,r=absent'],
                '--cameras says left,r=absent but the folder says top,wrist',
            ),
            (['--dataset', '/nope'], '--dataset says /nope, but there is no such folder'),
            (['--dataset', __file__], f"--dataset: {__file__} is a '.py' file"),
            (['--delta', 'gripper'], '--delta says gripper but the folder says that no action is'),
            (['--velocity', 'gripperr'], "is no action; did you mean 'gripper'?"),
            (['--units', 'rad,griper=1'], "which is no dimension; did you mean 'gripper'?"),
            (['--units', 'radiann'], "'radiann', which is no unit; did you mean"),
            (['--state-names', 'a,b'], '--state-names says 2 names for the measured state but'),
            (['--state-names', 'a'], '--state-names says 1 name for the measured state but'),
            (['--rate-hz', '-3'], '--rate-hz says -3; expected 0.017 to 1000, actions a second'),
            (['--rate-hz', 'nan'], '--rate-hz says nan; expected'),
            (['--asset-id', 'x'], '--asset-id is given, but LeRobot pi05 has no use for it'),
            (
                ['--tokenizer', '/nowhere.model'],
                '--tokenizer /nowhere.model: there is no such file',
            ),
            (['--tokenizer', __file__], 'expected tokenizer.json or tokenizer.model'),
        ],
    )
    def test_an_option_against_the_folder_names_both(self, tmp_path, capsys, arguments, pattern):
        # argparse keeps the last of an option given twice.
        text = fails(capsys, lerobot_folder(), tmp_path / 'b', *lerobot_arguments(), *arguments)
        assert pattern in text

    @pytest.mark.parametrize('others', [lerobot_arguments(), []], ids=['all else', 'nothing else'])
    @pytest.mark.parametrize('units', ['furlong', 'rad,gripper=furlong', 'state:gripper=furlong'])
    def test_a_unit_that_is_none_is_said_at_once(self, tmp_path, capsys, others, units):
        text = fails(capsys, lerobot_folder(), tmp_path / 'b', *others, '--units', units)
        assert text.startswith("error: --units says 'furlong', which is no unit; expected one of")
        assert text.count('\n') == 1

    def test_heads_that_fit_are_listed_and_the_option_is_blamed(self, tmp_path, capsys):
        folder = write_openpi_folder(tmp_path / 'p', tiny_tensors(), openpi_statistics())
        edit_json(folder / 'config.json', lambda d: d.pop('paligemma_variant'))
        arguments = [*openpi_arguments(), '--vision-heads', '7', '--kv-heads', '3']
        text = fails(capsys, folder, tmp_path / 'b', *arguments)
        shapes = {name: list(tensor.shape) for name, tensor in tiny_tensors().items()}
        width = next(s[0] for n, s in shapes.items() if n.endswith('patch_embedding.weight'))
        fits = ', '.join(str(heads) for heads in range(1, width + 1) if width % heads == 0)
        assert f'--vision-heads says 7, but the vision tower only divides into {fits} heads' in text
        assert "--kv-heads says 3, but the language model's attention only divides into 1" in text
        assert 'the checkpoint contradicts itself' not in text

    @pytest.mark.parametrize(
        ('change', 'arguments', 'told'),
        [
            (
                lambda folder: edit_json(
                    folder / 'config.json', lambda d: d.update(max_action_dim=16)
                ),
                [],
                'say action dimensions 16 but the tensors show 32',
            ),
            (
                lambda folder: edit_json(
                    folder / 'tokenizer.json',
                    lambda d: d['model']['vocab'].update({f'w{n}': 400 + n for n in range(10)}),
                ),
                [],
                "tokens but the policy's text table only 400",
            ),
            (
                lambda folder: folder.with_name('other.json').write_text('{}'),
                ['--tokenizer', 'other.json'],
                'but the folder has another tokenizer.json',
            ),
            (write_info, ['--dataset', 'info.json'], '--rate-hz says 30.0 but --dataset says fps'),
            (write_info, ['--dataset', 'info.json'], 'but --dataset says a, b'),
        ],
    )
    def test_files_against_each_other_name_both(
        self, tmp_path, capsys, monkeypatch, change, arguments, told
    ):
        monkeypatch.chdir(tmp_path)
        folder = copy_lerobot_folder(tmp_path / 'p')
        change(folder)
        words = [*lerobot_arguments(), *arguments]
        assert told in fails(capsys, folder, tmp_path / 'b', *words)


class TestTarget:
    def test_a_dry_run_shows_and_writes_nothing(self, tmp_path, capsys):
        assert export(lerobot_folder(), tmp_path / 'b', *lerobot_arguments(), '--dry-run') == 0
        assert list(tmp_path.iterdir()) == []
        text = capsys.readouterr().out
        assert 'shoulder_pan [rad] absolute' in text
        assert 'nothing was written' in text

    def test_a_bundle_is_replaced_only_by_force(self, tmp_path, capsys):
        target = tmp_path / 'b'
        assert export(lerobot_folder(), target, *lerobot_arguments(), '--name', 'first') == 0
        assert export(lerobot_folder(), target, *lerobot_arguments()) == 2
        assert 'exists already' in capsys.readouterr().err
        assert read_bundle(target).spec.name == 'first'
        assert export(lerobot_folder(), target, *lerobot_arguments(), '--force') == 0
        assert read_bundle(target).spec.name == 'b'

    def test_a_dry_run_refuses_what_the_export_would_refuse(self, tmp_path, capsys):
        arguments = [*lerobot_arguments(), '--dry-run']
        target = tmp_path / 'b'
        assert export(lerobot_folder(), target, *lerobot_arguments()) == 0
        assert export(lerobot_folder(), target, *arguments) == 2
        assert 'exists already' in capsys.readouterr().err
        assert export(lerobot_folder(), target, *arguments, '--force') == 0
        assert 'would be replaced' in capsys.readouterr().out
        below = target / 'policy.yaml' / 'c'
        assert export(lerobot_folder(), below, *arguments) == 2
        assert 'cannot be made, because' in capsys.readouterr().err

    def test_the_bundle_names_no_path_of_this_machine(self, tmp_path):
        assert export(lerobot_folder(), tmp_path / 'b', *lerobot_arguments()) == 0
        text = (tmp_path / 'b' / 'policy.yaml').read_text()
        assert str(tmp_path) not in text
        assert str(lerobot_folder()) not in text


class TestInfo:
    def test_a_bundle_is_checked_and_shown(self, tmp_path, capsys):
        assert export(lerobot_folder(), tmp_path / 'b', *lerobot_arguments()) == 0
        (tmp_path / 'b' / 'engines' / 'orin-trt10.3').mkdir(parents=True)
        capsys.readouterr()
        assert main(['info', str(tmp_path / 'b')]) == 0
        text = capsys.readouterr().out
        assert 'SHA-256 of each agrees' in text
        assert 'engine      orin-trt10.3' in text

    def test_a_spoiled_bundle_is_an_error_without_a_traceback(self, tmp_path, capsys):
        assert export(lerobot_folder(), tmp_path / 'b', *lerobot_arguments()) == 0
        (tmp_path / 'b' / 'tokenizer.json').write_text('{}')
        assert main(['info', str(tmp_path / 'b')]) == 2
        assert 'tokenizer.json: has changed' in capsys.readouterr().err
        text = (lerobot_folder() / 'tokenizer.json').read_text()
        (tmp_path / 'b' / 'tokenizer.json').write_text(text + ' ')
        assert main(['info', str(tmp_path / 'b')]) == 2
        assert main(['info', str(tmp_path / 'b'), '--no-verify']) == 0


def test_the_module_runs_as_a_program(tmp_path):
    command = [sys.executable, '-m', 'vla_runtime', 'export', str(lerobot_folder())]
    # The ONNX files are other tests' business, in this process.
    arguments = ['--out', str(tmp_path / 'b'), *lerobot_arguments(), '--onnx-precision', 'none']
    options = {'cwd': ROOT, 'capture_output': True, 'text': True, 'timeout': 120}
    done = subprocess.run([*command, *arguments], **options)
    assert done.returncode == 0, done.stderr
    assert 'next: vla_runtime info' in done.stdout
    assert read_bundle(tmp_path / 'b').spec.name == 'b'


def test_another_familys_checkpoint_is_told_by_its_type(tmp_path, capsys):
    folder = tmp_path / 'diffusion'
    folder.mkdir()
    (folder / 'config.json').write_text('{"type": "vqbet"}')
    tensors = {'model.vlm_with_expert.x.weight': torch.zeros(2)}
    save_torch_file(tensors, folder / 'model.safetensors')
    assert export(folder, tmp_path / 'b') == 2
    assert "policies of type 'vqbet' are not served" in capsys.readouterr().err
