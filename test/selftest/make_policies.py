"""Makes `vla_runtime/selftest/policies.tar.xz`: a tiny random policy of each family, its chunks.

    ./run exec python test/selftest/make_policies.py [--out policies.tar.xz]

Needs PyTorch and onnx; the self-test itself needs neither. Weights are numbers that bfloat16 has,
so that half of every file is zeros and the archive small.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / 'test')]

from safetensors.numpy import load_file  # noqa: E402
from tiny_policy import tiny_spec, tokenizer_of, write_tiny_policy  # noqa: E402

from vla_runtime.bundle.folder import read_bundle  # noqa: E402
from vla_runtime.bundle.schema import STATISTICS_FILE, WEIGHTS_FILE  # noqa: E402
from vla_runtime.bundle.writer import seal, write_bundle  # noqa: E402
from vla_runtime.engines.onnx.files import ONNX_FOLDER  # noqa: E402
from vla_runtime.export.onnx.export import write_onnx  # noqa: E402
from vla_runtime.families import family_names, find_family  # noqa: E402
from vla_runtime.files.safetensors_reader import bfloat16_to_float32, float32_to_bfloat16  # noqa: E402
from vla_runtime.policy import Policy  # noqa: E402
from vla_runtime.selftest.policies import ARCHIVE, REFERENCE, infer_cases  # noqa: E402


def make_policy(folder: Path, family: str) -> None:
    """Write one bundle with its ONNX files, and PyTorch's chunks in float32 beside it."""
    bundle = folder / family
    with tempfile.TemporaryDirectory() as drawn:
        has_language = find_family(family).has_language
        spec = tiny_spec(family, advantage='task_newline' if has_language else None)
        source = write_tiny_policy(Path(drawn) / family, spec)
        weights = load_file(source / WEIGHTS_FILE)
        write_bundle(
            bundle,
            spec,
            weights={
                name: bfloat16_to_float32(float32_to_bfloat16(value))
                for name, value in weights.items()
            },
            statistics=load_file(source / STATISTICS_FILE),
            tokenizer=tokenizer_of(family) if spec.tokenizer else None,
        )
    spec = read_bundle(bundle, verify=False).spec
    write_onnx(bundle, spec, 'float32')
    for path in (bundle / ONNX_FOLDER).glob('monolithic*'):
        path.unlink()
    seal(bundle, spec)
    policy = Policy.load(bundle, 'torch', 'cpu')
    cases = infer_cases(policy)
    np.savez(folder / REFERENCE.format(family=family), **cases)


def main() -> None:
    """Write the archive."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--out', type=Path, default=ARCHIVE)
    out = parser.parse_args().out
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / 'policies'
        folder.mkdir()
        for family in family_names():
            make_policy(folder, family)
        made = shutil.make_archive(str(Path(temporary) / 'policies'), 'xztar', folder)
        shutil.move(made, out)
    print(f'{out}: {out.stat().st_size / 1e3:.0f} kB')


if __name__ == '__main__':
    main()
