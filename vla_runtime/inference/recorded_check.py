"""Check of a loaded engine against the cases that the export recorded in the bundle."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import numpy as np

from vla_runtime.engines.protocol import PolicyEngine, TokenEngine
from vla_runtime.engines.recorded_cases import Case, chunk_bound, error_of, read_cases, sample
from vla_runtime.inference.denoise import case_schedule, denoise


def check_recorded_cases(engine: PolicyEngine, folder: Path, precision: str) -> None:
    """Refuse an engine whose chunks are not those of PyTorch's plain modules in float32.

    The first case of each number of prompt rows is run, images to chunk, and overwrites the
    engine's schedule, prefixes and step inputs. A chunk beyond the precision's bound, or a bundle
    without recorded cases, is a ValueError.
    """
    cases, _ = read_cases(folder)
    of_rows = {case.rows: case for case in reversed(cases) if case.rows <= engine.max_rows}
    for rows, case in of_rows.items():
        error = error_of(*_compared(engine, case))[0]
        bound, _ = chunk_bound(precision, case.gain)
        # False for NaN.
        if not error <= bound:
            raise ValueError(
                f'{folder}: with {rows} prompt row(s) the chunk of {engine.backend} in {precision} '
                f"differs by {error:.2g} from the export's in float32 (accepted: {bound:.2g})"
            )


def _compared(engine: PolicyEngine, case: Case) -> tuple[np.ndarray, np.ndarray]:
    for camera, pixels in enumerate(case.pixels):
        engine.encode_image(camera, pixels)
    engine.encode_prefix(case.image_mask, case.prefix_inputs)
    engine.use_prefix(case.rows)
    if 'answer' in case.reference:
        return read_back(cast(TokenEngine, engine), case), case.reference['logits']
    engine.set_schedule(*case_schedule(case, engine.dims))
    return denoise(engine, case.step_inputs), case.reference['trace'][-1][0]


def read_back(engine: TokenEngine, case: Case) -> np.ndarray:
    """Read the recorded tokens back; return the `sample` of the logits, (n + 1, numbers)."""
    engine.begin_answer()
    found = [sample(engine.read_logits())]
    for place, token in enumerate(case.reference['answer']):
        engine.read_token(token, place)
        found.append(sample(engine.read_logits()))
    return np.stack(found)
