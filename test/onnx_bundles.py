"""Bundles with ONNX files for tests; each is exported once a test run."""

from __future__ import annotations

import shutil
import tempfile
from atexit import register
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import onnx
from network_cases import load_network_case, network_case_paths
from safetensors.torch import save_file
from tiny_policy import tiny_spec, write_tiny_policy

from vla_runtime.bundle.folder import read_bundle
from vla_runtime.bundle.schema import WEIGHTS_FILE, BundleSpec
from vla_runtime.bundle.writer import seal
from vla_runtime.engines.onnx.files import ONNX_FOLDER, Precision
from vla_runtime.export.onnx.export import write_onnx


@lru_cache
def scratch_folder() -> Path:
    """Removed when the tests end."""
    folder = Path(tempfile.mkdtemp(prefix='vla_runtime_onnx_'))
    register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def tiny_onnx_bundle(family: str = 'pi05', precision: Precision = 'float32') -> Path:
    """A tiny policy with guidance and its ONNX files; not to be changed (`copy_bundle`)."""
    return _tiny_onnx_bundle(family, precision)


@lru_cache
def _tiny_onnx_bundle(family: str, precision: Precision) -> Path:
    target = scratch_folder() / f'{family}_{precision}'
    # A policy without language has no prompt to put a tag in.
    advantage = None if family == 'act' else 'task_newline'
    write_tiny_policy(target, tiny_spec(family, advantage=advantage))
    spec = read_bundle(target).spec
    write_onnx(target, spec, precision)
    seal(target, spec)
    return target


def onnx_of_case(path: Path) -> tuple[Path, BundleSpec]:
    """A reference case's network as ONNX files: a folder with weights, no whole bundle."""
    return _onnx_of_case(path.stem)


@lru_cache
def _onnx_of_case(stem: str) -> tuple[Path, BundleSpec]:
    (path,) = (path for path in network_case_paths() if path.stem == stem)
    case = load_network_case(path)
    folder = scratch_folder() / f'case_{stem}'
    folder.mkdir()
    spec = replace(tiny_spec(case.kind), dims=case.network.dims, denoise_steps=case.steps)
    weights = {key: value.contiguous() for key, value in case.network.state_dict().items()}
    save_file(weights, str(folder / WEIGHTS_FILE))
    write_onnx(folder, spec, 'float32')
    return folder, spec


def copy_bundle(source: Path, target: Path) -> Path:
    """A copy that may be changed."""
    shutil.copytree(source, target)
    return target


def reseal(bundle: Path) -> None:
    """Accept changed ONNX files, as somebody who made them would."""
    spec = read_bundle(bundle, verify=False).spec
    kept = {k: v for k, v in spec.files.items() if not k.startswith(f'{ONNX_FOLDER}/')}
    seal(bundle, replace(spec, files=kept))


def load_graph(bundle: Path, name: str) -> onnx.ModelProto:
    """A graph file without its weights."""
    return onnx.load(bundle / ONNX_FOLDER / name, load_external_data=False)


def save_graph(model: onnx.ModelProto, bundle: Path, name: str) -> None:
    onnx.save_model(model, bundle / ONNX_FOLDER / name)
