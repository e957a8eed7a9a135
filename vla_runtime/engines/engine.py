"""The one protocol that every backend fulfils: three networks over buffers it owns.

Invariants:
- Every buffer lives from load to `close`, those of a schedule from the first `set_schedule`; what
  runs every chunk overwrites buffers and never allocates new ones (a backend whose runtime cannot
  avoid scratch memory says so in its own docstring).
- The prefix engine's output buffers are the expert's input buffers: `encode_prefix` is all that
  stands between a new observation and `run_steps`.
- `encode_image` writes one camera's image tokens into that camera's place and leaves the others
  alone; `encode_prefix` writes the keys and values of one number of rows and leaves those of other
  numbers alone. So what was encoded stays until it is encoded anew (the prefix cache rests on it).
- One engine belongs to one thread at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from vla_runtime.dimensions import PolicyDims


@dataclass(frozen=True)
class StepInputs:
    """What a chunk is denoised from and towards; all of it is copied into device buffers.

    Attributes:
        x: (H, A) float32, the noise.
        row_weight: (R,) float32, weight of each prompt row's velocity.
        plan: (H, A) float32 in normalised action space, zeros without a plan.
        plan_weight: (N, H) float32 per denoise step and action, zeros without a plan.
        state: (R, S) float32 normalised and padded, pi0 only.
    """

    x: np.ndarray
    row_weight: np.ndarray
    plan: np.ndarray
    plan_weight: np.ndarray
    state: np.ndarray | None = None


class PolicyEngine(Protocol):
    """The vision, prefix and expert networks of one policy, loaded on one device."""

    dims: PolicyDims
    max_rows: int

    @property
    def cuda_graph(self) -> Mapping[str, str]:
        """Per network (`vision`, `prefix`, `denoise`): `captured`, `eager`, or why not."""

    def set_schedule(self, times: np.ndarray, dt: float) -> None:
        """Prepare the denoise steps at these flow times.

        Args:
            times: (N,) flow times from 1 towards 0; step k runs at times[k].
            dt: Euler step of every denoise step, negative.
        """

    def encode_image(self, camera: int, pixels: np.ndarray) -> None:
        """Run the vision network on one camera's pixels (3, S, S) float32 in [-1, 1]."""

    def encode_prefix(
        self, image_mask: np.ndarray, tokens: np.ndarray, token_mask: np.ndarray
    ) -> None:
        """Run the language prefill over all image tokens and R prompt rows.

        Args:
            image_mask: (V,) bool, False hides a camera.
            tokens: (R, L) int64, 1 <= R <= max_rows.
            token_mask: (R, L) bool, False hides padding.
        """

    def use_prefix(self, rows: int) -> None:
        """Denoise over the prefix that was last encoded for this number of rows."""

    def load_step_inputs(self, inputs: StepInputs) -> None:
        """Copy noise, weights, plan and state into the expert's input buffers."""

    def step(self, index: int) -> None:
        """Run denoise step `index` of the schedule on the `x` buffer, in place."""

    def run_steps(self) -> None:
        """Run all denoise steps of the schedule; one graph launch where captured."""

    def read_x(self) -> np.ndarray:
        """A copy of the `x` buffer, (H, A) float32."""

    def read_velocity(self) -> np.ndarray:
        """A copy of the last step's velocities, (R, H, A) float32."""

    def synchronize(self) -> None:
        """Wait until all work so far is done, so that a clock read afterwards is honest."""

    def close(self) -> None:
        """Free every buffer; the engine must not be used afterwards."""
