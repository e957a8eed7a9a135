"""A bundle whose files do not fit each other is named before anybody loads it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from commands import run_command
from safetensors.torch import load_file, save_file
from tiny_policy import tiny_spec, write_tiny_policy

from vla_runtime.bundle.folder import BundleError, read_bundle
from vla_runtime.bundle.schema import BundleSpec
from vla_runtime.bundle.writer import seal
from vla_runtime.cli.main import main
from vla_runtime.models.shapes.bundle_contents import check_contents, check_finite, weight_bytes


@pytest.fixture
def folder(tmp_path) -> Path:
    return write_tiny_policy(tmp_path / 'bundle', tiny_spec())


@pytest.fixture
def no_pytorch(monkeypatch) -> None:
    monkeypatch.delitem(sys.modules, 'vla_runtime.models.base.flow_network', raising=False)
    monkeypatch.setitem(sys.modules, 'torch', None)


def reseal(folder: Path, change: Callable[[BundleSpec], BundleSpec] = lambda spec: spec) -> None:
    """Hash everything anew, as someone does who edits a bundle and knows about the hashes."""
    spec = read_bundle(folder, verify=False).spec
    seal(folder, replace(change(spec), files={}))


def edit_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    path = folder / 'weights.safetensors'
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    reseal(folder)


def info_fails(folder: Path, capsys, *arguments: str) -> str:
    capsys.readouterr()
    assert main(['info', str(folder), *arguments]) == 2
    text = capsys.readouterr().err
    assert text.startswith('error: ')
    return text


@pytest.mark.parametrize('family', ['pi05', 'pi0', 'smolvla', 'evo1'])
def test_a_whole_bundle_passes(tmp_path, capsys, family):
    folder = write_tiny_policy(tmp_path / 'b', tiny_spec(family))
    assert main(['info', str(folder)]) == 0
    assert 'fit the networks, every number is finite' in capsys.readouterr().out
    assert main(['info', str(folder / 'policy.yaml'), '--quick']) == 0
    text = capsys.readouterr().out
    assert 'fit the networks, numbers not read' in text and 'names only' in text


def test_a_file_that_is_no_bundle_is_told_so(tmp_path, capsys):
    (tmp_path / 'notes.txt').write_text('x')
    assert 'notes.txt: is a file; expected' in info_fails(tmp_path / 'notes.txt', capsys)


class TestWeights:
    def test_missing_and_unexpected_tensors_are_named(self, folder, capsys):
        def change(tensors: dict[str, torch.Tensor]) -> None:
            tensors['extra.weight'] = tensors.pop('action_out.bias')

        edit_weights(folder, change)
        text = info_fails(folder, capsys, '--quick')
        assert 'weights.safetensors: against family and dimensions in policy.yaml' in text
        assert "missing 'action_out.bias' [6]" in text
        assert "unexpected 'extra.weight' [6]" in text

    @pytest.mark.parametrize(
        ('changes', 'name'),
        [
            ({'vocabulary': 500}, 'language.embedding.weight'),
            ({'action_dim': 8}, 'action_in.weight'),
        ],
    )
    def test_a_size_that_the_weights_do_not_have_is_named(self, folder, capsys, changes, name):
        reseal(folder, lambda spec: replace(spec, dims=replace(spec.dims, **changes)))
        assert f"'{name}' has shape" in info_fails(folder, capsys)

    def test_another_image_size_is_named(self, folder, capsys):
        def change(spec: BundleSpec) -> BundleSpec:
            vision = replace(spec.dims.vision, image_size=42)
            return replace(spec, dims=replace(spec.dims, vision=vision))

        reseal(folder, change)
        text = info_fails(folder, capsys)
        assert "'vision.position_embedding' has shape [4, 24] where [9, 24] is expected" in text

    def test_another_family_is_named(self, folder, capsys):
        def change(spec: BundleSpec) -> BundleSpec:
            prompt = replace(spec.prompt, template='pi0')
            dims = replace(spec.dims, state_dim=6)
            return replace(spec, family='pi0', prompt=prompt, dims=dims)

        reseal(folder, change)
        assert 'more' in info_fails(folder, capsys).splitlines()[-1], 'ten, then a count'

    def test_a_good_bundle_takes_no_slow_import_but_the_networks(self, folder):
        done = run_command('info', str(folder))
        assert done.returncode == 0, done.stderr
        assert 'fit the networks, every number is finite' in done.stdout
        assert not done.imported & {'onnx', 'onnxruntime', 'rclpy', 'mujoco', 'cv2'}

    def test_without_pytorch_the_weights_are_not_said_to_fit(self, folder, no_pytorch, capsys):
        assert main(['info', str(folder), '--quick']) == 0
        assert 'not compared with the networks (needs PyTorch)' in capsys.readouterr().out


class TestFinite:
    @pytest.mark.parametrize('kind', [torch.float32, torch.float16, torch.bfloat16])
    @pytest.mark.parametrize('value', [float('nan'), float('inf'), float('-inf')])
    def test_every_kind_of_bad_number_is_found_in_every_precision(self, folder, kind, value):
        def change(tensors: dict[str, torch.Tensor]) -> None:
            for name, tensor in tensors.items():
                tensors[name] = tensor.to(kind)
            tensors['action_out.bias'][[1, 4]] = value

        edit_weights(folder, change)
        with pytest.raises(BundleError):
            check_finite(read_bundle(folder))

    @pytest.mark.parametrize('kind', [torch.float32, torch.float16, torch.bfloat16])
    def test_the_largest_numbers_are_numbers(self, folder, kind):
        def change(tensors: dict[str, torch.Tensor]) -> None:
            for name, tensor in tensors.items():
                tensors[name] = tensor.to(kind)
            limits = torch.finfo(kind)
            edge = [limits.max, limits.min, limits.tiny, limits.tiny / 2, 0.0, -0.0]
            tensors['action_out.bias'] = torch.tensor(edge, dtype=kind)

        edit_weights(folder, change)
        told: list[int] = []
        bundle = read_bundle(folder)
        # The largest and the least are no weights that a training ends with.
        assert check_finite(bundle, told.append) == ["'action_out.bias' [6]: 2"]
        assert sum(told) == weight_bytes(bundle)

    @pytest.mark.parametrize('kind', [torch.float32, torch.float16, torch.bfloat16])
    def test_numbers_beyond_ten_thousand_are_told_by_tensor(self, folder, kind, capsys):
        def change(tensors: dict[str, torch.Tensor]) -> None:
            for name, tensor in tensors.items():
                tensors[name] = tensor.to(kind)
            tensors['action_out.bias'][:3] = torch.tensor([1.2e4, -3e4, 9e3], dtype=kind)

        edit_weights(folder, change)
        assert check_finite(read_bundle(folder)) == ["'action_out.bias' [6]: 2"]
        assert main(['info', str(folder)]) == 0
        assert "'action_out.bias' [6]: 2" in capsys.readouterr().out

    def test_a_tensor_of_many_blocks_is_read_to_its_end(self, folder):
        large = torch.zeros(3_000_001)
        large[[0, -1]] = torch.nan
        edit_weights(folder, lambda tensors: tensors.update(large=large))
        with pytest.raises(BundleError, match="'large'"):
            check_finite(read_bundle(folder))

    def test_many_tensors_are_counted(self, folder, capsys):
        def change(tensors: dict[str, torch.Tensor]) -> None:
            for tensor in tensors.values():
                tensor.view(-1)[0] = torch.nan

        edit_weights(folder, change)
        text = info_fails(folder, capsys)
        assert text.count(': 1\n') == 10
        assert text.rstrip().endswith('more')
        assert main(['info', str(folder), '--quick']) == 0


class TestTokenizer:
    def test_garbage_is_named(self, folder, capsys):
        (folder / 'tokenizer.json').write_text('{"no": "tokenizer"}')
        reseal(folder)
        text = info_fails(folder, capsys, '--quick')
        assert 'tokenizer.json: is no tokenizer' in text

    def test_more_tokens_than_the_text_table_are_named(self, folder, capsys):
        path = folder / 'tokenizer.json'
        document = json.loads(path.read_text())
        document['model']['vocab']['far'] = 400
        path.write_text(json.dumps(document))
        reseal(folder)
        text = info_fails(folder, capsys)
        assert 'has 401 tokens but policy.yaml: field dimensions.vocabulary says 400' in text

    def test_a_missing_library_is_named(self, folder, monkeypatch):
        monkeypatch.setitem(sys.modules, 'tokenizers', None)
        with pytest.raises(BundleError, match="'tokenizers'"):
            check_contents(read_bundle(folder))
