"""`RemotePolicy`: a policy whose networks run on another machine, as a robot's node asks it.

Only the inference goes over the wire: observation, settings, inference number and committed plan
there, chunk and report back. It needs neither torch nor weights. Invariants:
- the chunk is the one that `Policy` has on the server's machine for the same inputs; with JPEG, for
  the images after it;
- an inference is answered, or fails within the time limit and is never answered later;
- the observation keeps the robot's stamps: no clock is compared with the server's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from time import perf_counter
from typing import Any

import numpy as np

from vla_runtime.bundle.schema import BundleSpec
from vla_runtime.files.setting_fields import values_of
from vla_runtime.inference.chunk_policy import Inference
from vla_runtime.inference.setting_checks import check_runnable
from vla_runtime.inference.settings import PolicySettings
from vla_runtime.messages.jpeg import encode_jpeg
from vla_runtime.remote.connection import ServerAddress
from vla_runtime.remote.contract import Contract
from vla_runtime.remote.link import ServerLink
from vla_runtime.remote.message_pack import pack
from vla_runtime.remote.report_fields import WrongAnswerError, answer_of
from vla_runtime.types import CommittedPlan, Observation


class RemotePolicy:
    """A policy on a server; one thread at a time calls `infer`, `submit` and `reset`.

    Attributes:
        network_ms: milliseconds of the last inference beside those in the server.

    Args:
        settings: those of inferences that are given none.
        jpeg_quality: of the images on their way, 1 to 100; 0: raw pixels.
        note: called with a sentence when the server is lost, refused or back; by any thread.

    Raises:
        ServerLostError: nobody answers there; ValueError: key, certificate or contract refused, or
            settings that the policy cannot run with.
    """

    def __init__(
        self,
        address: ServerAddress,
        settings: PolicySettings | None = None,
        *,
        jpeg_quality: int = 0,
        note: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._link = ServerLink(address, note)
        self._jpeg_quality = jpeg_quality
        self._number, self._reset_due = 0, False
        self._settings = settings or PolicySettings()
        self.network_ms = 0.0
        try:
            self.check(self._settings)
        except ValueError:
            self.close()
            raise

    @property
    def contract(self) -> Contract:
        return self._link.contract

    @property
    def spec(self) -> BundleSpec:
        return self.contract.spec

    @property
    def url(self) -> str:
        return self._link.address.url

    @property
    def session_id(self) -> str:
        return self._link.session_id

    @property
    def reconnects(self) -> int:
        return self._link.reconnects

    @property
    def reads_instruction(self) -> bool:
        """See `Policy.reads_instruction`."""
        return self.spec.prompt is not None

    @property
    def why_away(self) -> str:
        """Reason why no inference can begin now: the server is away, or has another bundle."""
        return self._link.why_away

    @property
    def has_room(self) -> bool:
        """True: an inference is over when `submit` returns."""
        return True

    def check(self, settings: PolicySettings) -> None:
        """Refuse settings that the served policy cannot run with (ValueError)."""
        if settings.pipeline != 'latency':
            raise ValueError(
                f"pipeline is '{settings.pipeline}': with backend 'remote' the server decides what "
                "runs together; use 'latency'"
            )
        check_runnable(settings, self.spec, self.contract)

    def is_prepared(self, settings: PolicySettings) -> bool:
        """True: what settings need is captured by the server, at their first inference."""
        return True

    def prepare(self, settings: PolicySettings) -> bool:
        """Check settings; True, for nothing is to be captured here."""
        self.check(settings)
        return True

    def warm_up(self) -> float:
        """Return the milliseconds of a message there and back; the server is warm already."""
        return self._link.ping()

    def infer(
        self,
        observation: Observation,
        *,
        settings: PolicySettings | None = None,
        plan: CommittedPlan | None = None,
        noise: np.ndarray | None = None,
        number: int | None = None,
    ) -> Inference:
        """Turn an observation into an action chunk, as `Policy.infer` does.

        Raises:
            ServerLostError: no answer in time; the link is made again.
            ValueError: what the policy refuses, or an answer that is none to this request; nothing
                has changed then.
        """
        settings = self._settings if settings is None else settings
        self.check(settings)
        number = self._number if number is None else number
        if self._reset_due:
            self._link.ask(pack({'endpoint': 'reset', 'session_id': self.session_id}))
            self._reset_due = False
        start_s = perf_counter()
        message = pack(self._request(observation, settings, plan, noise, number))
        packed_s = perf_counter()
        reply = self._link.ask(message)
        try:
            chunk, report = self._read(reply, observation, number)
        except WrongAnswerError as error:
            text = f'{self.url}: {error}'
            self._link.lose(None, text)
            raise WrongAnswerError(text) from None
        total_ms = (perf_counter() - start_s) * 1e3
        server_ms = report.milliseconds['total']
        self.network_ms = total_ms - server_ms
        phases = {name: ms for name, ms in report.milliseconds.items() if name != 'total'}
        milliseconds = {
            **phases,
            'pack': (packed_s - start_s) * 1e3,
            'network': total_ms - server_ms - (packed_s - start_s) * 1e3,
            'total': total_ms,
        }
        self._number = number + 1
        return chunk, replace(report, milliseconds=milliseconds)

    def submit(
        self,
        observation: Observation,
        *,
        settings: PolicySettings | None = None,
        plan: CommittedPlan | None = None,
        number: int | None = None,
    ) -> Future[Inference]:
        """Infer; the future is done on return. Every error is raised here."""
        done: Future[Inference] = Future()
        done.set_result(self.infer(observation, settings=settings, plan=plan, number=number))
        return done

    def open_requests(self, settings: PolicySettings) -> int:
        """Return 1: one inference after the other."""
        return 1

    def turn_to(self, instruction: str) -> None:
        """Do nothing: no request is open between two inferences."""

    def drain(self) -> None:
        """Do nothing: no request is open between two inferences."""

    def reset(self) -> None:
        """Begin a new episode: numbers start at 0; the server's cache goes before the next."""
        self._number, self._reset_due = 0, True

    def close(self) -> None:
        """Leave the server; an inference afterwards is a ServerLostError."""
        self._link.close()

    def _request(
        self,
        observation: Observation,
        settings: PolicySettings,
        plan: CommittedPlan | None,
        noise: np.ndarray | None,
        number: int,
    ) -> dict[str, Any]:
        fields: dict[str, Any] = {
            **self._images(observation.images),
            'observation/state': np.asarray(observation.state, dtype=np.float64),
            'session_id': self.session_id,
            'number': number,
            'report': True,
        }
        if self.reads_instruction:
            fields['prompt'] = observation.instruction
        if observation.earlier_states:
            fields['observation/earlier_states'] = np.stack(observation.earlier_states)
        if noise is not None:
            fields['noise'] = noise
        if plan is not None and settings.rtc_mode != 'off':
            if plan.execution_horizon != len(plan.actions):
                raise ValueError('a policy on a server is conditioned on all rows of a plan')
            fields['plan'] = plan.actions
            fields['delay_steps'] = plan.delay_steps
        fields |= {f'settings/{name}': value for name, value in values_of(settings).items()}
        fields |= {f'stamps/{name}': stamp for name, stamp in observation.stamps_ns.items()}
        return fields

    def _images(self, images: Mapping[str, np.ndarray | None]) -> dict[str, Any]:
        quality = self._jpeg_quality
        return {
            f'observation/image/{name}': (
                encode_jpeg(pixels, quality) if quality and pixels is not None else pixels
            )
            for name, pixels in images.items()
        }

    def _read(self, reply: Any, observation: Observation, number: int) -> Inference:
        if not isinstance(reply, dict):
            raise WrongAnswerError('the answer is no map')
        contract = self.contract
        chunk, report = answer_of(
            reply.get('actions'),
            reply.get('report'),
            contract.spec,
            contract.bundle_sha256,
            observation.stamps_ns,
        )
        if report.number != number:
            raise WrongAnswerError(f'number: the answer is that to inference {report.number}')
        return chunk, report
