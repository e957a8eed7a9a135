"""Distance of a student's chunks from its teacher's, and the time of a cache hit, by denoise steps.

./run exec python benchmark/students.py engines/demo engines/demo_fast datasets/tabletop
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from parts.measurement import write_result

from vla_runtime.bundle.folder import read_bundle
from vla_runtime.engines.torch.weights import load_network
from vla_runtime.inference.settings import PolicySettings
from vla_runtime.policy import Policy
from vla_tools.dataset.observations import StoredObservation, read_observations
from vla_tools.distillation.student import Distillation, DistillationSettings

_STEPS = (1, 2, 4, 10)
# As of `distill`.
_FRAMES = 4096
_HITS = 25


def distances(teacher: Path, student: Path, data: Path) -> dict[str, Any]:
    """Root mean square beside the teacher's chunk at its own steps.

    On the frames that `distill` holds out at its own --frames and --seed.
    """
    taught, learned = read_bundle(teacher), read_bundle(student)
    observations = read_observations(data, taught.spec, _FRAMES)
    found = {}
    for name, bundle, steps in (
        ('teacher', taught, _STEPS),
        ('student', learned, learned.spec.student_steps),
    ):
        settings = DistillationSettings(steps, taught.spec.denoise_steps)
        with TemporaryDirectory() as folder:
            run = Distillation(taught, observations, settings, Path(folder))
            run.student = load_network(
                bundle.spec.family,
                bundle.spec.dims,
                bundle.weights_path,
                device='cpu',
                precision='float32',
            )
            found[name] = run.check()
    return found


def hit_ms(bundle: Path, steps: tuple[int, ...], look: StoredObservation) -> dict[str, float]:
    """Median processor time of an inference that finds its prefix, one thread, float32."""
    policy = Policy.load(bundle, 'torch', precision='float32', threads=1)
    observation, found = look.decode(), {}
    for count in steps:
        settings, times = PolicySettings(denoise_steps=count), []
        policy.infer(observation, settings=settings)
        for _ in range(_HITS):
            start = time.process_time()
            policy.infer(observation, settings=settings)
            times.append(time.process_time() - start)
        found[f'steps_{count}'] = round(1e3 * float(np.median(times)), 2)
    policy.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or '').splitlines()[0])
    parser.add_argument('teacher', type=Path)
    parser.add_argument('student', type=Path)
    parser.add_argument('data', type=Path, help='data set that the student learned from')
    parser.add_argument('--json', type=Path, help='write here instead of to benchmark/results/')
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    spec = read_bundle(arguments.teacher).spec
    look = read_observations(arguments.data, spec, 1)[0]
    known = read_bundle(arguments.student).spec.student_steps
    result = {
        'distance': distances(arguments.teacher, arguments.student, arguments.data),
        'hit_ms': {
            'teacher': hit_ms(arguments.teacher, _STEPS, look),
            'student': hit_ms(arguments.student, known, look),
        },
    }
    print(write_result('students', result, ('torch', 'numpy'), arguments.json).name)


if __name__ == '__main__':
    main()
