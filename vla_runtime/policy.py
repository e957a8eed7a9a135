"""`Policy`: observation in, action chunk out. The one entry that nodes, tools and tests call.

Invariants:
- Same observation, settings, inference number and plan: same chunk, bit for bit.
- An observation that is refused changes nothing: the next good one gives the same chunk as
  without it.
- One snapshot of settings holds for the whole of an inference: those it is given, or else the
  policy's own (`settings`), which a Python program sets once. Nodes give each inference its own.
- One thread at a time calls `infer`, `submit`, `reset`, those of sessions, and `Session.reset`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import cast

import numpy as np

from vla_runtime.bundle.folder import Bundle
from vla_runtime.bundle.schema import BundleSpec
from vla_runtime.engines.candidates import Candidate, load_chosen
from vla_runtime.engines.closing import close_on_error
from vla_runtime.engines.devices import cpu_threads
from vla_runtime.engines.loading import EngineOptions, load_engine, prompt_rows, read_for
from vla_runtime.engines.preflight import (
    AUTO,
    check_backend,
    check_words,
)
from vla_runtime.engines.protocol import (
    Feature,
    PackedEngine,
    PolicyEngine,
    PrefixSlot,
)
from vla_runtime.engines.recorded_cases import judged_as
from vla_runtime.engines.triton_option import OFF, check_triton
from vla_runtime.family.declaration import token_dims
from vla_runtime.family.listing import find_family
from vla_runtime.inference.chunk_policy import Inference
from vla_runtime.inference.codec import PolicyCodec, require_finite
from vla_runtime.inference.denoise import StepObserver
from vla_runtime.inference.packed import PackedAnswer, PackedPipeline
from vla_runtime.inference.pipeline import ChunkPipeline
from vla_runtime.inference.prefix_cache import PrefixCache
from vla_runtime.inference.preparation import Preparation
from vla_runtime.inference.recorded_check import check_recorded_cases
from vla_runtime.inference.request import ChunkRequest
from vla_runtime.inference.request_builder import RequestBuilder
from vla_runtime.inference.runner import ChunkRunner, DenoisedChunk, EncodedPrefix
from vla_runtime.inference.sessions import Request, Session
from vla_runtime.inference.settings import PolicySettings
from vla_runtime.types import CommittedPlan, Observation


class Policy:
    """A policy bundle on an engine, ready to infer.

    Attributes:
        backend, precision: names of the backend and of the precision in use, never `auto`; empty
            for an engine that was handed over.
        threads: CPU threads of each network.
        triton: `on` where the head's layers run in Triton kernels, else `off`.
        why: reasons for what `auto` and `triton` decided; empty where neither was asked for.
    """

    backend: str = ''
    precision: str = ''
    threads: int | None = None
    triton: str = OFF
    why: str = ''

    def __init__(
        self, bundle: Bundle, engine: PolicyEngine, settings: PolicySettings | None = None
    ) -> None:
        self.spec: BundleSpec = bundle.spec
        self._engine = engine
        self._codec = PolicyCodec(bundle)
        self._builder = RequestBuilder(self._codec, engine)
        self._runner = ChunkRunner(engine, bundle.spec.camera_names, self._codec.answer_decoder)
        self._pipeline: ChunkPipeline[Inference] = ChunkPipeline(self._runner)
        self._packed = self._packed_pipeline(engine)
        self._own = Session(self._runner.cache)
        self._sessions = {self._own}
        # Of closed ones, whose places in the engine the next take.
        self._free_caches: list[PrefixCache] = []
        # Prefixes may lie in slot 1, which `latency` denoises over with serial guidance alone.
        self._overlapped = False
        self._closed = False
        self._preparation = Preparation(self.spec, engine, self._builder, self._run_black)
        # Those that were checked last.
        self._settings = self._checked = PolicySettings()
        self.settings = settings or PolicySettings()

    @classmethod
    def load(
        cls,
        bundle: str | Path | Bundle,
        backend: str = AUTO,
        device: str = 'cpu',
        *,
        precision: str = AUTO,
        settings: PolicySettings | None = None,
        use_cuda_graphs: bool = True,
        threads: int | None = None,
        triton: str = OFF,
        verify: bool = True,
    ) -> Policy:
        """Read a bundle and load its networks.

        Args:
            backend: a name of `engines.preflight.BACKENDS`: `torch`, `onnxruntime`, `tensorrt`;
                `auto`: the first in order that can run this bundle here (`engines.candidates`).
            device: `cpu`, `cuda` or `cuda:N`.
            precision: `float32`, `bfloat16` or `float16` for the large matrices, or what ONNX files
                are in: `int8` on a CPU, `fp8` and `nvfp4` with TensorRT; `auto`: the fewest bits
                that the bundle's receipt covers and the backend runs here.
            use_cuda_graphs: on CUDA, replay captured graphs (same results, less launch time).
            threads: CPU threads of each network, whatever runs it; 0: all cores but one, shared by
                the networks that run at once; None: OMP_NUM_THREADS where set, else as 0.
            triton: `on`: the layers of the head in Triton kernels, on CUDA and with PyTorch alone.
                Where they cannot be compiled, or come to other numbers, they run as with `off`.
            verify: compare every file of the bundle with its SHA-256 first.

        Raises:
            BundleError: the bundle is damaged or inconsistent.
            ValueError: backend, device or precision that is not available here, or settings that
                this policy cannot run with; nothing stays loaded then.
        """
        # Quick checks come before gigabytes are hashed.
        check_words(backend, precision)
        check_triton(triton, backend)
        checked = read_for(backend, device, bundle, verify=verify)
        settings = settings or PolicySettings()
        options = EngineOptions(
            device,
            max_rows=max(prompt_rows(checked)),
            use_cuda_graphs=use_cuda_graphs,
            threads=cpu_threads(threads, settings.networks_at_once),
            denoise_steps=settings.denoise_steps,
            triton=triton,
        )
        if AUTO in (backend, precision):
            return cls._load_first(checked, backend, precision, options, settings)
        return cls._load_one(checked, options, settings, Candidate(backend, precision))

    @classmethod
    def _load_first(
        cls,
        bundle: Bundle,
        backend: str,
        precision: str,
        options: EngineOptions,
        settings: PolicySettings,
    ) -> Policy:

        def load(candidate: Candidate) -> Policy:
            if backend != AUTO:
                return cls._load_one(bundle, options, settings, candidate)
            # The backend is known only now.
            check_backend(candidate.backend, options.device)
            check_triton(options.triton, candidate.backend)
            return cls._load_one(bundle, options, settings, candidate)

        policy, why = load_chosen(
            bundle,
            backend,
            options.device,
            precision,
            load=load,
            check=partial(_check_recorded, bundle.folder),
        )
        policy.why = '; '.join(filter(None, (why, policy.why)))
        return policy

    @classmethod
    def _load_one(
        cls,
        bundle: Bundle,
        options: EngineOptions,
        settings: PolicySettings,
        candidate: Candidate,
    ) -> Policy:
        """Load a bundle with this backend and precision; after an error nothing stays loaded."""
        engine = load_engine(bundle, candidate, options)
        with close_on_error(engine.close):
            policy = cls(bundle, engine, settings)
        policy.threads = options.threads
        policy.backend, policy.precision = candidate.backend, candidate.precision
        policy.triton = getattr(engine, 'triton', OFF)
        policy.why = getattr(engine, 'why_triton', '')
        return policy

    @property
    def max_rows(self) -> int:
        """Most prompt rows of an inference: 2 where guidance can run."""
        return self._engine.max_rows

    @property
    def features(self) -> frozenset[Feature]:
        """Features of the engine (`engines.protocol`)."""
        return self._engine.features

    @property
    def why_away(self) -> str:
        """Reason why no inference can begin now: none, as the networks are in this process."""
        return ''

    @property
    def reads_instruction(self) -> bool:
        """True for a policy with language; others need no instruction and do not read one."""
        return self.spec.prompt is not None

    @property
    def settings(self) -> PolicySettings:
        """Settings of inferences that are given none."""
        return self._settings

    @settings.setter
    def settings(self, settings: PolicySettings) -> None:
        """Replace them; a ValueError of `check` leaves the old ones in force."""
        self.check(settings)
        self._settings = settings

    def check(self, settings: PolicySettings) -> None:
        """Refuse settings that this policy cannot run with; changes nothing.

        Raises:
            ValueError: guidance for a policy without advantage tags, or something that its engine
                cannot do.
        """
        self._builder.check(settings)

    def infer(
        self,
        observation: Observation,
        *,
        settings: PolicySettings | None = None,
        plan: CommittedPlan | None = None,
        noise: np.ndarray | None = None,
        number: int | None = None,
        on_step: StepObserver | None = None,
    ) -> Inference:
        """Turn an observation into an action chunk.

        Args:
            settings: None: those of `settings`.
            plan: actions still to be executed, on which the chunk is conditioned.
            noise: (H, A) float32 to denoise from; None: made from seed and inference number.
            number: inference number, from which the next ones go on; None: the next one.
            on_step: called after every denoise step; the steps then run one by one.

        Raises:
            ValueError: anything that does not fit the bundle; nothing has changed then.
        """
        return self.submit(
            observation, settings=settings, plan=plan, noise=noise, number=number, on_step=on_step
        ).result()

    def submit(
        self,
        observation: Observation,
        *,
        settings: PolicySettings | None = None,
        plan: CommittedPlan | None = None,
        noise: np.ndarray | None = None,
        number: int | None = None,
        on_step: StepObserver | None = None,
    ) -> Future[Inference]:
        """Begin an inference.

        With `pipeline` `latency` it is done on return. With `throughput` it is encoded on return
        and denoised while the next one is encoded: same chunks, in the same order, but a chunk that
        turns out not finite has used up its inference number. Waits while `has_room` is False.

        With `packed` it is queued on return; answers come in the same order, and a new instruction
        drops those that are open.

        Args and raises are those of `infer`. With `latency` every error is raised here. With
        `throughput` errors up to the end of encoding are raised here, later ones by the future,
        which cannot be cancelled; with `packed` all but those of the observation. `on_step` is not
        called with `packed`.
        """
        self._require_open()
        settings = self._settled(settings)
        number = self._own.number if number is None else number
        request = self._builder.build(observation, settings, number, plan=plan, noise=noise)

        def finish(
            encoded: EncodedPrefix, denoised: DenoisedChunk, overlap_ms: float = 0.0
        ) -> Inference:
            return self._finish(encoded, denoised, observation, overlap_ms)

        def finish_packed(answer: PackedAnswer) -> Inference:
            chunk = self._codec.actions(np.array(answer.tokens, dtype=np.int64), observation)
            request.clock.mark('actions')
            encoded = EncodedPrefix(request, (0,), answer.cache, answer.runs)
            return chunk, self._runner.report(
                encoded,
                DenoisedChunk(chunk.normalised, {}),
                observation.stamps_ns,
                ticks=answer.ticks,
                answers_per_s=answer.answers_per_s,
            )

        if settings.pipeline == 'packed' and self._packed is not None:
            self._pipeline.drain()
            self.turn_to(observation.instruction)
            future = self._packed.submit(request, finish_packed)
        elif settings.pipeline == 'throughput':
            self._drain_packed()
            self._overlapped = True
            future = self._pipeline.submit(request, finish, on_step)
        else:
            future = Future()
            future.set_result(finish(*self._run(request, on_step)))
        self._own.number = number + 1
        return future

    def _settled(self, settings: PolicySettings | None) -> PolicySettings:
        """Return the settings of an inference, checked; None: those in force."""
        if settings is None:
            return self._settings
        if settings != self._checked:
            self.check(settings)
            self._checked = settings
        return settings

    def open_session(self) -> Session:
        """Let one more robot use this policy: with a prefix cache and inference numbers of its own.

        Raises:
            ValueError: the device has no memory for it; the other sessions go on.
        """
        self._require_open()
        session = Session(self._free_caches.pop() if self._free_caches else self._make_cache())
        self._sessions.add(session)
        return session

    def _make_cache(self) -> PrefixCache:
        place = self._engine.open_session()
        return PrefixCache(self._engine, self.spec.camera_names, place)

    @property
    def session_bytes(self) -> int:
        """Memory on the device that each session takes beside the policy's own."""
        return self._engine.session_bytes

    def close_session(self, session: Session) -> None:
        """Give a session's memory to the next one; ValueError where it is not open here."""
        if session is self._own:
            raise ValueError("the policy's own session stays open; reset it instead")
        self._require_session(session)
        self._sessions.remove(session)
        session.reset()
        self._free_caches.append(session.cache)

    def _require_session(self, session: Session) -> None:
        if session not in self._sessions:
            raise ValueError('this session is closed, or of another policy: open one here')

    def infer_batch(self, requests: Sequence[Request]) -> list[Inference]:
        """As `submit_batch`; return the chunks in order, or raise the first error."""
        return [future.result() for future in self.submit_batch(requests)]

    def submit_batch(self, requests: Sequence[Request]) -> list[Future[Inference]]:
        """Run inferences of several sessions together, at most one of each.

        Each is encoded as it would be alone, or found in its session's cache. Then the denoise
        steps of those with the same schedule and number of prompt rows run as rows of one pass,
        where the engine has the feature `together`; others run one after the other. Every chunk is
        the one that its request has alone: in float32 on a CPU bit for bit, else within rounding.
        Pipelines are those of single inferences: here all run as with `latency`.

        Returns:
            a future of each request, done; an error is in the future of its own request.

        Raises:
            ValueError: this policy was closed, a session is not open here, or has two requests.
        """
        self._require_open()
        sessions = [request.session or self._own for request in requests]
        for session in sessions:
            self._require_session(session)
        if len({id(session) for session in sessions}) < len(sessions):
            raise ValueError('a batch has two requests of one session: put them in two batches')
        self._settle()
        futures: list[Future[Inference]] = [Future() for _ in requests]
        encoded: dict[int, EncodedPrefix] = {}
        for index, (request, session) in enumerate(zip(requests, sessions, strict=True)):
            with _failing(futures[index]):
                number = session.number if request.number is None else request.number
                settings = self._settled(request.settings)
                if settings.pipeline != 'latency':
                    settings = replace(settings, pipeline='latency')
                built = self._builder.build(
                    request.observation,
                    settings,
                    number,
                    plan=request.plan,
                    noise=request.noise,
                )
                encoded[index] = self._runner.encode(built, cache=session.cache)
        places = list(encoded)
        for group in self._runner.group([encoded[index] for index in places]):
            members = [places[one] for one in group]
            for index in members:
                encoded[index].request.clock.mark('wait')
            with _failing(*(futures[index] for index in members)):
                denoised = self._runner.denoise_together([encoded[index] for index in members])
                for index, one in zip(members, denoised, strict=True):
                    with _failing(futures[index]):
                        futures[index].set_result(
                            self._finish(encoded[index], one, requests[index].observation)
                        )
                        sessions[index].number = encoded[index].request.number + 1
        return futures

    def _finish(
        self,
        encoded: EncodedPrefix,
        denoised: DenoisedChunk,
        observation: Observation,
        overlap_ms: float = 0.0,
    ) -> Inference:
        chunk = self._codec.actions(denoised.chunk, observation)
        encoded.request.clock.mark('actions')
        report = self._runner.report(encoded, denoised, observation.stamps_ns, overlap_ms)
        return chunk, report

    def open_requests(self, settings: PolicySettings) -> int:
        """Return how many open inferences `submit` should have for the most chunks a second."""
        if settings.pipeline == 'packed':
            return token_dims(self.spec.dims).answer_length
        return settings.networks_at_once

    @property
    def has_room(self) -> bool:
        """True when `submit` would begin at once."""
        packed = self._packed is None or self._packed.has_room
        return packed and self._pipeline.has_room

    def turn_to(self, instruction: str) -> None:
        """Drop packed inferences that are open for another instruction, as `submit` does.

        Their futures raise `DroppedError` before this returns, the oldest first.
        """
        if self._packed is not None and self.reads_instruction:
            self._packed.turn_to(instruction)

    def drain(self) -> None:
        """Wait until every submitted inference is done."""
        self._pipeline.drain()
        self._drain_packed()

    def _drain_packed(self) -> None:
        if self._packed is not None:
            self._packed.drain()

    def _packed_pipeline(self, engine: PolicyEngine) -> PackedPipeline[Inference] | None:
        decoder = self._codec.answer_decoder
        if decoder is None or 'packed' not in engine.features:
            return None
        length = token_dims(self.spec.dims).answer_length
        packed = cast(PackedEngine, engine)
        return PackedPipeline(packed, self._runner.cache, length, decoder.end)

    def _run(
        self,
        request: ChunkRequest,
        on_step: StepObserver | None = None,
        held: tuple[PrefixSlot, ...] = (),
    ) -> tuple[EncodedPrefix, DenoisedChunk]:
        """Encode, then denoise; the slots in `held` are not written."""
        self._settle()
        encoded = self._runner.encode(request, held)
        return encoded, self._runner.denoise(encoded, on_step)

    def _settle(self) -> None:
        """Wait for what other pipelines have open, and forget what only they can read."""
        self.drain()
        if self._overlapped:
            self._overlapped = False
            self._runner.cache.clear()

    def _run_black(self, request: ChunkRequest, held: tuple[PrefixSlot, ...]) -> None:
        """Run a warm-up's request; nothing from before or of it is in the cache afterwards."""
        self._runner.cache.clear()
        try:
            # Not decoded: a state of zeros is not a valid pose for relative actions.
            _, denoised = self._run(request, held=held)
            require_finite(denoised.chunk)
        finally:
            self._runner.cache.clear()

    def reset(self) -> None:
        """Begin a new episode: inference numbers start at 0 again, nothing cached survives.

        Packed requests that are open are dropped.
        """
        self._pipeline.drain()
        if self._packed is not None:
            self._packed.flush('a new episode began')
        self._own.reset()

    def is_prepared(self, settings: PolicySettings) -> bool:
        """Return whether an inference with these settings would begin without preparation.

        True on an engine without CUDA graphs, and where it has all that these settings need,
        whatever they were captured for.
        """
        return self._preparation.is_done(settings) and self._packed_to_warm(settings) is None

    def prepare(self, settings: PolicySettings) -> bool:
        """Capture one of the CUDA graphs that these settings lack; they are not put in force.

        Inferences with other settings may come between two calls, so none waits for more than one
        capture. Those of packed requests, with a new prompt and without, come together.

        True where none is missing. Raises ValueError as `warm_up` does.
        """
        self._require_open()
        self.check(settings)
        if not self._preparation.is_done(settings):
            done = self._preparation.capture_next_graph(settings)
            return done and self._packed_to_warm(settings) is None
        if (packed := self._packed_to_warm(settings)) is not None:
            self.drain()
            self._preparation.run_with(packed.warm_up, settings)
        return True

    def _packed_to_warm(self, settings: PolicySettings) -> PackedPipeline[Inference] | None:
        """Return the pipeline of packed requests where these settings need it and it is cold."""
        packed = self._packed if settings.pipeline == 'packed' else None
        return None if packed is None or packed.is_warm else packed

    def warm_up(self) -> float:
        """Infer on a black image, so that the first real inference is not slow.

        Captures the CUDA graphs of the settings in force, with and without guidance and plan. Does
        not count as an inference. Returns milliseconds.

        Raises:
            ValueError: this policy was closed, cannot run with these settings, or returned a
                number that is not finite.
        """
        self._require_open()
        self.check(self._settings)
        start = perf_counter()
        self._preparation.run_all(self._settings)
        if self._settings.pipeline == 'packed' and self._packed is not None:
            self._preparation.run_with(self._packed.warm_up, self._settings)
        return (perf_counter() - start) * 1e3

    def close(self) -> None:
        """Free the engine's memory; an inference or a warm-up afterwards is a ValueError."""
        self._closed = True
        self._pipeline.close()
        if self._packed is not None:
            self._packed.close()
        self._engine.close()

    def _require_open(self) -> None:
        if self._closed:
            raise ValueError('this policy was closed; load it again')


def _check_recorded(folder: Path, policy: Policy) -> None:
    """Close a policy that does not give its bundle's recorded chunks; raise ValueError."""
    with close_on_error(policy.close):
        rounds = find_family(policy.spec.family).rounds_activations
        check_recorded_cases(policy._engine, folder, judged_as(policy.precision, rounds))


@contextmanager
def _failing(*futures: Future[Inference]) -> Iterator[None]:
    """Hand an error to those of the futures that are not done."""
    try:
        yield
    except Exception as error:
        for future in futures:
            if not future.done():
                future.set_exception(error)
