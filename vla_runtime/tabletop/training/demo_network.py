"""Size of the demo policy's network, and the trained bundle that training goes on from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vla_runtime.bundle.folder import read_bundle
from vla_runtime.bundle.schema import VERIFICATION_FILE, WEIGHTS_FILE
from vla_runtime.families.blocks.dimensions import DecoderDims, VisionDims
from vla_runtime.families.family import language_dims
from vla_runtime.families.pi.dimensions import PiDims
from vla_runtime.files.json_file import read_json
from vla_runtime.tabletop.sim.expert import HORIZON
from vla_runtime.tabletop.sim.scene import CAMERAS
from vla_runtime.tabletop.sim.world import JOINT_NAMES
from vla_runtime.tabletop.training.samples import IMAGE_SIZE
from vla_runtime.tabletop.training.vocabulary import PROMPT_LENGTH


def demo_dims(vocabulary: int) -> PiDims:
    """A pi0.5 of about 1.5 million parameters."""
    stack = DecoderDims(width=96, depth=4, mlp_dim=256, num_heads=4, num_kv_heads=1, head_dim=24)
    return PiDims(
        vision=VisionDims(
            width=96, depth=3, num_heads=4, mlp_dim=256, patch_size=16, image_size=IMAGE_SIZE
        ),
        language=stack,
        expert=stack,
        vocabulary=vocabulary,
        cameras=len(CAMERAS),
        prompt_length=PROMPT_LENGTH,
        horizon=HORIZON,
        action_dim=len(JOINT_NAMES),
    )


@dataclass(frozen=True)
class Start:
    """A trained bundle that training goes on from.

    Attributes:
        weights: file of the tensors.
        sha256: of that file.
        tokenizer: file of the vocabulary.
        statistics: `state.q01` and so on; the network's numbers are scaled by these.
        made: how the bundle was made, as its receipt says.
    """

    weights: Path
    sha256: str
    tokenizer: Path
    statistics: dict[str, np.ndarray]
    made: dict[str, Any]

    @classmethod
    def read(cls, folder: Path) -> Start:
        """Read and check a bundle that `train-demo` made.

        Raises:
            ValueError: the bundle is broken, or its network is not the demo policy's.
        """
        bundle = read_bundle(folder)
        dims = bundle.spec.dims
        if bundle.spec.family != 'pi05' or dims != demo_dims(language_dims(dims).vocabulary):
            raise ValueError(
                f'--from {folder}: family and dimensions in policy.yaml are not those of the demo '
                "policy's network; name a bundle that train-demo made"
            )
        return cls(
            bundle.weights_path,
            bundle.spec.files[WEIGHTS_FILE],
            bundle.tokenizer_path,
            dict(bundle.statistics),
            _made(bundle.folder / VERIFICATION_FILE),
        )


def _made(receipt: Path) -> dict[str, Any]:
    if not receipt.exists():
        return {}
    return dict(read_json(receipt).mapping('made', optional=True).values)
