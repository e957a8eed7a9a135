"""Makes `vla_runtime/selftest/policies.tar.xz`: tiny random policies and their chunks.

    ./run exec python test/tools/selftest/make_policies.py [NAME …] [--out FILE] [--float16]

With names these policies alone are made, and those of the archive stay as they are.

Needs PyTorch and onnx; the self-test itself needs neither. Weights are numbers that bfloat16 has,
so that half of every file is zeros and the archive small. Those of the bfloat16 policy, which has
more of them, are multiples of a sixteenth. `--float16` adds every family in float16: TensorRT 8.6
has no other reduced precision.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / 'test')]

from safetensors.numpy import load_file  # noqa: E402
from tiny_policy import TRIED_FAMILIES, tiny_spec, tokenizer_of, write_tiny_policy  # noqa: E402
from written_bundle import write_bundle  # noqa: E402

from vla_convert.export.onnx.export import write_onnx  # noqa: E402
from vla_runtime.bundle.folder import read_bundle  # noqa: E402
from vla_runtime.bundle.onnx_files import ONNX_FOLDER, Precision  # noqa: E402
from vla_runtime.bundle.schema import STATISTICS_FILE, WEIGHTS_FILE, BundleSpec  # noqa: E402
from vla_runtime.bundle.writer import seal  # noqa: E402
from vla_runtime.family.dimensions import DecoderDims, VisionDims  # noqa: E402
from vla_runtime.family.listing import find_family  # noqa: E402
from vla_runtime.files.safetensors_reader import bfloat16_to_float32, float32_to_bfloat16  # noqa: E402
from vla_runtime.policy import Policy  # noqa: E402
from vla_tools.selftest.policies import ARCHIVE, REFERENCE, infer_cases  # noqa: E402

# A pi05 of 64 numbers a head.
BFLOAT16 = 'pi05_bfloat16'


FLOAT16_ENDING = '_float16'


def spec_of(name: str) -> BundleSpec:
    """Describe a policy; the bfloat16 one has heads as wide as kernels of real policies ask for."""
    if name != BFLOAT16:
        family = find_family(name)
        guided = family.has_language and family.head == 'flow'
        return tiny_spec(name, advantage='task_newline' if guided else None)
    spec = tiny_spec('pi05', advantage='task_newline')
    language = DecoderDims(64, depth=2, mlp_dim=64, num_heads=2, num_kv_heads=1, head_dim=64)
    dims = replace(
        spec.dims,
        vision=VisionDims(64, depth=1, num_heads=1, mlp_dim=64, patch_size=7, image_size=28),
        language=language,
        expert=replace(language, width=32),
    )
    return replace(spec, dims=dims)


def rounded(weight: np.ndarray, name: str) -> np.ndarray:
    """Round a weight of a policy to numbers that are small in the archive."""
    if weight.dtype == np.uint8:
        # Packed.
        return weight
    if name == BFLOAT16:
        return (np.round(weight * 16) / 16).astype(np.float32)
    return bfloat16_to_float32(float32_to_bfloat16(weight))


def make_policy(folder: Path, name: str) -> None:
    """Write one bundle with its ONNX files, and PyTorch's chunks in float32 beside it."""
    bundle, spec = folder / name, spec_of(name.removesuffix(FLOAT16_ENDING))
    with tempfile.TemporaryDirectory() as drawn:
        source = write_tiny_policy(Path(drawn) / name, spec)
        weights = load_file(source / WEIGHTS_FILE)
        write_bundle(
            bundle,
            spec,
            weights={key: rounded(value, name) for key, value in weights.items()},
            statistics=load_file(source / STATISTICS_FILE),
            tokenizer=tokenizer_of(spec.family) if spec.tokenizer else None,
        )
    spec = read_bundle(bundle, verify=False).spec
    precision: Precision = 'float16' if name.endswith(FLOAT16_ENDING) else 'float32'
    write_onnx(bundle, spec, 'bfloat16' if name == BFLOAT16 else precision)
    for path in (bundle / ONNX_FOLDER).glob('monolithic*'):
        path.unlink()
    seal(bundle, spec)
    policy = Policy.load(bundle, 'torch', 'cpu', precision='float32')
    cases = infer_cases(policy)
    np.savez(folder / REFERENCE.format(name=name), **cases)


def main() -> None:
    """Write the archive."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('names', nargs='*', help='policies to make, such as xvla; all without one')
    parser.add_argument('--out', type=Path, default=ARCHIVE)
    parser.add_argument('--float16', action='store_true', help='each family in float16 as well')
    arguments = parser.parse_args()
    out = arguments.out
    names = [*TRIED_FAMILIES, BFLOAT16]
    if arguments.float16:
        names += [f'{name}{FLOAT16_ENDING}' for name in TRIED_FAMILIES]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / 'policies'
        folder.mkdir()
        if arguments.names:
            shutil.unpack_archive(ARCHIVE, folder, filter='data')
        for name in arguments.names or names:
            shutil.rmtree(folder / name, ignore_errors=True)
            make_policy(folder, name)
        made = shutil.make_archive(str(Path(temporary) / 'policies'), 'xztar', folder)
        shutil.move(made, out)
    print(f'{out}: {out.stat().st_size / 1e3:.0f} kB')


if __name__ == '__main__':
    main()
