"""Answer a request with a chunk, or with the reasons why there is none.

No rclpy: the node gives it requests and the time, and publishes what it answers. Invariants:
- no inference without a complete, fresh observation, and an instruction if the policy reads one;
- no inference while the ROS clock stands still;
- an episode ends with `begin`, or when the executor's requests carry another one; inference
  numbers then start at 0 again.
One thread calls `answer`, `begin` and `drain`.
"""

from __future__ import annotations

from concurrent.futures import Future

import numpy as np

from vla_runtime.bundle.schema import earlier_name
from vla_runtime.execution.watchdog import WatchdogParameters
from vla_runtime.inference.chunk_policy import ChunkPolicy
from vla_runtime.inference.settings import PolicySettings
from vla_runtime.messages.images import ImageError
from vla_runtime.nodes.policy.robot_policy import Answer, RobotPolicy
from vla_runtime.robot.match import RobotMatch
from vla_runtime.sensors.synchronizer import MissingInput, Selection, Synchronizer
from vla_runtime.types import Observation, PlanRequest

# A clock that stands still for longer holds the executor too.
_PAUSED_NS = round(WatchdogParameters.clock_timeout_s * 1e9)


class Responder:
    """Answers requests with one policy on one robot.

    `policy` is loaded and warm, the synchroniser is fed by the node, and the times are those of the
    activation: the ROS clock must move on from there.
    """

    def __init__(
        self,
        policy: ChunkPolicy,
        match: RobotMatch,
        synchronizer: Synchronizer,
        *,
        now_ns: int,
        steady_ns: int,
    ) -> None:
        self._policy = policy
        self._robot_policy = RobotPolicy(policy, match)
        self._synchronizer = synchronizer
        self._decided_at_ns = now_ns
        self._seen_ns, self._seen_at_ns = now_ns, steady_ns
        self._episode: int | None = None

    def begin(self, episode: int, *, anew: bool = False) -> bool:
        """Begin another episode, or this one `anew`, and return True: numbers start at 0."""
        begins = anew or episode != self._episode
        if begins:
            self._episode = episode
            self._policy.reset()
            self._synchronizer.begin_episode()
        return begins

    def readiness(self, now_ns: int, steady_ns: int, instruction: str) -> tuple[MissingInput, ...]:
        """Return what keeps a request from being answered now, at a ROS and a steady time.

        Empty when nothing does. A clock that is only coarse is not taken for a paused one.
        """
        if now_ns != self._seen_ns:
            self._seen_ns, self._seen_at_ns = now_ns, steady_ns
        paused = steady_ns - self._seen_at_ns > _PAUSED_NS
        selection = self._synchronizer.select(now_ns)
        return (
            *self._missing_server(),
            *self._missing_instruction(instruction),
            *((_paused(now_ns),) if paused else ()),
            *(() if isinstance(selection, Selection) else selection),
        )

    def answer(
        self, request: PlanRequest, instruction: str, settings: PolicySettings, *, now_ns: int
    ) -> Future[Answer] | tuple[MissingInput, ...]:
        """Infer a chunk for a request, if there is something to infer it from.

        In the pipelines `throughput` and `packed` the future is done later, in another thread;
        answers come in the order of their requests.

        Args:
            instruction: the task in plain words; empty when none was given.
            settings: `rtc_mode` says whether chunks are conditioned on the plan.
            now_ns: ROS time.

        Raises:
            ValueError: a plan that is not for this robot, or an observation that the policy
                refuses; the request cannot be answered.
        """
        self.begin(request.episode)
        if away := self._missing_server():
            return away
        missing = self._missing_instruction(instruction)
        if now_ns == self._decided_at_ns:
            missing += (_paused(now_ns),)
        selection = self._synchronizer.select(now_ns)
        if not isinstance(selection, Selection):
            return missing + selection
        if missing:
            return missing
        images = self._decode(selection)
        if isinstance(images, MissingInput):
            return (images,)
        self._decided_at_ns = now_ns
        stamps = {name: frame.stamp_ns for name, frame in selection.frames.items()}
        stamps['state'] = selection.state_stamp_ns
        for ago, (stamp_ns, _) in enumerate(selection.earlier_states, start=1):
            stamps[earlier_name('state', ago)] = stamp_ns
        observation = Observation(
            images=images,
            state=self._robot_policy.state(selection.state),
            instruction=instruction,
            stamps_ns=stamps,
            earlier_states=self._robot_policy.earlier_states(selection),
        )
        answer = self._robot_policy.submit(
            observation,
            request,
            settings,
            stamp_ns=selection.stamp_ns,
            selection=selection,
            now_ns=now_ns,
        )
        self._synchronizer.note_observation(selection)
        return answer

    @property
    def has_room(self) -> bool:
        """True when the policy begins another request at once."""
        return self._policy.has_room

    def drain(self) -> None:
        self._policy.drain()

    def _missing_server(self) -> tuple[MissingInput, ...]:
        why = self._policy.why_away
        return (MissingInput('server', why),) if why else ()

    def _missing_instruction(self, instruction: str) -> tuple[MissingInput, ...]:
        if instruction.strip() or not self._policy.reads_instruction:
            return ()
        text = (
            'no instruction: set parameter instruction, or publish std_msgs/String on ~/instruction'
        )
        return (MissingInput('instruction', text),)

    def _decode(self, selection: Selection) -> dict[str, np.ndarray | None] | MissingInput:
        images: dict[str, np.ndarray | None] = {}
        for name, frame in selection.frames.items():
            try:
                pixels = self._robot_policy.pixels(name, frame.message, frame.facts)
            except ImageError as error:
                self._synchronizer.discard_frame(name, frame, str(error))
                return MissingInput(f'camera {name}', f"camera '{name}': {error}")
            self._synchronizer.note_pixels(name, frame, pixels)
            images[name] = pixels
        return images


def _paused(now_ns: int) -> MissingInput:
    return MissingInput(
        'clock',
        f'the ROS clock stands still at {now_ns * 1e-9:.3f} s: use_sim_time is set and /clock is '
        'paused or missing',
    )
