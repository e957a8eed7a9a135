"""The TensorRT backend: vision, prefix and expert engines over one stream, replayed as CUDA graphs.

Imports tensorrt, cuda-bindings and numpy alone. All buffers are allocated at load, those of another
number of denoise steps when it is first set. The N steps of a chunk are one graph, prefix and
vision one each; they are captured and checked at load, the denoise loop first, so that where memory
runs short it is the prefix that runs without. All engines share one block of scratch memory.

A session has memory of its own and no graphs, whose captures all other sessions would wait for:
all sessions but the first share those of one slot, which a session's prefix is copied into before
its steps: some megabytes within the device. They are captured when the second session opens.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from vla_runtime.bundle.onnx_files import TEXT_INPUT
from vla_runtime.bundle.onnx_files import Network as NetworkName
from vla_runtime.engines.closing import close_all
from vla_runtime.engines.cuda_runtime import CudaRuntime, device_index
from vla_runtime.engines.graphed_work import GraphedWork
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
from vla_runtime.engines.tensorrt.adapter import Network, TensorInfo, import_tensorrt
from vla_runtime.engines.tensorrt.buffers import (
    DeviceArray,
    PrefixSlot,
    RowBuffers,
    Schedule,
    SessionMemory,
    check_tensors,
)
from vla_runtime.engines.tensorrt.cuda_graph import (
    GraphCapturer,
    PrefixProbe,
    StepsProbe,
    VisionProbe,
)
from vla_runtime.engines.tensorrt.loading import (
    check_memory,
    check_one_image_size,
    check_precision,
    closed_on_failure,
    load_networks,
    refused_where_full,
)
from vla_runtime.engines.tensorrt.rtx import CompiledKernels
from vla_runtime.engines.tensorrt.store import COMPILED, find_engines, network_name
from vla_runtime.engines.token_embedding import TokenEmbedding
from vla_runtime.family.declaration import Family, PolicyDims, TimeTable, language_dims
from vla_runtime.family.listing import find_family, read_time_table
from vla_runtime.family.step_schedule import StepSchedule, scheduler_steps, step_rows

Tensors = Mapping[str, TensorInfo]
# Slot of the graphs that all sessions but the first share.
_SHARED = -1


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
        self._sessions = [self._session_memory(range(SLOTS))]
        # What the graphs of the other sessions read and write; None before there is one.
        self._shared: SessionMemory | None = None
        self._make_head(networks['expert'].tensors)
        self._vision = self._graphed('vision', self._run_vision)
        self._prefix: dict[tuple[int, int], GraphedWork] = {}

    def _row_buffers(self, prefix: Tensors, expert: Tensors) -> Any:
        inputs = list(self._family.prefix_inputs(self.dims))
        return RowBuffers(self._runtime, prefix, expert, inputs)

    def _session_memory(self, slots: Collection[int]) -> SessionMemory:
        return SessionMemory(self._runtime, self._tokens, self._buffers, slots)

    @property
    def _tokens(self) -> TensorInfo:
        return self._networks['prefix'].tensors['image_tokens']

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
        place = self._graphs_of(self._rows, self._slot)
        schedule = self._schedules.current
        denoise = schedule.denoise.get(place) if schedule else None
        return {
            'vision': self._vision.status,
            'prefix': self._encoding(place).status,
            'denoise': denoise.status if denoise else self._capturers['denoise'].status,
        }

    def prepare(self, denoise_steps: int) -> None:
        """Try every network on two inputs, and capture its graph; leaves the buffers empty.

        The denoise loop is captured for `denoise_steps`.

        Raises:
            ValueError: a network that ignores its inputs or whose numbers are not finite.
        """
        self._begin_schedule(denoise_steps)
        self._prepare_graphs(range(SLOTS))
        self._vision.prepare(VisionProbe(self._pixels, self._encoded))
        tokens = self._sessions[0].image_tokens
        tokens.write(np.zeros(tokens.shape, np.float32))

    def _prepare_graphs(self, slots: Collection[int]) -> None:
        """Try head and prefix of all numbers of rows over these slots, and capture their graphs."""
        places = [(rows, slot) for rows in self._buffers for slot in slots]
        for place in places:
            self._prepare_head(place)
        # Only a prompt has integers.
        vocabulary = language_dims(self.dims).vocabulary if self._family.has_language else 0
        for rows, slot in places:
            self._image_mask.write(np.ones(self.dims.cameras, bool))
            memory = self._memory(slot)
            probe = PrefixProbe(
                vocabulary, memory.image_tokens, self._buffers[rows], memory.slots[rows, slot]
            )
            self._encoding((rows, slot)).prepare(probe)

    def _begin_schedule(self, denoise_steps: int) -> None:
        if self._family.has_scheduler:
            schedule = scheduler_steps(self.dims, denoise_steps)
        else:
            times = 1.0 - np.arange(denoise_steps) / denoise_steps
            schedule = StepSchedule(times, -1.0 / denoise_steps)
        self.set_schedule(*schedule)

    def _prepare_head(self, place: tuple[int, int]) -> None:
        self._denoise(place).prepare(self._steps_probe(place, vary_prefix=True))

    @property
    def session_bytes(self) -> int:
        return SessionMemory.size(self._tokens, self._buffers, SLOTS)

    def open_session(self) -> int:
        session = len(self._sessions)
        need = self.session_bytes
        if self._shared is None:
            need += SessionMemory.size(self._tokens, self._buffers, 1)
        with refused_where_full(self._runtime, need):
            if self._shared is None:
                self._shared = self._session_memory((_SHARED,))
                self._prepare_graphs((_SHARED,))
            own = self._session_memory(range(session * SLOTS, (session + 1) * SLOTS))
        self._sessions.append(own)
        return session

    def captures(self, loop: DenoiseLoop) -> bool:
        # Vision and every prefix were captured at load.
        if loop.alone or not self._capturers['denoise'].active:
            return False
        works = (
            schedule.denoise.get(self._graphs_of(loop.rows, loop.slot))
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
        session, camera = divmod(place, self.dims.cameras)
        self._pixels.write(pixels)
        self._vision()
        size = self._encoded.size
        address = self._sessions[session].image_tokens.address + camera * size
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
        place = self._graphs_of(count, slot)
        own, graphs = self._memory(slot), self._memory(place[1])
        if own is not graphs:
            graphs.image_tokens.copy_from(own.image_tokens)
        self._encoding(place)()
        if own is not graphs:
            own.slots[count, slot].copy_from(graphs.slots[place])

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
        place, schedule = self._bring_prefix(), self._schedules.require()
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
        return self._memory(self._slot).image_tokens.read()

    def read_prefix(self) -> dict[str, np.ndarray]:
        """Return a copy of the selected prefix: keys, values (float32) and mask, for receipts."""
        arrays = self._prefix_slot((self._rows, self._slot)).arrays
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

    def _memory(self, slot: int) -> SessionMemory:
        """Return what a slot is in."""
        if slot != _SHARED:
            return self._sessions[slot // SLOTS]
        assert self._shared is not None, 'open_session comes first'
        return self._shared

    def _prefix_slot(self, place: tuple[int, int]) -> PrefixSlot:
        return self._memory(place[1]).slots[place]

    @staticmethod
    def _graphs_of(rows: int, slot: int) -> tuple[int, int]:
        """Return the place whose graphs run for a slot."""
        return rows, slot if slot < SLOTS else _SHARED

    def _bring_prefix(self) -> tuple[int, int]:
        """Copy the prefix in use to where graphs read it; return that place."""
        own = (self._rows, self._slot)
        place = self._graphs_of(*own)
        if place != own:
            self._prefix_slot(place).copy_from(self._prefix_slot(own))
        return place

    def _encoding(self, place: tuple[int, int]) -> GraphedWork:
        if place not in self._prefix:
            self._prefix[place] = self._graphed('prefix', partial(self._run_prefix, *place))
        return self._prefix[place]

    def _graphed(self, network: str, work: Callable[[], None]) -> GraphedWork:
        return GraphedWork(work, self._capturers[network])

    def _denoise(self, place: tuple[int, int]) -> GraphedWork:
        schedule = self._schedules.require()
        if place not in schedule.denoise:
            work = partial(self._run_steps, schedule, place)
            schedule.denoise[place] = self._graphed('denoise', work)
        return schedule.denoise[place]

    def _steps_probe(self, place: tuple[int, int], vary_prefix: bool) -> StepsProbe:
        buffers, schedule = self._buffers[place[0]], self._schedules.require()
        prefix = self._prefix_slot(place) if vary_prefix else None
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
        inputs, memory = self._buffers[rows].prefix_inputs, self._memory(slot)
        addresses = {
            'image_tokens': memory.image_tokens.address,
            'image_mask': self._image_mask.address,
            **{name: array.address for name, array in inputs.items()},
            **memory.slots[rows, slot].addresses,
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
        rows, _ = place
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
            **self._prefix_slot(place).addresses,
            **{name: array.address for name, array in buffers.head_inputs.items()},
        }
        self._run('expert', rows, addresses)


def _token_embedding(bundle: Path, precision: str, prefix: Network) -> TokenEmbedding | None:
    """Open the text table where the prefix engine takes rows of it."""
    return TokenEmbedding.of(bundle, precision) if TEXT_INPUT in prefix.tensors else None
