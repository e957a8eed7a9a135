"""What the contract tests of families (test/contract) want to know of one.

A module of this folder declares `CONTRACTS`, a tuple of `FamilyContract`, and is found by listing
the folder. It imports neither ONNX nor ONNX Runtime: every test with a tiny policy reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from torch import Tensor

from vla_convert.checkpoints.options import ExportOptions
from vla_runtime.bundle.schema import BundleSpec, ImageSpec
from vla_runtime.types import Observation

File = Literal['vision.onnx', 'prefix.onnx', 'expert.onnx', 'monolithic.onnx', 'time table']


@dataclass(frozen=True)
class Tied:
    """A chunk of real-time chunking, and the previous chunk that it was tied to, (n, A).

    `overlap`: actions that are conditioned.
    """

    previous: Tensor
    actions: Tensor
    overlap: int = 6


@dataclass(frozen=True)
class Training:
    """One forward of the training code, without any cache.

    Attributes:
        x: (1, H, A).
        conditioning: row of the time table, (1, C).
        velocity: (H, A) of our sign; None where the code gives its squared error alone.
        target, squared_error: the velocity that the error is from, and the error, (H, A).
    """

    x: Tensor
    conditioning: Tensor
    velocity: Tensor | None = None
    target: Tensor | None = None
    squared_error: Tensor | None = None


@dataclass(frozen=True)
class Case:
    """One observation of a reference case, and our network with the case's weights.

    What the case did not record is None or empty.

    Attributes:
        network: our network.
        steps: denoise steps.
        pixels: (3, height, width) of each camera.
        image_mask: (V,) bool.
        rows: inputs of the prefix, one row.
        head: inputs of the head, one row.
        noise: (H, A), what padded actions have set to zero.
        actions: (H, A) normalised.
        velocities: (N, H, A) of our sign.
        tokens: answer of a head of tokens, (K,), and `logits` (K, vocabulary).
        image_tokens: (N, w) of each camera, the first w numbers of ours.
        past: outputs of the prefix by our names, at the places that ours shows to the head.
        tied: chunks of real-time chunking by schedule.
        training: a forward of the training code.
        unlike: actions (H, A) that the training code gives with one thing left out: ours differ.
    """

    network: Any
    steps: int
    pixels: Sequence[Tensor]
    image_mask: Tensor
    rows: Mapping[str, Tensor]
    actions: Tensor | None
    head: Mapping[str, Tensor] = field(default_factory=dict)
    noise: Tensor | None = None
    velocities: Tensor | None = None
    tokens: Tensor | None = None
    logits: Tensor | None = None
    image_tokens: Sequence[Tensor] = ()
    past: Mapping[str, Tensor] = field(default_factory=dict)
    tied: Mapping[str, Tied] = field(default_factory=dict)
    training: Training | None = None
    unlike: Tensor | None = None


@dataclass(frozen=True)
class Patched:
    """A wrong computation in our network, which right files show.

    Attributes:
        owner, name: module or class, and its attribute.
        wrong: what stands there instead.
        file: where the receipt finds it.
        quick: runs for every change; the others are thorough.
    """

    owner: Any
    name: str
    wrong: Any
    file: File
    quick: bool = False


@dataclass(frozen=True)
class OtherDims:
    """Right files of other dimensions than policy.yaml says.

    Attributes:
        change: dimensions to wrong ones.
        file, quick: as of `Patched`.
    """

    change: Callable[[Any], Any]
    file: File
    quick: bool = True


@dataclass(frozen=True)
class InGraph:
    """A wrong computation in a file.

    Attributes:
        file: the file.
        plant: name of a function of `onnx_faults`, or a function, that changes the graph.
        quick: as of `Patched`.
    """

    file: File
    plant: str | Callable[[Any], None]
    quick: bool = True


@dataclass(frozen=True)
class OtherTable:
    """A bundle's table read wrongly, such as positions off by one.

    Attributes:
        table: name of the tensor.
        change: the tensor to a wrong one.
        file, quick: as of `Patched`.
    """

    table: str
    change: Callable[[Tensor], Tensor]
    file: File
    quick: bool = True


Fault = Patched | OtherDims | InGraph | OtherTable


@dataclass(frozen=True)
class Recorded:
    """An observation, and what the training project's own code gave for it.

    Attributes:
        seen: the raw observation.
        noise: (H, A); None without noise.
        normalised: (H, a), of the first actions.
        actions: (H, a) in robot units.
        tokens: the prompt without padding.
        state: normalised state.
    """

    seen: Observation
    noise: np.ndarray | None
    normalised: Tensor
    actions: Tensor
    tokens: Tensor | None = None
    state: Tensor | None = None


@dataclass(frozen=True)
class Folder:
    """A checkpoint's folder as its training project writes it.

    Attributes:
        path: the folder.
        options: what completes it.
        recorded: observations with their chunks.
        bound: of normalised chunks, relative to the largest value.
        prepare: patches what the folder's project is a stand-in for.
    """

    path: Path
    options: ExportOptions
    recorded: Sequence[Recorded]
    bound: float = 5e-5
    prepare: Callable[[pytest.MonkeyPatch], object] = lambda patch: None


@dataclass(frozen=True)
class FamilyContract:
    """A family, as its contract tests see it.

    Attributes:
        family: name in policy.yaml.
        tiny: dimensions of a tiny policy, from its horizon.
        case: one entry of a reference case (test/cases/README.md), from its description's path.
        kind: `kind` of the cases; by default the family's name.
        bound: largest error of float32, relative to the largest value where that is above one.
        template: prompt template of the tiny policy; None without language.
        tokenizer: a vocabulary in the family's layout, in the folder of shipped cases.
        files: further files of the tiny policy, by name: copies from the shipped cases.
        gives_chunks: whether the tiny policy's random weights give chunks: not if its answers must
            be well formed.
        images: how the tiny policy's images are prepared.
        images_normalised: whether they are normalised by channel.
        norms_pass: whether the tiny policy's norms are drawn around 1 and not around 0: a network
            whose images, positions or earlier tokens would hardly matter otherwise.
        parameters: parameters of the published sizes, by preset.
        past: shapes of the prefix's outputs for one row, from dimensions.
        variants: further dimensions, which policy.yaml keeps.
        refused: changes of the tiny dimensions that are refused, by the field that is named.
        faults: wrong computations by name, of which the receipt finds each.
        fault_spec: the tiny policy that they are planted in; by default `tiny_spec`.
        folders: folders of its cases by name, each written below a path that is given.
    """

    family: str
    tiny: Callable[[int], Any]
    case: Callable[[Path, int], Case]
    kind: str = ''
    bound: float = 5e-5
    template: str | None = None
    tokenizer: str = 'lerobot_pi05_tiny/tokenizer.json'
    files: Mapping[str, str] = field(default_factory=dict)
    gives_chunks: bool = True
    images: ImageSpec = field(default_factory=lambda: ImageSpec('centre', 'bilinear'))
    images_normalised: bool = False
    norms_pass: bool = False
    parameters: Mapping[str, int] = field(default_factory=dict)
    past: Callable[[Any], Mapping[str, tuple[int, ...]]] | None = None
    variants: Mapping[str, Any] = field(default_factory=dict)
    refused: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)
    faults: Callable[[], Mapping[str, Fault]] | None = None
    fault_spec: Callable[[BundleSpec], BundleSpec] | None = None
    folders: Callable[[], Mapping[str, Callable[[Path], Folder]]] | None = None
