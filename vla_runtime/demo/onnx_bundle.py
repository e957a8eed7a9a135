"""The demo's bundle with ONNX files: exported at first use, found again after."""

from __future__ import annotations

from pathlib import Path

from vla_runtime.bundle import WEIGHTS_FILE, BundleError, read_bundle
from vla_runtime.demo.console import say
from vla_runtime.engines.onnx_files import Precision, graph_path


def bundle_with_onnx(bundle: Path, folder: Path, precision: Precision = 'float32') -> Path:
    """The bundle itself if it has ONNX files, else a copy in `folder` that has them.

    The copy's name holds the weights' SHA-256, so a policy that was trained anew is exported anew.

    Args:
        bundle: folder of a policy bundle.
        folder: where runs of the demo are kept.
        precision: of the files that are made.

    Raises:
        ValueError: a bundle that is none, or whose export fails.
    """
    if graph_path(bundle, 'vision').is_file():
        return bundle
    source = read_bundle(bundle)
    digest = source.spec.files[WEIGHTS_FILE][:12]
    copy = folder / f'{bundle.resolve().name}_onnx_{precision}_{digest}'
    try:
        read_bundle(copy)
        return copy
    except BundleError:
        pass
    from vla_runtime.export.onnx_bundle import export_bundle

    say(f'exporting ONNX files to {copy} and comparing them with PyTorch, once (a minute or less)')
    export_bundle(source, copy, precision, force=copy.exists())
    return copy
