"""`Policy`: observation in, action chunk out. The one entry that nodes, tools and tests call.

Invariants:
- Same observation, settings, inference number and plan: same chunk, bit for bit.
- An observation that is refused changes nothing: the next good one gives the chunk that it would
  have given anyway.
- Settings take effect at the next inference, never within one.
- One thread at a time calls `infer`; any thread may read or replace `settings`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from time import monotonic, perf_counter

import numpy as np

from vla_runtime.bundle import Bundle, BundleSpec, read_bundle
from vla_runtime.encoding import PolicyCodec
from vla_runtime.engines.engine import PolicyEngine, StepInputs
from vla_runtime.engines.loading import load_engine
from vla_runtime.inference.denoise import StepObserver, denoise, flow_times
from vla_runtime.inference.guidance import row_weights
from vla_runtime.inference.noise import chunk_noise
from vla_runtime.inference.prefix_cache import PrefixCache, PrefixInputs
from vla_runtime.inference.real_time_chunking import plan_weights
from vla_runtime.settings import PolicySettings
from vla_runtime.types import (
    ActionChunk,
    Advantage,
    CommittedPlan,
    InferenceReport,
    Observation,
)


class Policy:
    """A policy bundle on an engine, ready to infer.

    Args:
        bundle: the checked bundle.
        engine: its networks, loaded.
        settings: live settings to begin with.
    """

    def __init__(
        self, bundle: Bundle, engine: PolicyEngine, settings: PolicySettings | None = None
    ) -> None:
        self.spec: BundleSpec = bundle.spec
        self._engine = engine
        self._codec = PolicyCodec(bundle)
        self._cache = PrefixCache(engine, bundle.spec.camera_names)
        self._number = 0
        self._closed = False
        self._settings = PolicySettings()
        self.settings = settings or PolicySettings()

    @classmethod
    def load(
        cls,
        bundle: str | Path,
        backend: str = 'torch',
        device: str = 'cpu',
        *,
        precision: str = 'float32',
        settings: PolicySettings | None = None,
        use_cuda_graphs: bool = True,
        verify: bool = True,
    ) -> Policy:
        """Read a bundle and load its networks.

        Args:
            bundle: the bundle's folder.
            backend: `torch`.
            device: `cpu`, `cuda` or `cuda:N`.
            precision: `float32`, `bfloat16` or `float16` for the large matrices.
            settings: live settings to begin with.
            use_cuda_graphs: on CUDA, replay captured graphs (same results, less launch time).
            verify: compare every file of the bundle with its SHA-256 first.

        Raises:
            BundleError: the bundle is not what it says.
            ValueError: backend, device or precision that is not to be had here.
        """
        checked = read_bundle(bundle, verify=verify)
        engine = load_engine(
            checked,
            backend,
            device,
            precision=precision,
            # Guidance needs a second prompt row, and only policies with a tag can be guided.
            max_rows=2 if checked.spec.prompt.advantage else 1,
            use_cuda_graphs=use_cuda_graphs,
        )
        return cls(checked, engine, settings)

    @property
    def settings(self) -> PolicySettings:
        return self._settings

    @settings.setter
    def settings(self, settings: PolicySettings) -> None:
        """Replace the live settings.

        Raises:
            ValueError: guidance for a policy without advantage tags; the old settings stay.
        """
        if settings.cfg_enabled and self.spec.prompt.advantage is None:
            raise ValueError(
                f"cfg_enabled: policy '{self.spec.name}' was trained without advantage tags "
                '(policy.yaml: prompt.advantage is not set), so there is nothing to guide with'
            )
        self._settings = settings

    def infer(
        self,
        observation: Observation,
        *,
        plan: CommittedPlan | None = None,
        noise: np.ndarray | None = None,
        on_step: StepObserver | None = None,
    ) -> tuple[ActionChunk, InferenceReport]:
        """Turn an observation into an action chunk.

        Args:
            observation: one look at the robot.
            plan: what the executor will still execute; the chunk is tied to it.
            noise: (H, A) float32 to denoise from; otherwise made from seed and inference number.
            on_step: records every denoise step; runs them one by one.

        Raises:
            ValueError: anything that does not fit the bundle; nothing has changed then.
        """
        normalised, report, clock = self._denoise(
            observation, self._settings, self._number, plan=plan, noise=noise, on_step=on_step
        )
        chunk = self._codec.actions(normalised, observation)
        clock.mark('actions')
        self._number += 1
        return chunk, replace(report, milliseconds=clock.milliseconds())

    def _denoise(
        self,
        observation: Observation,
        settings: PolicySettings,
        number: int,
        *,
        plan: CommittedPlan | None = None,
        noise: np.ndarray | None = None,
        on_step: StepObserver | None = None,
    ) -> tuple[np.ndarray, InferenceReport, _PhaseClock]:
        """The chunk in normalised actions, (H, A), its report and the clock of its phases."""
        if self._closed:
            raise ValueError('this policy was closed; load it again')
        clock = _PhaseClock()
        self._codec.check(observation)
        noise = self._noise(noise, settings, number)
        advantages = self._advantages(settings)
        times = flow_times(settings.denoise_steps or self.spec.denoise_steps)
        normalised_plan, plan_weight = self._plan(plan, observation, times, settings)
        tokens, token_mask = self._codec.tokens(observation, advantages)
        clock.mark('tokens')
        images = self._codec.images(observation)
        clock.mark('images')

        prefix = PrefixInputs(
            pixels=images.pixels,
            image_mask=images.mask,
            tokens=tokens,
            token_mask=token_mask,
            words=(observation.instruction, advantages),
            state_bins=self._codec.state_bins(observation),
            time_s=_time_s(observation),
        )
        vision = self._cache.encode_images(prefix, settings.cache)
        self._engine.synchronize()
        clock.mark('vision')
        cache = {'vision': vision, 'prefix': self._cache.encode_prefix(prefix, settings.cache)}
        self._engine.synchronize()
        clock.mark('prefix')
        self._engine.set_schedule(times, dt=-1.0 / len(times))
        inputs = StepInputs(
            x=noise,
            row_weight=row_weights(settings.cfg_beta if len(advantages) == 2 else None),
            plan=normalised_plan,
            plan_weight=plan_weight,
            state=self._codec.padded_state(observation, len(advantages)),
        )
        normalised = denoise(self._engine, inputs, on_step)
        clock.mark('denoise')
        report = InferenceReport(
            number=number,
            seed=settings.seed,
            milliseconds={},
            cache=cache,
            beta=settings.cfg_beta if settings.cfg_enabled else 1.0,
            denoise_steps=len(times),
            tokens=tuple(int(count) for count in token_mask.sum(axis=1)),
            cuda_graph=dict(self._engine.cuda_graph),
            noise=noise,
            stamps_ns=dict(observation.stamps_ns),
        )
        return normalised, report, clock

    def reset(self) -> None:
        """Begin a new episode: inference numbers start at 0 again, nothing cached survives."""
        self._number = 0
        self._cache.clear()

    def warm_up(self) -> float:
        """Infer once on a black image, so that the first real inference is not the slow one.

        Captures the CUDA graphs. Counts as no inference.

        Returns:
            milliseconds that it took
        """
        size = self.spec.dims.vision.image_size
        black = np.zeros((size, size, 3), dtype=np.uint8)
        observation = Observation(
            images={camera.name: black for camera in self.spec.cameras if camera.present},
            state=np.zeros(len(self.spec.state), dtype=np.float32),
            instruction='warm up',
        )
        start = perf_counter()
        for rows in range(1, self._engine.max_rows + 1):
            settings = replace(self._settings, cfg_enabled=rows == 2, cfg_beta=2.0)
            # Not decoded: a state of zeros is no pose that actions could be relative to.
            self._denoise(observation, settings, number=0)
        self._cache.clear()
        return (perf_counter() - start) * 1e3

    def close(self) -> None:
        """Free the engine's memory; an inference afterwards is a ValueError."""
        self._closed = True
        self._engine.close()

    def _advantages(self, settings: PolicySettings) -> tuple[Advantage | None, ...]:
        if self.spec.prompt.advantage is None:
            return (None,)
        # At beta = 1 the unconditioned row has weight zero: running the conditioned one alone is
        # the same chunk, exactly, at half the cost.
        guided = settings.cfg_enabled and settings.cfg_beta != 1.0
        return (settings.advantage, None) if guided else (settings.advantage,)

    def _noise(self, noise: np.ndarray | None, settings: PolicySettings, number: int) -> np.ndarray:
        shape = (self.spec.dims.horizon, self.spec.dims.action_dim)
        if noise is None:
            return chunk_noise(settings.seed, number, shape)
        given = np.asarray(noise)
        if given.shape != shape or given.dtype.kind not in 'fiu' or not np.isfinite(given).all():
            raise ValueError(
                f'noise: expected finite real numbers of shape {shape} (horizon, padded action '
                f'dimension), got {given.dtype} of shape {given.shape}'
            )
        # A copy: the report keeps it, and the caller may go on with the array.
        return np.array(given, dtype=np.float32, order='C')

    def _plan(
        self,
        plan: CommittedPlan | None,
        observation: Observation,
        times: np.ndarray,
        settings: PolicySettings,
    ) -> tuple[np.ndarray, np.ndarray]:
        """The plan (H, A) and its weight (N, H), both zero without a plan."""
        dims = self.spec.dims
        if plan is None:
            return (
                np.zeros((dims.horizon, dims.action_dim), dtype=np.float32),
                np.zeros((len(times), dims.horizon), dtype=np.float32),
            )
        normalised = self._codec.plan(plan, observation)
        weight = plan_weights(
            times,
            schedule=settings.plan_schedule,
            delay=plan.delay_steps,
            # Beyond the plan's end there is nothing to be tied to.
            execution_horizon=min(plan.execution_horizon, len(plan.actions)),
            horizon=dims.horizon,
            maximum=settings.max_guidance_weight,
        )
        return normalised, weight


def _time_s(observation: Observation) -> float:
    """When the observation was made: its newest stamp, or now where it has none."""
    stamps = observation.stamps_ns.values()
    return max(stamps) * 1e-9 if stamps else monotonic()


class _PhaseClock:
    """Wall time per phase, in milliseconds."""

    def __init__(self) -> None:
        self._start = self._last = perf_counter()
        self._phases: dict[str, float] = {}

    def mark(self, phase: str) -> None:
        """The time since the last mark belongs to `phase`."""
        now = perf_counter()
        self._phases[phase] = (now - self._last) * 1e3
        self._last = now

    def milliseconds(self) -> dict[str, float]:
        return {**self._phases, 'total': (self._last - self._start) * 1e3}
