"""Write a student as a bundle, whose receipt names the teacher."""

from __future__ import annotations

import json
import platform
import shutil
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save

from vla_runtime.bundle.folder import Bundle
from vla_runtime.bundle.schema import STATISTICS_FILE, VERIFICATION_FILE, WEIGHTS_FILE
from vla_runtime.bundle.writer import new_bundle, seal
from vla_tools.distillation.student import Distillation


def write_student(
    target: Path,
    teacher: Bundle,
    distillation: Distillation,
    made: Mapping[str, Any],
    force: bool = False,
) -> None:
    """Write the teacher's bundle with the student's expert, without ONNX files and engines.

    `made`: facts of the run, for verification.json.
    """
    settings, spec = distillation.settings, teacher.spec
    kept = [STATISTICS_FILE] if spec.tokenizer is None else [STATISTICS_FILE, spec.tokenizer]
    changed = set(distillation.changed())
    with new_bundle(target, force=force) as folder:
        for name in kept:
            shutil.copyfile(teacher.folder / name, folder / name)
        state = distillation.student.state_dict()
        with safe_open(teacher.weights_path, framework='pt') as file:
            weights = {}
            for name in file.keys():  # noqa: SIM118 - it is no mapping
                before = file.get_tensor(name)
                # Other tensors keep their bytes.
                learned = name in changed
                weights[name] = state[name].to('cpu', before.dtype) if learned else before
        (folder / WEIGHTS_FILE).write_bytes(save({n: t.contiguous() for n, t in weights.items()}))
        student = replace(
            spec,
            name=f'{spec.name}, student of {" and ".join(map(str, settings.steps))} steps',
            denoise_steps=settings.steps[-1],
            student_steps=settings.steps,
            source={**spec.source, 'distilled by': 'vla_runtime distill'},
            files={},
        )
        receipt = {
            'what': student.name,
            'teacher': {
                'name': spec.name,
                'sha256': settings.teacher,
                'denoise_steps': settings.teacher_steps,
            },
            'settings': {**asdict(settings), 'steps': list(settings.steps)},
            'changed': sorted(changed),
            'history': distillation.history,
            'made': dict(made),
            'versions': {
                'python': platform.python_version(),
                'torch': str(torch.__version__),
                'numpy': np.__version__,
            },
        }
        (folder / VERIFICATION_FILE).write_text(json.dumps(receipt, indent=2) + '\n')
        seal(folder, student)
