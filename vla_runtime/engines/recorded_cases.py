"""Cases that engines are compared on: inputs, and what PyTorch's networks gave for them in float32.

The export records a few in the bundle (`onnx/cases.npz`), so that a robot compares its engines with
numpy alone. Of image tokens, of the past and of a token's logits `SAMPLE` evenly spread numbers are
recorded; chunks, x after every step, velocities and tokens are recorded whole.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from zipfile import BadZipFile

import numpy as np

from vla_runtime.bundle.onnx_files import CASES_FILE, ONNX_FOLDER
from vla_runtime.engines.protocol import StepInputs

# --- Largest errors that are accepted where networks are compared with PyTorch's eager ones


# Precisions in which less is rounded than in int8.
_FINER = ('float32', 'float16', 'bfloat16')
# What decided a chunk's bound: the precision alone, its gain too, or the ceiling.
BoundBy = Literal['precision', 'gain', 'ceiling']


@dataclass(frozen=True)
class Bounds:
    """Largest errors that are accepted.

    Attributes:
        tensor: bound of one network's outputs.
        chunk: bound of a whole chunk, for a gain of at most one.
        ceiling: bound of a whole chunk, whatever its gain.
    """

    tensor: float
    chunk: float
    ceiling: float


# Ceilings are ten times the chunk's own bound, and never above 0.1, a twentieth of the range of
# normalised actions: a chunk that is off by more is another motion.
BOUNDS: dict[str, Bounds] = {
    'float32': Bounds(tensor=5e-5, chunk=5e-5, ceiling=5e-4),
    'float16': Bounds(tensor=1e-2, chunk=1e-2, ceiling=1e-1),
    'bfloat16': Bounds(tensor=8e-2, chunk=8e-2, ceiling=1e-1),
    'int8': Bounds(tensor=1e-1, chunk=1e-1, ceiling=1e-1),
    # Four significant bits and two: a number is off by up to 6 and 25% of itself, so single numbers
    # are off by more (0.14 of the demo policy's velocities in fp8), which the steps of a chunk even
    # out. Wrong scales and matrices are found in the files themselves.
    'fp8': Bounds(tensor=2e-1, chunk=1e-1, ceiling=1e-1),
    'nvfp4': Bounds(tensor=3e-1, chunk=1e-1, ceiling=1e-1),
}


def judged_as(precision: str, rounds_activations: bool) -> str:
    """The precision by whose bounds chunks are judged: int8's where that is what limits them."""
    return 'int8' if rounds_activations and precision in _FINER else precision


def chunk_bound(precision: str, gain: float) -> tuple[float, BoundBy]:
    """The bound of a chunk, and what decided it.

    `gain` is the factor by which PyTorch enlarges a small change of the noise.
    """
    bounds = BOUNDS[precision]
    # A NaN gain does not raise the bound.
    if not gain > 1.0:
        return bounds.chunk, 'precision'
    bound = bounds.chunk * gain
    return (bound, 'gain') if bound <= bounds.ceiling else (bounds.ceiling, 'ceiling')


def error_of(found: np.ndarray, expected: np.ndarray) -> tuple[float, float]:
    """Return largest and mean error, as the module defines them; NaN for NaN or a wrong shape."""
    if found.shape != expected.shape:
        return float('nan'), float('nan')
    wide = expected.astype(np.float64)
    difference = np.abs(found.astype(np.float64) - wide) / max(1.0, float(np.abs(wide).max()))
    return float(difference.max()), float(difference.mean())


# --------------------------------------------------------------------------------------------------

# Numbers of a tensor that are recorded.
SAMPLE = 4096
_IMAGE_TOKENS = 'image_tokens'
# References that a comparison of files alone needs.
_NOT_RECORDED = (
    _IMAGE_TOKENS,
    'answer_key',
    'answer_value',
    'far_place',
    'far_token',
    'far_logits',
)
_LOGITS = 'logits'
_WORDS = 'words'
_ROW_AXES = 'row_axes'
_MASKS = 'masks'
_ARRAYS = ('image_mask', 'x', 'row_weight', 'plan', 'plan_weight', 'step_noise')
# Mappings of arrays, by their field.
_MAPPINGS = ('prefix_inputs', 'head_inputs', 'samples', 'reference', _MASKS)


