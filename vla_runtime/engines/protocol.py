"""Protocol of every backend: three networks over buffers that the engine owns.

Invariants:
- Every buffer lives from load to `close`, those of a schedule from its first `set_schedule`.
  Inference allocates none (a backend that needs scratch memory says so in its own docstring).
- The prefix engine's output buffers are the expert's input buffers: nothing is copied between
  `encode_prefix` and `run_steps`.
- `encode_image` writes the image tokens of one camera of one session only, `encode_prefix` one slot
  of one number of rows only, without selecting it (`use_prefix` does). So an encoding stays until
  it is overwritten; the prefix cache relies on it. Slots 0 and 1 are of session 0, 2 and 3 of
  session 1, and so on.
- One engine belongs to one thread at a time; with the feature `overlap` one thread may encode into
  one slot while another denoises over the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

import numpy as np

from vla_runtime.family.declaration import PolicyDims

# Prefix slots of each number of prompt rows, in each session.
SLOTS = 2
# Number of prompt rows, and slot.
PrefixSlot = tuple[int, int]

# Features that only some backends have. A setting that needs another one is refused.
# jacobian: the tie to the plan goes through the network's Jacobian (StepInputs.jacobian)
# action_time: every action has its own flow time (StepInputs.clean_actions)
# overlap: one slot is encoded while the other is denoised over
# packed: one pass reads a prompt and tokens of older requests (PackedEngine)
# together: steps of several requests run as rows of one pass (BatchEngine)
Feature = Literal['jacobian', 'action_time', 'overlap', 'packed', 'together']
# What each backend declares; here, so that a refusal can name the others without importing them.
FEATURES: Mapping[str, frozenset[Feature]] = {
    'torch': frozenset({'jacobian', 'action_time', 'overlap', 'packed', 'together'}),
    'onnxruntime': frozenset({'overlap'}),
    'tensorrt': frozenset(),
}


@dataclass(frozen=True)
class StepInputs:
    """Inputs of a chunk's denoise steps; all are copied into device buffers.

    Attributes:
        x: (H, A) float32, the noise.
        row_weight: (R,) float32, weight of each prompt row's velocity.
        plan: (H, A) float32 in normalised action space, zeros without a plan.
        plan_weight: (N, H) float32 per denoise step and action, zeros without a plan.
        rows: the family's head inputs by name, (R, …) each; `state` is normalised and padded.
        jacobian: multiply the tie to the plan by the Jacobian of the denoised chunk with respect to
            x (arXiv 2506.07339, equation 2) instead of by the identity (feature `jacobian`).
        clean_actions: number of first actions that are known; their flow time is 0 at every step,
            for networks trained so (feature `action_time`).
        step_noise: (N, H, A) float32 that the steps of a `diffusion` head add, zeros where a step
            adds none. None: other heads.
    """

    x: np.ndarray
    row_weight: np.ndarray
    plan: np.ndarray
    plan_weight: np.ndarray
    rows: Mapping[str, np.ndarray] = field(default_factory=dict)
    jacobian: bool = False
    clean_actions: int = 0
    step_noise: np.ndarray | None = None


class DenoiseLoop(NamedTuple):
    """Settings and buffers that the CUDA graphs of an inference depend on.

    Attributes:
        rows, slot: prefix that is denoised over.
        alone: steps run one by one, as under serial guidance, not as one graph.
    """

    steps: int
    rows: int = 1
    slot: int = 0
    jacobian: bool = False
    action_time: bool = False
    alone: bool = False


def count_rows(rows: Mapping[str, np.ndarray]) -> int:
    """Return R, the number of prompt rows, which all of a family's inputs share."""
    return int(next(iter(rows.values())).shape[0])


