"""Bundles with ONNX files for tests; each is exported once a test run."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from made_once import made_once, scratch_folder
from network_cases import committed_plan, load_network_case
from safetensors.torch import save_file
from tiny_policy import tiny_spec, tiny_statistics, write_tiny_policy
from torch import Tensor

from vla_convert.export.onnx.export import write_onnx
from vla_convert.export.onnx.precision import type_faults
from vla_runtime.bundle.folder import read_bundle
from vla_runtime.bundle.onnx_files import (
    ONNX_FOLDER,
    TEXT_INPUT,
    WEIGHTS_DATA,
    Attention,
    Precision,
    read_graph_facts,
)
from vla_runtime.bundle.schema import WEIGHTS_FILE, BundleSpec
from vla_runtime.bundle.writer import seal, write_statistics
from vla_runtime.engines.onnx.session import Placement, Session
from vla_runtime.engines.protocol import StepInputs
from vla_runtime.engines.token_embedding import TokenEmbedding
from vla_runtime.family.listing import find_family
from vla_runtime.models.base.flow_network import FlowNetwork


def write_onnx_once(
    folder: Path,
    spec: BundleSpec,
    precision: Precision,
    *,
    attention: Attention = 'exact',
    advance: Callable[[int], object] = lambda count: None,
) -> None:
    """`write_onnx` for networks that are not patched: a copy, where a test has made them before.

    The same export gives the same bytes (`test_onnx_export.py`), whichever test asks for it.
    """
    # All of a description that reaches the files.
    described = repr((spec.family, spec.dims, spec.denoise_steps, precision, attention)).encode()
    weights = (folder / WEIGHTS_FILE).read_bytes()

    def make(target: Path) -> None:
        target.mkdir()
        shutil.copyfile(folder / WEIGHTS_FILE, target / WEIGHTS_FILE)
        write_onnx(target, spec, precision, attention=attention)

    made = made_once(f'onnx_{hashlib.sha256(described + weights).hexdigest()}', make)
    shutil.copytree(made / ONNX_FOLDER, folder / ONNX_FOLDER)
    advance((folder / ONNX_FOLDER / WEIGHTS_DATA).stat().st_size)


def copy_weights(source: Path, target: Path) -> None:
    """Copy a bundle's weights, which graphs are written from, into another folder."""
    shutil.copyfile(source / WEIGHTS_FILE, target / WEIGHTS_FILE)


def make_exports_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the exports of a test take files that were made before; they are verified as ever."""
    monkeypatch.setattr('vla_convert.export.onnx.export.write_onnx', write_onnx_once)


@pytest.fixture
def sessions_opened_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let verifications of one test file share what they make of unchanged graph files.

    That is ONNX Runtime's sessions, and the faults of their types.
    """
    monkeypatch.setattr('vla_convert.export.onnx.verification.Session', _session_of)
    monkeypatch.setattr('vla_convert.export.onnx.verification.type_faults', _type_faults_of)


def _type_faults_of(path: Path, precision: Precision, beside: Precision) -> list[str]:
    key = (path.read_bytes(), precision, beside)
    if key not in _TYPE_FAULTS:
        _TYPE_FAULTS[key] = type_faults(path, precision, beside)
    return _TYPE_FAULTS[key]


_TYPE_FAULTS: dict[tuple[bytes, Precision, Precision], list[str]] = {}
_SESSIONS: dict[tuple[Path, bytes, str], Session] = {}


def _session_of(
    path: Path, placement: Placement, options: Any, model: bytes, **more: Any
) -> Session:
    key = (path, model, repr(more))
    if key not in _SESSIONS:
        _SESSIONS[key] = Session(path, placement, options, model, **more)
    return _SESSIONS[key]


def tiny_onnx_bundle(family: str = 'pi05', precision: Precision = 'float32') -> Path:
    """A tiny policy with guidance and its ONNX files; not to be changed (`copy_bundle`)."""

    def make(target: Path) -> None:
        # Guidance is for flows with a prompt to put a tag in.
        advantage = 'task_newline' if find_family(family).head == 'flow' else None
        write_tiny_policy(target, tiny_spec(family, advantage=advantage))
        spec = read_bundle(target).spec
        write_onnx_once(target, spec, precision)
        seal(target, spec)

    return made_once(f'{family}_{precision}', make)


def exported(folder: Path, spec: BundleSpec) -> Path:
    """Export a tiny policy as the code stands now, patched or not; return its folder."""
    write_tiny_policy(folder, spec)
    write_onnx(folder, spec, 'float32')
    return folder


def onnx_of_case(path: Path) -> tuple[Path, BundleSpec]:
    """A reference case's network as ONNX files: a folder with weights, no whole bundle."""
    case = load_network_case(path)
    spec = _spec_of(case.kind, case.network, denoise_steps=case.steps)
    return made_once(path.stem, lambda folder: _write_network(folder, case.network, spec)), spec


def onnx_of_network(
    family: str, network: FlowNetwork, precision: Precision = 'float32', **changes: Any
) -> tuple[Path, BundleSpec]:
    """A network as ONNX files: a folder with weights, no whole bundle.

    Args:
        family: family of the network.
        network: with weights.
        precision: precision of the files.
        changes: changes of the tiny policy's description.
    """
    folder = Path(tempfile.mkdtemp(dir=scratch_folder())) / 'network'
    spec = _spec_of(family, network, **changes)
    _write_network(folder, network, spec, precision)
    return folder, spec


def _spec_of(family: str, network: FlowNetwork, **changes: Any) -> BundleSpec:
    return replace(tiny_spec(family), dims=network.dims, **changes)


def _write_network(
    folder: Path, network: FlowNetwork, spec: BundleSpec, precision: Precision = 'float32'
) -> None:
    folder.mkdir()
    weights = {key: value.contiguous() for key, value in network.state_dict().items()}
    save_file(weights, str(folder / WEIGHTS_FILE))
    write_statistics(folder, tiny_statistics(spec))
    write_onnx_once(folder, spec, precision)


def run_graph(folder: Path, name: str, values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Outputs of one ONNX file of a folder, by its file name without the ending.

    Tokens are looked up first for a file that leaves its text table to the host.
    """
    session = Session(folder / ONNX_FOLDER / f'{name}.onnx', Placement.of('cpu'))
    if TEXT_INPUT in session.inputs:
        precision = read_graph_facts(folder / ONNX_FOLDER, ()).precision
        values = TokenEmbedding.of(folder, precision).replace_tokens(values)
    return session.run(values)


def tied_inputs(
    noise: Tensor,
    steps: int,
    previous: Tensor | None = None,
    schedule: str | None = None,
    overlap: int = 6,
) -> StepInputs:
    """Inputs of a chunk's steps from noise (H, A), tied to a previous chunk by a schedule."""
    plan, weights = np.zeros(noise.shape, np.float32), np.zeros((steps, len(noise)), np.float32)
    if schedule is not None:
        tied, weights = committed_plan(previous, len(noise), steps, schedule, overlap)
        plan = tied[0].numpy()
    return StepInputs(
        x=noise.numpy(), row_weight=np.ones(1, np.float32), plan=plan, plan_weight=weights
    )


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
