"""What a robot's node asks of a policy, whose networks run here or on another machine."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Protocol

from vla_runtime.bundle.schema import BundleSpec
from vla_runtime.inference.settings import PolicySettings
from vla_runtime.types import ActionChunk, CommittedPlan, InferenceReport, Observation

Inference = tuple[ActionChunk, InferenceReport]


class ChunkPolicy(Protocol):
    """A policy that is ready; `policy.Policy` says what each method does."""

    @property
    def spec(self) -> BundleSpec: ...

    @property
    def reads_instruction(self) -> bool: ...

    @property
    def has_room(self) -> bool: ...

    @property
    def why_away(self) -> str:
        """Reason why no inference can begin now, such as a server that is away; else empty."""

    def check(self, settings: PolicySettings) -> None: ...

    def is_prepared(self, settings: PolicySettings) -> bool: ...

    def prepare(self, settings: PolicySettings) -> bool: ...

    def warm_up(self) -> float: ...

    def submit(
        self,
        observation: Observation,
        *,
        settings: PolicySettings | None = None,
        plan: CommittedPlan | None = None,
        number: int | None = None,
    ) -> Future[Inference]: ...

    def open_requests(self, settings: PolicySettings) -> int: ...

    def turn_to(self, instruction: str) -> None: ...

    def drain(self) -> None: ...

    def reset(self) -> None: ...

    def close(self) -> None: ...