def input_named(name: str, given: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return an input that a network needs; ValueError where it was not given."""
    if name not in given:
        raise ValueError(f"this policy's network needs the input '{name}', which was not given")
    return given[name]


class PrefixEngine(Protocol):
    """The networks of one policy, loaded on one device: what engines of every head have."""

    dims: PolicyDims
    max_rows: int
    backend: str
    features: frozenset[Feature]

    @property
    def cuda_graph(self) -> Mapping[str, str]:
        """Graph per network (`vision`, `prefix`, `denoise`): `captured`, `eager`, or why not."""

    def captures(self, loop: DenoiseLoop) -> bool:
        """Return whether an inference with this denoise loop would capture a CUDA graph first.

        A graph of its prefix counts, too; that of a camera does not.
        """

    def encode_image(self, place: int, pixels: np.ndarray) -> None:
        """Run the vision network on one camera's pixels (3, S, S) float32 in [-1, 1].

        `place` is session * V + camera.
        """

    def encode_prefix(
        self, image_mask: np.ndarray, rows: Mapping[str, np.ndarray], slot: int = 0
    ) -> None:
        """Run the prefix over all image tokens of a session and R prompt rows, into a slot of its.

        Args:
            image_mask: (V,) bool, False hides a camera.
            rows: the family's prefix inputs by name, (R, …) each, 1 <= R <= max_rows; `tokens` is
                int64, `token_mask` bool, False hides padding.
            slot: slot of this number of rows; no other slot changes.
        """

    def use_prefix(self, rows: int, slot: int = 0) -> None:
        """Select the slot and number of rows that later steps denoise over (first: 1, 0).

        Between two `step` calls of one chunk the number of rows must stay.
        """

    @property
    def session_bytes(self) -> int:
        """Memory on the device that the image tokens and slots of one more session take."""

    def open_session(self) -> int:
        """Make image tokens and slots of one more robot; return its number.

        Session 0 is always there. What is there already keeps its addresses.

        Raises:
            ValueError: the device has no memory for it; the other sessions go on.
        """

    def synchronize(self) -> None:
        """Wait until all queued work is done, as before reading a clock."""

    def close(self) -> None:
        """Free every buffer; the engine must not be used afterwards."""


class TokenEngine(PrefixEngine, Protocol):
    """Engine of a `tokens` head: writes an answer token by token over the prefix in use.

    Keys and values of an answer are one set of buffers for each number of prompt rows.
    """

    def begin_answer(self) -> None:
        """Take the prefix's logits for those of the first token."""

    def read_token(self, token: np.ndarray, place: int) -> None:
        """Read a token (R,) int64 of the answer back, which leads to the next: one graph launch.

        `place` is its place in the answer, from 0; all places before it have been read.
        """

    def next_token(self) -> np.ndarray:
        """Return the likeliest next token of each row, (R,) int64."""

    def read_logits(self) -> np.ndarray:
        """Return a copy of the logits of the next token, (R, vocabulary) float32."""


class PackedEngine(TokenEngine, Protocol):
    """Engine of a `tokens` head that runs K requests in one pass (feature `packed`)."""

    @property
    def captures_tick(self) -> bool:
        """True where a tick, with a new prompt or without, would capture a CUDA graph first."""

    def tick(
        self,
        slot: int,
        image_mask: np.ndarray | None = None,
        rows: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        """Run one pass: every request in the ring writes its next token.

        Args:
            slot: slot of the newest request, 0 to K - 1: one more at each tick, mod K.
            image_mask, rows: as of `encode_prefix`, of the newest request, one prompt row; None
                where none came: the slot then holds no request.
        """

    def stage_tokens(self) -> np.ndarray:
        """Return the newest token in each slot, (K,) int64."""


class PolicyEngine(PrefixEngine, Protocol):
    """The vision, prefix and expert networks of one policy, loaded on one device."""

    def set_schedule(self, times: np.ndarray, dt: float, updates: np.ndarray | None = None) -> None:
        """Prepare the denoise steps at these times.

        Args:
            times: (N,) flow times from 1 towards 0, or training steps of a `diffusion` head; step
                k runs at times[k].
            dt: Euler step of every denoise step, negative; not read with `updates`.
            updates: (N, UPDATE_WIDTH) float32 of a `diffusion` head (`family.noise_schedule`).
        """

    def load_step_inputs(self, inputs: StepInputs) -> None:
        """Copy noise, weights, plan and head inputs into the expert's input buffers."""

    def step(self, index: int) -> None:
        """Run denoise step `index` of the schedule on the `x` buffer, in place."""

    def run_steps(self) -> None:
        """Run all denoise steps of the schedule; one graph launch where captured."""

    def read_x(self) -> np.ndarray:
        """Return a copy of the `x` buffer, (H, A) float32."""

    def write_x(self, x: np.ndarray) -> None:
        """Overwrite the `x` buffer, (H, A), that the next `step` starts from."""

    def read_velocity(self) -> np.ndarray:
        """Return a copy of the last step's velocities, (R, H, A) float32."""


class BatchEngine(PolicyEngine, Protocol):
    """Engine that runs the steps of several requests as rows of one pass (feature `together`)."""

    def denoise_together(
        self, places: Sequence[PrefixSlot], inputs: Sequence[StepInputs]
    ) -> tuple[list[np.ndarray], int]:
        """Run all steps of the schedule for several requests.

        On a CPU each result is bit for bit that of the request alone: where this processor's
        products do not keep to that, the requests run one after the other.

        Args:
            places: rows and slot of each request's prefix, all of as many rows.
            inputs: of each request; neither `jacobian` nor `clean_actions`.

        Returns:
            x (H, A) float32 of each request after the last step, and how many ran together
        """
