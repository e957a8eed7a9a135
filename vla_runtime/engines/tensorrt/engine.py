"""The TensorRT backend: vision, prefix and expert engines over one stream, replayed as CUDA graphs.

Imports tensorrt, cuda-bindings and numpy alone. All buffers are allocated at load, those of another
number of denoise steps when it is first set. The N steps of a chunk are one graph, prefix and
vision one each; they are captured and checked at load, the denoise loop first, so that where memory
runs short it is the prefix that runs without. All engines share one block of scratch memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from vla_runtime.bundle.onnx_files import TEXT_INPUT
from vla_runtime.bundle.onnx_files import Network as NetworkName
from vla_runtime.engines.closing import close_all
from vla_runtime.engines.cuda_driver import CudaError
from vla_runtime.engines.cuda_runtime import CudaRuntime, Graph, device_index
from vla_runtime.engines.graphed_work import GraphedWork, Work
from vla_runtime.engines.protocol import (
    FEATURES,
    SLOTS,
    DenoiseLoop,
    Feature,
    StepInputs,
    count_rows,
    input_named,
)
from vla_runtime.engines.schedules import Schedules, schedule_key
from vla_runtime.engines.tensorrt.adapter import Network, TensorInfo, TensorRTError, import_tensorrt
from vla_runtime.engines.tensorrt.buffers import (
    DeviceArray,
    PrefixSlot,
    RowBuffers,
    Schedule,
    check_tensors,
)
from vla_runtime.engines.tensorrt.loading import (
    check_memory,
    check_one_image_size,
    check_precision,
    closed_on_failure,
    load_networks,
)
from vla_runtime.engines.tensorrt.rtx import CompiledKernels
from vla_runtime.engines.tensorrt.store import COMPILED, find_engines, network_name
from vla_runtime.engines.token_embedding import TokenEmbedding
from vla_runtime.family.declaration import Family, PolicyDims, TimeTable, language_dims
from vla_runtime.family.listing import find_family, read_time_table
from vla_runtime.family.step_schedule import StepSchedule, scheduler_steps, step_rows

# --- Inputs that each network is tried on at load (see `graphed_work.Probe`)


class VisionProbe:
    """Random pixels."""

    def __init__(self, pixels: DeviceArray, encoded: DeviceArray) -> None:
        self._pixels, self._encoded = pixels, encoded

    def vary(self, seed: int) -> None:
        random = np.random.default_rng(seed)
        self._pixels.write(random.uniform(-1.0, 1.0, self._pixels.shape))

    def outputs(self) -> np.ndarray:
        return self._encoded.read().ravel()


class PrefixProbe:
    """Random image tokens and prompts, nothing masked."""

    def __init__(
        self, vocabulary: int, image_tokens: DeviceArray, buffers: RowBuffers, slot: PrefixSlot
    ) -> None:
        self._vocabulary = vocabulary
        self._image_tokens, self._buffers, self._slot = image_tokens, buffers, slot

    def vary(self, seed: int) -> None:
        random = np.random.default_rng(seed)
        self._image_tokens.draw(random)
        for array in self._buffers.prefix_inputs.values():
            if np.dtype(array.dtype).kind == 'i':
                array.write(random.integers(0, self._vocabulary, array.shape))
            else:
                array.draw(random)

    def outputs(self) -> np.ndarray:
        floats = [array for array in self._slot.arrays.values() if array.dtype != 'bool']
        return np.concatenate([array.read().ravel() for array in floats])


class StepsProbe:
    """Random noise, from the buffer `noise` to the buffer `x`, and at load random keys and values.

    `prefix` is the slot to fill; None keeps the encoded prefix.
    """

    def __init__(
        self, noise: DeviceArray, x: DeviceArray, buffers: RowBuffers, prefix: PrefixSlot | None
    ) -> None:
        self._noise, self._x, self._buffers, self._prefix = noise, x, buffers, prefix

    def vary(self, seed: int) -> None:
        random = np.random.default_rng(seed)
        self._noise.draw(random)
        if self._prefix is None:
            return
        for array in self._prefix.arrays.values():
            array.draw(random)
        rows = self._buffers.row_weight.shape[0]
        self._buffers.row_weight.write(np.full(rows, 1.0 / rows, np.float32))
        for array in self._buffers.head_inputs.values():
            array.draw(random)

    def outputs(self) -> np.ndarray:
        return np.concatenate([self._x.read().ravel(), self._buffers.velocity.read().ravel()])


# --- CUDA graphs without PyTorch: capture several, keep the fastest, or report why not


logger = logging.getLogger(__name__)

# A graph's time is the fastest of this many replays.
_TIMED_REPLAYS = 3


class GraphCapturer:
    """Captures the work of one network; see `graphed_work.Capturer`.

    `captures` is the number of captures, of which the fastest graph is kept; 0 never captures.
    """

    def __init__(self, name: str, runtime: CudaRuntime, captures: int) -> None:
        self.name = name
        self.runtime = runtime
        self._captures = captures
        self.status = 'eager'

    @property
    def active(self) -> bool:
        return self._captures > 0

    def capture(self, work: Work, once: bool = False) -> Graph | None:
        if not self.active:
            return None
        best: Graph | None = None
        try:
            work()
            self.runtime.synchronize()
            if once or self._captures == 1:
                return self.runtime.capture(work)
            fastest = 0.0
            for _ in range(self._captures):
                graph = self.runtime.capture(work)
                try:
                    seconds = self._time(graph)
                except BaseException:
                    self.runtime.destroy(graph)
                    raise
                slower: Graph | None = graph
                if best is None or seconds < fastest:
                    slower, best, fastest = best, graph, seconds
                if slower is not None:
                    self.runtime.destroy(slower)
        except (CudaError, TensorRTError) as error:
            if best is not None:
                # A later capture failed, as a rule for lack of memory; the earlier graph is good.
                return best
            short = isinstance(error, CudaError) and error.out_of_memory
            self.give_up('out of memory while capturing' if short else 'failed while capturing')
            logger.warning('%s', error)
        return best

    def give_up(self, reason: str) -> None:
        self._captures = 0
        self.status = f'eager: {reason}'
        logger.warning(
            'The %s network runs without a CUDA graph from now on (%s): same results, slower.',
            self.name,
            reason,
        )

    def launch(self, graph: Graph) -> None:
        self.runtime.launch(graph)

    def destroy(self, graph: Graph) -> None:
        self.runtime.destroy(graph)

    def _time(self, graph: Graph) -> float:
        def replay() -> None:
            self.launch(graph)

        replay()
        return min(self.runtime.milliseconds(replay) for _ in range(_TIMED_REPLAYS))


# --------------------------------------------------------------------------------------------------

Tensors = Mapping[str, TensorInfo]


class TensorRTEngine:
    """Vision, prefix and expert engines of one policy (see `protocol.PolicyEngine`).

    Args:
        networks: networks of the loaded engines, by `store.network_name`.
        captures: number of captures of each graph, of which the fastest is kept; 0 for no graphs.
        token_embedding: needed where the prefix engine takes rows of it.

    Raises:
        ValueError: engines whose inputs and outputs are not those of these dimensions.
        CudaError: not enough memory for the buffers.
    """

    backend = 'tensorrt'
    features: frozenset[Feature] = FEATURES[backend]

    def __init__(
        self,
        family: Family,
        dims: PolicyDims,
        runtime: CudaRuntime,
        networks: Mapping[str, Network],
        time_table: TimeTable,
        *,
        max_rows: int = 2,
        captures: int = 3,
        token_embedding: TokenEmbedding | None = None,
    ) -> None:
        self.dims, self.max_rows, self._family = dims, max_rows, family
        self._runtime, self._networks, self._time_table = runtime, networks, time_table
        self._token_embedding = token_embedding
        tensors = {name: network.tensors for name, network in networks.items()}
        check_tensors(family, dims, time_table.width, tensors)
        self._capturers = {
            name: GraphCapturer(name, runtime, captures) for name in ('vision', 'prefix', 'denoise')
        }
        # One block for all: they run one after the other on one stream.
        scratch = max(network.scratch_bytes for network in networks.values())
        address = runtime.allocate(scratch)
        for network in networks.values():
            network.use_scratch(address, scratch)
        vision, prefix = networks['vision'].tensors, networks['prefix'].tensors
        self._pixels = DeviceArray.of(runtime, vision['pixels'])
        self._encoded = DeviceArray.of(runtime, vision['image_tokens'])
        self._image_tokens = DeviceArray.of(runtime, prefix['image_tokens'])
        self._image_mask = DeviceArray.of(runtime, prefix['image_mask'])
        self._rows, self._slot = 1, 0
        self._schedules: Schedules[Schedule] = Schedules(Schedule.close)
        self._buffers = {
            rows: self._row_buffers(
                networks[network_name('prefix', rows)].tensors,
                networks[network_name('expert', rows)].tensors,
            )
            for rows in range(1, max_rows + 1)
        }
        self._make_head(networks['expert'].tensors)
        self._vision = self._graphed('vision', self._run_vision)
        self._prefix = {
            place: self._graphed('prefix', partial(self._run_prefix, *place))
            for place in self._places
        }

    def _row_buffers(self, prefix: Tensors, expert: Tensors) -> Any:
        inputs = list(self._family.prefix_inputs(self.dims))
        return RowBuffers(self._runtime, prefix, expert, inputs, SLOTS)

    def _make_head(self, expert: Tensors) -> None:
        self._noise = DeviceArray.of(self._runtime, expert['x'])
        # Steps read one and write the other.
        self._x = tuple(DeviceArray.of(self._runtime, expert['x']) for _ in range(2))
        self._current = 0
        self._plan = DeviceArray.of(self._runtime, expert['plan'])

    @classmethod
    def load(
        cls,
        bundle: Path,
        family: str,
        dims: PolicyDims,
        *,
        files: Mapping[str, str],
        device: str,
        precision: str,
        max_rows: int,
        denoise_steps: int,
        use_cuda_graphs: bool,
        passed: bool = True,
    ) -> TensorRTEngine:
        """Load the engines that were built for this GPU and this TensorRT, and try them.

        Args:
            files: SHA-256 of the bundle's files by name, as in its policy.yaml.
            precision: precision that the engines must have been built in.
            max_rows: most prompt rows that will be asked for; less where engines were built for
                less (`vla_runtime build --rows 1`).
            denoise_steps: number whose graphs are captured now rather than when first used.
            passed: refuse engines that have not passed the comparison with the bundle's recorded
                cases; False for that comparison itself.

        Raises:
            ValueError: no TensorRT, no cuda-bindings or no CUDA device here; no engines for this
                GPU and version, or damaged ones, or of other ONNX files; another precision; not
                enough memory; engines that ignore their inputs.
        """
        check_one_image_size(dims)
        index = device_index(device)
        adapter = import_tensorrt()
        networks: dict[str, Network] = {}
        # The runtime before any call into TensorRT, which crashes on a machine without a driver.
        with closed_on_failure(index, networks, device, bundle) as runtime:
            folder, metadata = find_engines(
                bundle, runtime.info, adapter.version, files, rtx=adapter.is_rtx, passed=passed
            )
            # Engines built for one row run guidance row by row (`cfg_mode`).
            max_rows = min(max_rows, metadata.rows)
            check_precision(bundle, metadata, precision)
            check_memory(runtime, metadata, device)
            compiled = CompiledKernels(folder / COMPILED) if adapter.is_rtx else None
            networks |= load_networks(
                adapter, runtime, folder, metadata, max_rows, bundle, compiled
            )
            engine = cls(
                find_family(family),
                dims,
                runtime,
                networks,
                read_time_table(family, dims, bundle / 'weights.safetensors'),
                max_rows=max_rows,
                captures=metadata.captures if use_cuda_graphs else 0,
                token_embedding=_token_embedding(bundle, precision, networks['prefix']),
            )
            engine.prepare(denoise_steps)
            if compiled is not None:
                compiled.save()
        return engine

    @property
    def cuda_graph(self) -> Mapping[str, str]:
        place = (self._rows, self._slot)
        schedule = self._schedules.current
        denoise = schedule.denoise.get(place) if schedule else None
        return {
            'vision': self._vision.status,
            'prefix': self._prefix[place].status,
            'denoise': denoise.status if denoise else self._capturers['denoise'].status,
        }

    def prepare(self, denoise_steps: int) -> None:
        """Try every network on two inputs, and capture its graph; leaves the buffers empty.

        The denoise loop is captured for `denoise_steps`.

        Raises:
            ValueError: a network that ignores its inputs or whose numbers are not finite.
        """
        self._prepare_head(denoise_steps)
        # Only a prompt has integers.
        vocabulary = language_dims(self.dims).vocabulary if self._family.has_language else 0
        prefix_probe = partial(PrefixProbe, vocabulary, self._image_tokens)
        for rows, slot in self._places:
            buffers = self._buffers[rows]
            self._image_mask.write(np.ones(self.dims.cameras, bool))
            self._prefix[rows, slot].prepare(prefix_probe(buffers, buffers.slots[slot]))
        self._vision.prepare(VisionProbe(self._pixels, self._encoded))
        self._image_tokens.write(np.zeros(self._image_tokens.shape, np.float32))

    def _prepare_head(self, denoise_steps: int) -> None:
        if self._family.has_scheduler:
            schedule = scheduler_steps(self.dims, denoise_steps)
        else:
            times = 1.0 - np.arange(denoise_steps) / denoise_steps
            schedule = StepSchedule(times, -1.0 / denoise_steps)
        self.set_schedule(*schedule)
        for place in self._places:
            self._denoise(place).prepare(self._steps_probe(place, vary_prefix=True))

    def captures(self, loop: DenoiseLoop) -> bool:
        # Vision and every prefix were captured at load.
        if loop.alone or not self._capturers['denoise'].active:
            return False
        works = (
            schedule.denoise.get((loop.rows, loop.slot))
            for schedule in self._schedules.kept
            if schedule.steps == loop.steps
        )
        return not any(work is not None and work.prepared for work in works)

    def set_schedule(self, times: np.ndarray, dt: float, updates: np.ndarray | None = None) -> None:
        steps, key = len(times), schedule_key(times, dt, updates)
        # By their number alone: other times refill the buffers, and the graphs stay.
        width = self._networks['expert'].tensors['time_conditioning'].shape[-1]
        schedule = self._schedules.use(
            steps,
            lambda: Schedule(self._runtime, steps, width, self.dims, updates is not None),
        )
        if schedule.key != key:
            rows = step_rows(self._time_table, self.dims, times, dt)
            schedule.load(key, rows, times, dt, updates)

    def encode_image(self, place: int, pixels: np.ndarray) -> None:
        self._pixels.write(pixels)
        self._vision()
        size = self._encoded.size
        address = self._image_tokens.address + place * size
        self._runtime.copy(address, self._encoded.address, size)

    def encode_prefix(
        self, image_mask: np.ndarray, rows: Mapping[str, np.ndarray], slot: int = 0
    ) -> None:
        count = count_rows(rows)
        if self._token_embedding is not None:
            rows = self._token_embedding.replace_tokens(rows)
        self._image_mask.write(image_mask)
        for name, array in self._buffers[count].prefix_inputs.items():
            array.write(input_named(name, rows))
        self._prefix[count, slot]()

    def use_prefix(self, rows: int, slot: int = 0) -> None:
        self._rows, self._slot = rows, slot

    def load_step_inputs(self, inputs: StepInputs) -> None:
        if inputs.jacobian or inputs.clean_actions:
            raise ValueError(
                "backend 'tensorrt' denoises one chunk at a time, tied to a plan without a "
                'Jacobian and with one flow time for all actions'
            )
        schedule, buffers = self._schedules.require(), self._buffers[self._rows]
        self._noise.write(inputs.x)
        self.write_x(inputs.x)
        self._plan.write(inputs.plan)
        schedule.plan_weight.write(inputs.plan_weight)
        schedule.write_noise(inputs.step_noise)
        buffers.row_weight.write(inputs.row_weight)
        for name, array in buffers.head_inputs.items():
            array.write(input_named(name, inputs.rows))

    def step(self, index: int) -> None:
        place = (self._rows, self._slot)
        self._run_step(self._schedules.require(), place, index, self._current)
        self._current = 1 - self._current

    def run_steps(self) -> None:
        place, schedule = (self._rows, self._slot), self._schedules.require()
        work = self._denoise(place)
        if self._capturers['denoise'].active and not work.prepared:
            # The trial overwrites the noise, so the loaded noise is put back.
            noise = self._noise.read()
            work.prepare(self._steps_probe(place, vary_prefix=False), once=True)
            self._noise.write(noise)
        work()
        self._current = schedule.steps % 2

    def read_x(self) -> np.ndarray:
        return self._x[self._current].read()[0]

    def write_x(self, x: np.ndarray) -> None:
        self._x[self._current].write(x)

    def read_velocity(self) -> np.ndarray:
        return self._buffers[self._rows].velocity.read()

    def read_image_tokens(self) -> np.ndarray:
        """A copy of all cameras' image tokens, (V, N, W) float32, for receipts."""
        return self._image_tokens.read()

    def read_prefix(self) -> dict[str, np.ndarray]:
        """Return a copy of the selected prefix: keys, values (float32) and mask, for receipts."""
        arrays = self._buffers[self._rows].slots[self._slot].arrays
        return {name: array.read() for name, array in arrays.items()}

    def synchronize(self) -> None:
        self._runtime.synchronize()

    def close(self) -> None:
        # Graphs first: they replay on the addresses of everything below.
        close_all(
            (
                self._schedules.clear,
                *(work.close for work in self._works),
                *(network.close for network in self._networks.values()),
                self._runtime.close,
            )
        )

    @property
    def _works(self) -> tuple[GraphedWork, ...]:
        """Work whose graphs are kept until the end; a schedule keeps its own."""
        return (self._vision, *self._prefix.values())

    @property
    def _places(self) -> list[tuple[int, int]]:
        return [(rows, slot) for rows in self._buffers for slot in range(SLOTS)]

    def _graphed(self, network: str, work: Callable[[], None]) -> GraphedWork:
        return GraphedWork(work, self._capturers[network])

    def _denoise(self, place: tuple[int, int]) -> GraphedWork:
        schedule = self._schedules.require()
        if place not in schedule.denoise:
            work = partial(self._run_steps, schedule, place)
            schedule.denoise[place] = self._graphed('denoise', work)
        return schedule.denoise[place]

    def _steps_probe(self, place: tuple[int, int], vary_prefix: bool) -> StepsProbe:
        rows, slot = place
        buffers, schedule = self._buffers[rows], self._schedules.require()
        prefix = buffers.slots[slot] if vary_prefix else None
        return StepsProbe(self._noise, self._x[schedule.steps % 2], buffers, prefix)

    def _run(self, network: NetworkName, rows: int, addresses: dict[str, int]) -> None:
        engine = self._networks[network_name(network, rows)]
        engine.bind(addresses)
        self._runtime.activate()
        engine.enqueue(self._runtime.stream)

    def _run_vision(self) -> None:
        addresses = {'pixels': self._pixels.address, 'image_tokens': self._encoded.address}
        self._run('vision', 1, addresses)

    def _run_prefix(self, rows: int, slot: int) -> None:
        buffers = self._buffers[rows]
        addresses = {
            'image_tokens': self._image_tokens.address,
            'image_mask': self._image_mask.address,
            **{name: array.address for name, array in buffers.prefix_inputs.items()},
            **buffers.slots[slot].addresses,
        }
        self._run('prefix', rows, addresses)

    def _run_steps(self, schedule: Schedule, place: tuple[int, int]) -> None:
        # From the noise buffer, so that running twice (warm-up before a capture) changes nothing.
        self._x[0].copy_from(self._noise)
        for index in range(schedule.steps):
            self._run_step(schedule, place, index, index % 2)

    def _run_step(
        self, schedule: Schedule, place: tuple[int, int], index: int, source: int
    ) -> None:
        rows, slot = place
        buffers = self._buffers[rows]
        addresses = {
            'x': self._x[source].address,
            'x_next': self._x[1 - source].address,
            'velocity': buffers.velocity.address,
            'time_conditioning': schedule.table.address(index),
            **schedule.moves(index),
            'row_weight': buffers.row_weight.address,
            'plan': self._plan.address,
            'plan_weight': schedule.plan_weight.address(index),
            **buffers.slots[slot].addresses,
            **{name: array.address for name, array in buffers.head_inputs.items()},
        }
        self._run('expert', rows, addresses)


def _token_embedding(bundle: Path, precision: str, prefix: Network) -> TokenEmbedding | None:
    """Open the text table where the prefix engine takes rows of it."""
    return TokenEmbedding.of(bundle, precision) if TEXT_INPUT in prefix.tensors else None