@dataclass
class Case:
    """One inference: inputs, and PyTorch's outputs as they are computed.

    Attributes:
        words: particulars of the case in words, for the receipt.
        images: image of every camera, (3, height, width) uint8, or float32 as the network sees it.
        image_mask: (V,) bool, False for an absent camera.
        prefix_inputs, head_inputs: inputs of the family by name, (R, …) each.
        x: (1, H, A) noise; row_weight: (R,); plan: (1, H, A); plan_weight: (N, 1, H, 1).
        step_noise: (N, 1, H, A) of a `diffusion` head; of others it is empty.
        past: tensors that the prefix hands to the head, by name; row_axes: the axis of the prompt
            rows of each; recorded cases have the masks of it alone.
        reference: `image_tokens` (V, N, W), which is not recorded; `trace`, x before every step and
            after the last, (N + 1, 1, H, A); `velocity` (N, R, H, A); `gain` (), how many times a
            small change of the noise is larger in the chunk. Of a `tokens` head instead the tokens
            that are read back, `answer` (n, R) int64, and `logits` (n + 1, R, vocabulary), first
            those of the prefix; a recorded case has a `sample` of each token's.
        samples: numbers that a recorded case keeps: `sample` of the image tokens and of what
            `visible` leaves of the past.
    """

    words: dict[str, object]
    images: list[np.ndarray]
    image_mask: np.ndarray
    prefix_inputs: dict[str, np.ndarray]
    head_inputs: dict[str, np.ndarray]
    x: np.ndarray
    row_weight: np.ndarray
    plan: np.ndarray
    plan_weight: np.ndarray
    step_noise: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    past: dict[str, np.ndarray] = field(default_factory=dict)
    row_axes: dict[str, int] = field(default_factory=dict)
    reference: dict[str, np.ndarray] = field(default_factory=dict)
    samples: dict[str, np.ndarray] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        return len(self.row_weight)

    @property
    def gain(self) -> float:
        """Factor by which the chunk enlarges a small change of the noise; 1 without noise."""
        return float(self.reference.get('gain', 1.0))

    @property
    def step_inputs(self) -> StepInputs:
        return StepInputs(
            x=self.x[0],
            row_weight=self.row_weight,
            plan=self.plan[0],
            plan_weight=self.plan_weight[:, 0, :, 0],
            rows=self.head_inputs,
            step_noise=self.step_noise[:, 0] if self.step_noise.size else None,
        )

    @property
    def pixels(self) -> list[np.ndarray]:
        """Images as vision networks see them, float32, those of uint8 in [-1, 1]."""
        return [
            image.astype(np.float32) / np.float32(127.5) - np.float32(1)
            if image.dtype == np.uint8
            else image
            for image in self.images
        ]

    def visible(self, past: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Drop the positions of a prefix that are hidden from the head, in tensors (…, P, D)."""
        found = {}
        for name, array in past.items():
            mask = self._mask_of(name, array)
            if mask is not None:
                array = np.moveaxis(array, (self.row_axes[name], -2), (0, 1))[mask]
            found[name] = array
        return found

    def _mask_of(self, name: str, array: np.ndarray) -> np.ndarray | None:
        """Return the mask of positions that the head sees, (R, P); None for tensors without one."""
        if array.ndim < 3:
            return None
        masks = {key: mask for key, mask in self._masks.items() if mask.shape[1] == array.shape[-2]}
        part = name.partition('_')[0]
        own = [mask for key, mask in masks.items() if key.partition('_')[0] == part]
        fitting = own or list(masks.values())
        return np.logical_or.reduce(fitting) if fitting else None

    @property
    def _masks(self) -> dict[str, np.ndarray]:
        return {name: array for name, array in self.past.items() if array.dtype == np.bool_}

    def sampled(
        self, image_tokens: np.ndarray, past: Mapping[str, np.ndarray]
    ) -> dict[str, np.ndarray]:
        """Return the numbers of image tokens and past that a recorded case has, by tensor."""
        tensors = {_IMAGE_TOKENS: image_tokens, **self.visible(past)}
        return {name: sample(array) for name, array in tensors.items()}


def sample(array: np.ndarray) -> np.ndarray:
    """At most `SAMPLE` numbers of an array, the same places every time, from first to last."""
    flat = array.ravel()
    if flat.size <= SAMPLE:
        return flat
    return flat[np.linspace(0, flat.size - 1, SAMPLE).astype(np.int64)]


def write_cases(bundle: Path, cases: Iterable[Case], facts: Mapping[str, Any]) -> None:
    """Record cases with PyTorch's outputs in a bundle that is not sealed yet.

    `facts` are versions and settings of the recording, for receipts.
    """
    arrays: dict[str, np.ndarray] = {}
    words = []
    for number, case in enumerate(cases):
        words.append({_WORDS: case.words, _ROW_AXES: case.row_axes})
        samples = case.sampled(case.reference[_IMAGE_TOKENS], case.past)
        kept = {k: v for k, v in case.reference.items() if k not in _NOT_RECORDED}
        if _LOGITS in kept:
            kept[_LOGITS] = np.stack([sample(logits) for logits in kept[_LOGITS]])
        groups = (case.prefix_inputs, case.head_inputs, samples, kept, case._masks)
        arrays |= {f'{number}/{name}': getattr(case, name) for name in _ARRAYS}
        arrays |= {f'{number}/images/{i}': image for i, image in enumerate(case.images)}
        for group, values in zip(_MAPPINGS, groups, strict=True):
            arrays |= {f'{number}/{group}/{name}': value for name, value in values.items()}
    document = json.dumps({'facts': dict(facts), 'cases': words})
    arrays['document'] = np.frombuffer(document.encode(), np.uint8)
    np.savez_compressed(bundle / ONNX_FOLDER / CASES_FILE, **arrays)  # type: ignore[arg-type]


def check_cases(bundle: Path) -> None:
    path = bundle / ONNX_FOLDER / CASES_FILE
    if not path.is_file():
        raise ValueError(
            f'{path}: is missing, so engines cannot be compared; export the bundle again: '
            f'vla_runtime export {bundle} --out NEW_BUNDLE'
        )


def read_cases(bundle: Path) -> tuple[list[Case], dict[str, Any]]:
    """Read a bundle's recorded cases, and how they were made (ValueError: none, or damaged)."""
    check_cases(bundle)
    path = bundle / ONNX_FOLDER / CASES_FILE
    try:
        with np.load(path) as file:
            arrays = dict(file)
        document = json.loads(arrays.pop('document').tobytes())
        cases = [
            _read_case(arrays, f'{number}/', stated)
            for number, stated in enumerate(document['cases'])
        ]
        return cases, document['facts']
    except (OSError, EOFError, ValueError, KeyError, TypeError, BadZipFile) as error:
        raise ValueError(f'{path}: is damaged: {error}; export the bundle again') from None


def _read_case(arrays: Mapping[str, np.ndarray], number: str, stated: Mapping[str, Any]) -> Case:
    own = {
        key.removeprefix(number): value
        for key, value in arrays.items()
        if number == key[: len(number)]
    }
    groups = {
        group: {
            key.removeprefix(f'{group}/'): value
            for key, value in own.items()
            if key.startswith(f'{group}/')
        }
        for group in (*_MAPPINGS, 'images')
    }
    images = groups.pop('images')
    return Case(
        words=dict(stated[_WORDS]),
        row_axes=dict(stated[_ROW_AXES]),
        images=[images[str(i)] for i in range(len(images))],
        image_mask=own['image_mask'],
        x=own['x'],
        row_weight=own['row_weight'],
        plan=own['plan'],
        plan_weight=own['plan_weight'],
        # Cases of earlier releases have no noise of the steps.
        step_noise=own.get('step_noise', np.zeros(0, np.float32)),
        past=groups[_MASKS],
        prefix_inputs=groups['prefix_inputs'],
        head_inputs=groups['head_inputs'],
        samples=groups['samples'],
        reference=groups['reference'],
    )
