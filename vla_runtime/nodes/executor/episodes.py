"""The end of an episode: a person's verdict, or the time limit; and the begin of the next one.

An episode that has ended leaves the robot paused. Its verdict is on `~/report`, as a recording
keeps it and `to-dataset` reads it: a status `instruction` with an `outcome`, OK for a success.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rclpy.lifecycle import LifecycleNode
from std_srvs.srv import Trigger

from vla_runtime.messages.diagnostics import Level, StatusItem
from vla_runtime.nodes.executor.control_loop import ControlLoop
from vla_runtime.nodes.node_runner import OnError, guarded

SUCCESS, FAILURE, TIME_LIMIT = 'success', 'failure', 'time_limit'
_LEVELS = {SUCCESS: Level.OK, FAILURE: Level.WARN, TIME_LIMIT: Level.WARN}
# A longer time between two looks is of a clock that was set, or of a node that was suspended.
_LONGEST_LOOK_NS = 500_000_000


class EpisodeEnds:
    """The services `~/success` and `~/failure` of one node, and its time limit.

    Args:
        loop: returns the loop of an active node.
        report: publishes statuses on `~/report`.

    Attributes:
        outcome: how the episode ended; empty while it goes on.
        driven_s: ROS time for which it has gone on: started, and not paused.
        went_home: the robot was sent home in it: what comes then is another episode.
    """

    def __init__(
        self,
        node: LifecycleNode,
        loop: Callable[[], ControlLoop | None],
        report: Callable[[Sequence[StatusItem]], None],
        on_error: OnError,
    ) -> None:
        self._loop, self._report = loop, report
        self._logger = node.get_logger()
        self._looked_ns: int | None = None
        self._number = 0
        self.begin(0)
        for outcome in (SUCCESS, FAILURE):
            call = guarded(on_error, outcome, self._caller(outcome))
            node.create_service(Trigger, f'~/{outcome}', call)

    def begin(self, number: int) -> None:
        """Note that an episode of this number begins."""
        self._number = number
        self.outcome, self.driven_s, self.went_home = '', 0.0, False

    @property
    def is_over(self) -> bool:
        return bool(self.outcome) or self.went_home

    def note_home(self) -> None:
        self.went_home = True

    def look(self, now_ns: int, limit_s: float) -> None:
        """Count the time since the last look; end the episode after `limit_s`, 0.0 for never."""
        before_ns, self._looked_ns = self._looked_ns, now_ns
        loop = self._loop()
        if loop is None or before_ns is None or self.outcome or not loop.drives():
            return
        self.driven_s += min(max(now_ns - before_ns, 0), _LONGEST_LOOK_NS) * 1e-9
        if 0.0 < limit_s <= self.driven_s:
            self._end(loop, TIME_LIMIT, f'its time is up ({limit_s:g} s, episode_time_limit_s)')

    def _caller(self, outcome: str) -> Callable[[Trigger.Request, Trigger.Response], object]:
        def call(_: Trigger.Request, response: Trigger.Response) -> Trigger.Response:
            loop = self._loop()
            if loop is None or not loop.has_started:
                response.message = 'no episode goes on: the executor was not started'
            elif self.outcome:
                response.message = (
                    f'episode {self._number} has ended already: {self.outcome}; ~/resume begins '
                    'the next one'
                )
            else:
                response.success = True
                response.message = self._end(loop, outcome, outcome)
            return response

        return call

    def _end(self, loop: ControlLoop, outcome: str, why: str) -> str:
        """Let the robot rest and publish the verdict; return what to say."""
        self.outcome = outcome
        text = f'episode {self._number} has ended after {self.driven_s:.1f} s: {why}'
        # A stopped robot rests already.
        loop.pause(text)
        facts = {'outcome': outcome, 'episode': self._number, 'time_s': self.driven_s}
        self._report([StatusItem('instruction', _LEVELS[outcome], text, facts)])
        self._logger.info(text)
        return text
