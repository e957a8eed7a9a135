"""Bundles written from arrays in memory."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
from safetensors.numpy import save

from vla_runtime.bundle.folder import Bundle, read_bundle
from vla_runtime.bundle.schema import WEIGHTS_FILE, BundleSpec
from vla_runtime.bundle.writer import new_bundle, seal, write_statistics


def write_bundle(
    target: str | Path,
    spec: BundleSpec,
    *,
    weights: Mapping[str, np.ndarray],
    statistics: Mapping[str, np.ndarray],
    tokenizer: str | Path | None = None,
    files: Mapping[str, Path] | None = None,
    force: bool = False,
) -> Bundle:
    """Write a whole bundle.

    Args:
        target: path of the new bundle.
        spec: description; `files` are filled in here, `tokenizer` names the copied file.
        weights: our tensor names to arrays.
        statistics: arrays by name, as `Bundle.statistics`.
        tokenizer: the file to copy; None for a policy without language.
        files: further files to copy, by their names in the bundle.
        force: replace an existing bundle.

    Raises:
        BundleError: the target exists, or the arguments do not make a valid bundle.
    """
    with new_bundle(target, force=force) as folder:
        contiguous = {name: np.ascontiguousarray(array) for name, array in weights.items()}
        (folder / WEIGHTS_FILE).write_bytes(save(contiguous))
        write_statistics(folder, statistics)
        if tokenizer is not None and spec.tokenizer is not None:
            shutil.copyfile(tokenizer, folder / spec.tokenizer)
        for name, source in (files or {}).items():
            shutil.copyfile(source, folder / name)
        seal(folder, replace(spec, files={}))
    return read_bundle(target, verify=False)
