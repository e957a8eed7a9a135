"""Cases from observations: to calibrate a quantiser, and others to judge it.

Seeded random inputs, enough to compare networks, do not have the ranges that 8 bits must cover.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np

from vla_convert.checkpoints.folder_facts import ExportError
from vla_runtime.bundle.folder import Bundle
from vla_runtime.bundle.onnx_files import ROWS
from vla_runtime.engines.protocol import Feature, PolicyEngine
from vla_runtime.engines.recorded_cases import Case
from vla_runtime.inference.codec import PolicyCodec
from vla_runtime.inference.request_builder import RequestBuilder
from vla_runtime.inference.settings import PolicySettings, row_weights
from vla_runtime.types import Observation

# Fewer observations say too little about the ranges; more only take longer.
LEAST_OBSERVATIONS, MOST_OBSERVATIONS = 20, 32
# One observation of so many is kept from the quantiser, for the receipt.
_HELD_EVERY = 8
_HELD = 6
_BETA = 2.0


@dataclass(frozen=True)
class CalibrationCases:
    """Cases for one prompt row, then for two: `seen` give the ranges, `held` are for comparison."""

    seen: list[Case]
    held: list[Case]


@dataclass(frozen=True)
class _TwoRows:
    """Engine facts that a request is built from."""

    max_rows: int = 2
    backend: str = 'onnxruntime'
    features: frozenset[Feature] = frozenset()


def calibration_cases(bundle: Bundle, observations: Sequence[Observation]) -> CalibrationCases:
    """Turn a policy's observations into cases, evenly spread over some thirty at most.

    Raises ExportError: too few; ValueError: one does not fit the bundle.
    """
    if len(observations) < LEAST_OBSERVATIONS:
        raise ExportError(
            f'{len(observations)} observations to calibrate on; at least {LEAST_OBSERVATIONS} '
            'are needed: record the policy for longer, at its task'
        )
    builder = RequestBuilder(PolicyCodec(bundle), cast(PolicyEngine, _TwoRows()))
    settings = PolicySettings(cfg_beta=1.0 if bundle.spec.advantage is None else _BETA)
    most = min(len(observations), MOST_OBSERVATIONS)
    places = np.linspace(0, len(observations) - 1, most).astype(int)
    cases = [_case(builder, settings, int(place), observations[place]) for place in places]
    held = cases[::_HELD_EVERY][:_HELD]
    seen = [case for case in cases if not any(case is one for one in held)]
    half = len(held) // 2
    return CalibrationCases(
        seen=[_with_rows(case, rows) for rows in ROWS for case in seen],
        held=[_with_rows(case, 1 + (number >= half)) for number, case in enumerate(held)],
    )


def _case(
    builder: RequestBuilder, settings: PolicySettings, number: int, observation: Observation
) -> Case:
    request = builder.build(observation, settings, number)
    (prefix,), inputs = request.prefixes, request.inputs
    return Case(
        words={'observation': number, 'instruction': observation.instruction},
        # Copies: the next observation is written into the same buffer.
        images=[np.array(pixels) for pixels in prefix.pixels],
        image_mask=prefix.image_mask,
        prefix_inputs=dict(prefix.rows),
        head_inputs=dict(inputs.rows),
        x=inputs.x[None],
        row_weight=inputs.row_weight,
        plan=inputs.plan[None],
        plan_weight=inputs.plan_weight[:, None, :, None],
        step_noise=np.zeros(0, np.float32)
        if inputs.step_noise is None
        else inputs.step_noise[:, None],
    )


def _with_rows(case: Case, rows: int) -> Case:
    """Return a case for its first row, or for two; without guidance these are the same prompt."""
    taken = [0, case.rows - 1][:rows]

    def of(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {name: array[taken] for name, array in arrays.items()}

    beta = _BETA if rows == 2 else None
    return replace(
        case,
        words={'rows': rows, 'beta': beta, **case.words},
        prefix_inputs=of(case.prefix_inputs),
        head_inputs=of(case.head_inputs),
        row_weight=row_weights(beta),
        past={},
        reference={},
    )
