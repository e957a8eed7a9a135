"""Folders made of links, as in a Hugging Face cache: every reader takes them, or none does."""

import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from checkpoint_folders import lerobot_arguments, lerobot_folder
from onnx_bundles import tiny_onnx_bundle
from tiny_policy import observation

from vla_convert.checkpoints.tensors import CheckpointError, read_tensors
from vla_runtime.bundle.folder import read_bundle
from vla_runtime.cli.main import main
from vla_runtime.engines.onnx.session import Placement, Session
from vla_runtime.policy import Policy


def cached(source: Path, cache: Path) -> Path:
    """A copy of a folder as `huggingface_hub` keeps it: links to files named by their hashes."""
    blobs, snapshot = cache / 'models--a--b' / 'blobs', cache / 'models--a--b' / 'snapshots' / 'c0'
    blobs.mkdir(parents=True)
    for number, path in enumerate(sorted(path for path in source.rglob('*') if path.is_file())):
        shutil.copyfile(path, blobs / f'{number:064x}')
        link = snapshot / path.relative_to(source)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blobs / f'{number:064x}', link.parent))
    return snapshot


@pytest.fixture
def bundle(tmp_path):
    return cached(tiny_onnx_bundle(), tmp_path)


def chunk_of(bundle: Path, backend: str) -> np.ndarray:
    policy = Policy.load(bundle, backend)
    try:
        return policy.infer(observation())[0].actions
    finally:
        policy.close()


@pytest.mark.parametrize('backend', ['torch', 'onnxruntime'])
def test_a_linked_bundle_acts_as_the_files_do(bundle, backend):
    np.testing.assert_array_equal(chunk_of(bundle, backend), chunk_of(tiny_onnx_bundle(), backend))


def test_a_link_to_a_bundle_of_links_acts_as_the_files_do(bundle, tmp_path):
    (tmp_path / 'link').symlink_to(bundle)
    linked = chunk_of(tmp_path / 'link', 'onnxruntime')
    np.testing.assert_array_equal(linked, chunk_of(tiny_onnx_bundle(), 'onnxruntime'))


def test_linked_graphs_need_onnx_by_name(bundle, monkeypatch):
    monkeypatch.setitem(sys.modules, 'onnx', None)
    with pytest.raises(ValueError, match='pip install onnx'):
        Policy.load(bundle, 'onnxruntime')
    np.testing.assert_array_equal(chunk_of(bundle, 'torch'), chunk_of(tiny_onnx_bundle(), 'torch'))


@pytest.mark.parametrize('data', [b'', b'\x12\x09abc', b'\x0b'])
def test_a_linked_graph_that_is_none_is_named(bundle, data):
    path = bundle / 'onnx' / 'vision.onnx'
    path.unlink()
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r'vision\.onnx'):
        Session(path, Placement.of('cpu'))


def test_a_linked_bundle_is_shown_and_compared(bundle, capsys):
    assert main(['info', str(bundle)]) == 0
    assert main(['verify', str(bundle)]) == 0
    assert 'all within the bounds' in capsys.readouterr().out


def test_a_linked_checkpoint_becomes_a_bundle_of_files(tmp_path):
    checkpoint = cached(lerobot_folder(), tmp_path / 'cache')
    arguments = lerobot_arguments()
    target = tmp_path / 'bundle'
    command = ['export', str(checkpoint), '--out', str(target), '--onnx-precision', 'none']
    assert main([*command, *arguments]) == 0
    assert not any(path.is_symlink() for path in target.rglob('*'))
    read_bundle(target)


def test_a_checkpoint_whose_weights_were_cleared_away_says_so(tmp_path):
    checkpoint = cached(lerobot_folder(), tmp_path)
    (checkpoint / 'model.safetensors').resolve().unlink()
    with pytest.raises(CheckpointError, match=r'model\.safetensors'):
        read_tensors(checkpoint)


@pytest.mark.parametrize('name', ['model.safetensors', 'config.json', 'policy_preprocessor.json'])
def test_a_checkpoint_with_a_fifo_is_refused_and_not_waited_for(tmp_path, name, capsys):
    checkpoint = tmp_path / 'checkpoint'
    shutil.copytree(lerobot_folder(), checkpoint)
    (checkpoint / name).unlink()
    os.mkfifo(checkpoint / name)
    command = ['export', str(checkpoint), '--out', str(tmp_path / 'b'), *lerobot_arguments()]
    assert main(command) == 2
    assert f'{name}: is a FIFO' in capsys.readouterr().err
