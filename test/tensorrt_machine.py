"""A machine with a fake GPU and a fake TensorRT, on which bundles are built and loaded."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from fake_cuda import FakeCuda
from fake_tensorrt import RELEASES, FakeTensorRT
from onnx_bundles import write_onnx_once
from tiny_policy import tiny_dims, tiny_spec, write_tiny_policy

from vla_convert.export.onnx.cases import record_cases
from vla_convert.export.tensorrt.build import build_engines, plan_build
from vla_runtime.bundle.folder import read_bundle
from vla_runtime.bundle.writer import seal
from vla_runtime.engines.cuda_runtime import CudaRuntime
from vla_runtime.engines.tensorrt.adapter import TensorRT
from vla_runtime.engines.tensorrt.engine import TensorRTEngine
from vla_runtime.engines.tensorrt.store import Metadata, passed_on, write_metadata

STEPS = tiny_spec().denoise_steps


def write_exported_policy(target: Path, family: str = 'pi05', precision='float32') -> Path:
    """A tiny bundle of random weights with ONNX files and recorded cases, guidance included."""
    write_tiny_policy(target, tiny_spec(family, advantage='task_newline'))
    spec = read_bundle(target).spec
    write_onnx_once(target, spec, precision)
    record_cases(target, spec)
    seal(target, spec)
    return target


class Machine:
    """Contents that `build` and `load` find there.

    Args:
        monkeypatch: pytest's; makes whatever looks for a GPU find this machine.
        bundle: the bundle's folder.
        release: release of TensorRT.
        cuda: see `FakeCuda`.
    """

    def __init__(self, monkeypatch, bundle: Path, release: str = RELEASES[-1], **cuda) -> None:
        self.cuda = FakeCuda(**cuda)
        self.trt = FakeTensorRT(release, self.cuda)
        self.bundle = bundle
        monkeypatch.setitem(sys.modules, 'tensorrt', self.trt)
        monkeypatch.setitem(sys.modules, 'cuda.bindings.driver', self.cuda)

    def runtime(self, index: int = 0) -> CudaRuntime:
        return CudaRuntime(index, self.cuda)

    def build(self, captures: int = 1, passed: bool = True, **options) -> Metadata:
        """Build without comparing; with `passed` as if the engines had been compared."""
        runtime, adapter = self.runtime(), TensorRT(self.trt)
        plan = plan_build(self.bundle, adapter, runtime, **{'rows': 2, **options})
        metadata = build_engines(plan, adapter, runtime, captures=captures)
        if passed:
            files = read_bundle(self.bundle, verify=False).spec.files
            metadata = replace(metadata, passed=passed_on(files))
            write_metadata(plan.folder, metadata)
        runtime.close()
        return metadata

    def load(self, family: str = 'pi05', **options) -> TensorRTEngine:
        values = {
            'files': read_bundle(self.bundle, verify=False).spec.files,
            'device': 'cuda',
            'precision': 'float32',
            'max_rows': 2,
            'denoise_steps': STEPS,
            'use_cuda_graphs': True,
        }
        return TensorRTEngine.load(self.bundle, family, tiny_dims(family), **{**values, **options})


def linked_copy(bundle: Path, target: Path) -> Path:
    """A bundle's files under another name, so that engines can be written beside them."""
    for path in bundle.rglob('*'):
        if path.is_file():
            link = target / path.relative_to(bundle)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(path)
    return target
