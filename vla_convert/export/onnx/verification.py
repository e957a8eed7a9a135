"""The receipt of exported networks: every file against PyTorch, and what was found.

`precision.py` checks the types; then outputs are compared with PyTorch's in float32 on the inputs
of `cases.py`: each file on PyTorch's inputs, then whole chunks, decomposed and monolithic. The
time table is compared for every allowed number of denoise steps, by float32's bound. One file runs
at a time. Errors and bounds are those of `receipt`.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch

from vla_convert.export.onnx.cases import Reference, moves_of, pass_inputs, passes_of, seeded_cases
from vla_convert.export.onnx.eight_bits import matrix_faults
from vla_convert.export.onnx.export import has_monolithic, is_unrolled
from vla_convert.export.onnx.four_bits import four_bit_matrix_faults
from vla_convert.export.onnx.precision import beside_int8, precision_of, type_faults
from vla_convert.export.onnx.ternary import GivenCodes, ternary_faults
from vla_convert.export.onnx.variants import comparable
from vla_convert.export.onnx.weights import BundleWeights
from vla_convert.export.receipt import (
    TIME_TABLE,
    ActionError,
    ChunkComparison,
    Comparison,
    Receipt,
    VerificationError,
    left_out_of_int8,
)
from vla_runtime.bundle.folder import read_statistics
from vla_runtime.bundle.onnx_files import (
    ANSWER_INPUTS,
    LOGITS,
    ONNX_FOLDER,
    QUANTISED,
    ROWS,
    ROWS_GRAPHS,
    TEXT_INPUT,
    Network,
    Precision,
    engine_graphs,
    graph_names,
    graph_path,
    vision_names,
)
from vla_runtime.bundle.schema import WEIGHTS_FILE, BundleSpec
from vla_runtime.engines.onnx.session import SKIPPED_REWRITES, Placement, Session, session_options
from vla_runtime.engines.preflight import check_graph_files
from vla_runtime.engines.recorded_cases import Case, error_of, judged_as, read_cases
from vla_runtime.engines.token_embedding import TokenEmbedding
from vla_runtime.family.declaration import (
    MOST_FLOW_STEPS,
    AnswerDecoder,
    Family,
    PolicyDims,
    answer_decoder,
    distinct_image_sizes,
    scheduler_of,
)
from vla_runtime.family.listing import find_family, read_time_table
from vla_runtime.family.step_schedule import stage_times, step_rows
from vla_runtime.files.quotes import join_truncated
from vla_runtime.inference.denoise import flow_times, usual_schedule
from vla_runtime.models.base.flow_network import empty_network
from vla_runtime.models.blocks.layers import query_scales
from vla_runtime.processing.joint_spaces import joint_space
from vla_runtime.processing.normalization import Normalizer

# Rows of the time table; one of the largest published policy has 116,736 numbers.
_TIMES_AT_ONCE = 256


def verify_onnx(
    folder: Path,
    spec: BundleSpec,
    *,
    device: str = 'cpu',
    advance: Callable[[int], object] = lambda count: None,
    keep: Callable[[list[Case]], object] = lambda cases: None,
    cases: list[Case] | None = None,
) -> Receipt:
    """Compare a bundle's ONNX files with its PyTorch modules.

    Args:
        device: `cpu`, `cuda`, `cuda:N`, `tensorrt` or `tensorrt:N`.
        advance: gets 1 for each of the `verification_steps`.
        keep: gets the cases with PyTorch's outputs at the end.
        cases: None: seeded ones, for int8 those that the export recorded.

    Raises VerificationError: a graph breaks the type rules, or int8 matrices are not the bundle's;
    ValueError: missing files or provider.
    """
    placement = Placement.of(device)
    image_sizes = len(distinct_image_sizes(spec.dims))
    precision, beside = check_graphs(folder, image_sizes, monolithic=is_unrolled(spec))
    paths = [folder / ONNX_FOLDER / name for name in _int8_graphs(image_sizes)]
    factors = query_scales(empty_network(spec.family, spec.dims))
    weights = BundleWeights(folder / WEIGHTS_FILE)
    _refuse(folder, 'computes with wrong matrices', ternary_faults(paths, weights, factors))
    if precision in QUANTISED:
        faults = four_bit_matrix_faults if precision == 'nvfp4' else matrix_faults
        _refuse(folder, 'computes with wrong matrices', faults(paths, weights, factors))
    if cases is None:
        cases = read_cases(folder)[0] if precision in QUANTISED else seeded_cases(folder, spec)
    verifier = _Verifier(folder, spec, precision, beside, placement, advance, cases)
    receipt = verifier.run()
    keep(verifier.cases)
    return receipt


def verification_steps() -> int:
    """Return the number of `advance` calls that `verify_onnx` makes."""
    return 3 + 1 + 3 * len(ROWS)


def check_graphs(
    folder: Path, image_sizes: int = 1, monolithic: bool = True
) -> tuple[Precision, Precision]:
    """Check the types of all graphs; return the precisions of products and of those beside int8.

    `image_sizes`: different sizes among the cameras; `monolithic`: the baseline is there, unless
    in 8 or 4 bits. Raises VerificationError: a forbidden type; ValueError: no such ONNX file.
    """
    names = engine_graphs(ROWS, image_sizes)
    check_graph_files(folder, names)
    paths = [folder / ONNX_FOLDER / name for name in names]
    # Not every network has matrices that may be reduced.
    reduced = (one for one in map(beside_int8, paths) if one != 'float32')
    beside: Precision = next(reduced, 'float32')
    precisions = map(precision_of, paths)
    precision: Precision = next((one for one in precisions if one in QUANTISED), beside)
    names = (*graph_names(image_sizes, monolithic), *ROWS_GRAPHS)
    if precision in QUANTISED:
        names = _int8_graphs(image_sizes)
    check_graph_files(folder, names)
    faults = [
        f'{name}: {fault}'
        for name in names
        for fault in type_faults(folder / ONNX_FOLDER / name, precision, beside)
    ]
    _refuse(folder, 'computes in the wrong precision', faults)
    return precision, beside


def _int8_graphs(image_sizes: int) -> tuple[str, ...]:
    """File names of all graphs of a bundle in int8."""
    return (*engine_graphs(ROWS, image_sizes), *ROWS_GRAPHS)


def _refuse(folder: Path, what: str, faults: list[str]) -> None:
    """Raise a VerificationError that lists the first faults, if there are any."""
    if faults:
        raise VerificationError(
            f'{folder / ONNX_FOLDER}: {what}:\n  {join_truncated(faults)}\nexport the bundle again'
        )


def receipt_dict(receipt: Receipt) -> dict[str, Any]:
    """Contents of verification.json under `onnx`."""
    return {
        'what': 'every ONNX file against the PyTorch modules in float32, on '
        + (
            'observations that were recorded' if receipt.precision in QUANTISED else 'seeded inputs'
        ),
        'precision': receipt.precision,
        'types': 'matrix products in the precision; all else in float32, indices in integers',
        'device': receipt.device,
        'versions': {
            'python': platform.python_version(),
            'torch': str(torch.__version__),
            'onnx': onnx.__version__,
            'onnxruntime': onnxruntime.__version__,
            'numpy': np.__version__,
        },
        'machine': platform.machine(),
        **receipt.figures(),
    }


class _Verifier:
    """Runs the files one by one and collects comparisons."""

    def __init__(
        self,
        folder: Path,
        spec: BundleSpec,
        precision: Precision,
        beside: Precision,
        placement: Placement,
        advance: Callable[[int], object],
        cases: list[Case],
    ) -> None:
        self._folder = folder
        self._spec, self._family = spec, find_family(spec.family)
        self._precision = precision
        self._beside = beside
        self._placement = placement
        self._advance = advance
        self._widened = beside == 'bfloat16' and placement.memory == 'cpu'
        self.cases = cases
        # What ONNX Runtime made of each case, from the pixels on.
        self._own: list[dict[str, np.ndarray]] = [{} for _ in self.cases]
        self._errors: dict[tuple[str, str], list[tuple[float, float]]] = {}
        self._chunks: list[ChunkComparison] = []
        # By chunk, (horizon, actions) in the robot's units.
        self._in_units: list[np.ndarray] = []
        self._decoder = answer_decoder(find_family(spec.family), spec.dims, folder, spec.tokenizer)
        # Tokens equal to PyTorch's, and all.
        self._tokens = [0, 0]
        self._judged = judged_as(precision, find_family(spec.family).rounds_activations)
        self._reference = Reference(spec, BundleWeights(folder / WEIGHTS_FILE))
        statistics = read_statistics(folder, spec)
        self._actions = Normalizer(
            spec.normalisation.actions,
            {name.removeprefix('actions.'): values for name, values in statistics.items()},
            spec.action_names,
        )

    def run(self) -> Receipt:
        reference = self._reference
        reference.image_tokens(self.cases)
        self._advance(1)
        self._vision()
        reference.prefixes(self.cases)
        self._advance(1)
        for rows in ROWS:
            self._prefix(rows)
        table = reference.chunks(self.cases)
        self._advance(1)
        own_table = self._time_table(reference, table)
        for rows in ROWS:
            if self._decoder is None:
                self._expert(rows, table, own_table)
            else:
                self._passes(rows, self._decoder)
        for rows in ROWS:
            if has_monolithic(self._spec, self._precision):
                self._monolithic(rows, own_table)
            self._advance(1)
        tensors = [
            Comparison.of(file, tensor, errors, self._precision)
            for (file, tensor), errors in self._errors.items()
        ]
        return Receipt(
            self._precision,
            f'{self._placement.device} ({self._placement.provider})',
            [case.words for case in self.cases],
            tensors,
            self._chunks,
            self._notes(),
            self._action_errors(),
        )

    def _action_errors(self) -> list[ActionError]:
        if not self._in_units:
            # Random weights rarely write tokens that are a chunk, where not all are.
            return []
        by_action = zip(self._spec.actions, np.concatenate(self._in_units).T, strict=True)
        return [
            ActionError(action.name, action.unit, float(one.max()), float(one.mean()))
            for action, one in by_action
        ]

    def _notes(self) -> list[str]:
        notes = left_out_of_int8(self._precision, self._beside)
        if self._decoder is not None:
            notes.append(f"{self._tokens[0]} of {self._tokens[1]} tokens are PyTorch's")
        if self._widened:
            notes.append(
                'bfloat16 products computed in float32 and rounded: the CPU has none of its own'
            )
        return notes

    def _vision(self) -> None:
        sizes = distinct_image_sizes(self._spec.dims)
        for case, own in zip(self.cases, self._own, strict=True):
            own['image_tokens'] = np.zeros_like(case.reference['image_tokens'])
        for size, name in zip(sizes, vision_names(len(sizes)), strict=True):
            session = self._open(self._folder / ONNX_FOLDER / name)
            for case, own in zip(self.cases, self._own, strict=True):
                expected = case.reference['image_tokens']
                for camera, image in enumerate(case.pixels):
                    if image.shape[1:] == size:
                        outputs = session.run({'pixels': image[None]})
                        (found,) = outputs.pop('image_tokens')
                        own['image_tokens'][camera, : len(found)] = found
                        meant = expected[camera, : len(found)]
                        if outputs:
                            codes = GivenCodes([*outputs.values()], self._precision)
                            meant = self._reference.image_with_codes(image, codes)
                            self._note_codes(name, codes)
                        self._compare(name, 'image_tokens', found, meant)
        self._advance(1)

    def _prefix(self, rows: int) -> None:
        session, name = self._open_rows('prefix', rows)
        hosted = TEXT_INPUT in session.inputs
        token_embedding = TokenEmbedding.of(self._folder, self._precision) if hosted else None
        for case, own in self._of(rows):
            prompt: Mapping[str, np.ndarray] = case.prefix_inputs
            if token_embedding is not None:
                prompt = token_embedding.replace_tokens(prompt)
            given = {'image_mask': case.image_mask, **prompt}
            found = session.run({'image_tokens': case.reference['image_tokens'], **given})
            past = case.past
            if further := [found.pop(one) for one in list(found) if one not in past]:
                codes = GivenCodes(further, self._precision)
                past = self._reference.prefix_with_codes(case, codes)
                self._note_codes(name, codes)
            visible = case.visible(found)
            for tensor, expected in case.visible(past).items():
                self._compare(name, tensor, visible[tensor], expected)
            made = session.run({'image_tokens': own['image_tokens'], **given})
            own |= {one: made[one] for one in case.past}
        self._advance(1)

    def _time_table(self, reference: Reference, table: np.ndarray) -> np.ndarray:
        """Compare the rows of all numbers of steps; return those of the bundle's own."""
        spec = self._spec
        read = read_time_table(spec.family, spec.dims, self._folder / WEIGHTS_FILE)
        schedule = usual_schedule(self._family, spec.dims, spec.denoise_steps)
        own = step_rows(read, spec.dims, schedule.times, schedule.dt)
        self._compare(TIME_TABLE, 'time_conditioning', own, table)
        if self._family.takes_steps:
            times = _all_times(self._family, spec.dims)
            with reference.time_table() as expected:
                for start in range(0, len(times), _TIMES_AT_ONCE):
                    some = times[start : start + _TIMES_AT_ONCE]
                    self._compare(TIME_TABLE, 'time_conditioning', read(some), expected(some))
        return own

    def _expert(self, rows: int, table: np.ndarray, own_table: np.ndarray) -> None:
        spec = self._spec
        session, name = self._open_rows('expert', rows)
        for case, own in self._of(rows):
            trace, growth = case.reference['trace'], []
            own_past = {key: own[key] for key in case.past}
            x = case.x
            for k in range(spec.denoise_steps):
                alone = session.run(step_inputs(spec, case, case.past, table, k, trace[k]))
                self._compare(name, 'x_next', alone['x_next'], trace[k + 1])
                expected = case.reference['velocity'][k]
                self._compare(name, 'velocity', alone['velocity'], expected)
                x = session.run(step_inputs(spec, case, own_past, own_table, k, x))['x_next']
                growth.append(error_of(x, trace[k + 1])[0])
            self._add_chunk(name, f'vision, prefix and {name}', case, x, growth)
        self._advance(1)

    def _passes(self, rows: int, decoder: AnswerDecoder) -> None:
        session, name = self._open_rows('expert', rows)
        hosted = TEXT_INPUT in session.inputs
        table = TokenEmbedding.of(self._folder, self._precision) if hosted else None
        for case, own in self._of(rows):
            for place, (feed, expected) in enumerate(passes_of(case, table)):
                found = session.run(feed)
                self._compare(name, LOGITS, found[LOGITS], expected)
                for output, cache in zip(('key', 'value'), ANSWER_INPUTS, strict=True):
                    if place < len(case.reference['answer']):
                        self._compare(name, output, found[output], case.reference[cache][place])
                wrong = found['token'] != found[LOGITS].argmax(axis=-1)
                self._compare(name, 'token', wrong.astype(np.float32), np.zeros(rows, np.float32))
            self._add_answer(name, case, own, session, table, decoder)
        self._advance(1)

    def _add_answer(
        self,
        name: str,
        case: Case,
        own: Mapping[str, np.ndarray],
        session: Session,
        table: TokenEmbedding | None,
        decoder: AnswerDecoder,
    ) -> None:
        """Read PyTorch's tokens one after the other, over what the files themselves gave."""
        past = {key: own[key] for key in case.past}
        answer = {key: np.zeros_like(case.reference[key]) for key in ANSWER_INPUTS}
        logits = [own[LOGITS]]
        for place, token in enumerate(case.reference['answer']):
            found = session.run(pass_inputs(token, place, past, answer, table))
            for output, key in zip(('key', 'value'), ANSWER_INPUTS, strict=True):
                answer[key][place] = found[output]
            logits.append(found[LOGITS])
        expected = case.reference[LOGITS]
        growth = [error_of(*pair)[0] for pair in zip(logits, expected, strict=True)]
        error = error_of(np.stack(logits), expected)
        number = next(i for i, other in enumerate(self.cases) if other is case)
        graphs = f'vision, prefix and {name}'
        self._chunks.append(
            ChunkComparison.of(name, graphs, number, 1.0, error, growth, self._precision)
        )
        tokens, meant = np.stack(logits).argmax(axis=-1), expected.argmax(axis=-1)
        self._tokens[0] += int((tokens == meant).sum())
        self._tokens[1] += meant.size
        with suppress(ValueError):
            self._add_units(decoder(tokens[:, 0]), decoder(meant[:, 0]))

    def _monolithic(self, rows: int, table: np.ndarray) -> None:
        session, name = self._open_rows('monolithic', rows, show_codes=False)
        for case, _ in self._of(rows):
            values = step_inputs(self._spec, case, {}, table, 0, case.x) | {
                **_all_pixels(case),
                'image_mask': case.image_mask,
                **case.prefix_inputs,
                'time_conditioning': table,
                't': flow_times(self._spec.denoise_steps).astype(np.float32),
                'plan_weight': case.plan_weight,
            }
            self._add_chunk(name, name, case, session.run(values)['x_next'], [])

    def _open_rows(
        self, network: Network, rows: int, show_codes: bool = True
    ) -> tuple[Session, str]:
        path = graph_path(self._folder, network, rows)
        return self._open(path, show_codes), path.name

    def _open(self, path: Path, show_codes: bool = True) -> Session:
        options = session_options()
        # Weights are used in the file: no packed or converted copy.
        options.add_session_config_entry('session.disable_prepacking', '1')
        options.enable_cpu_mem_arena = False
        if not show_codes and find_family(self._spec.family).rounds_activations:
            # A fused layer's sums end in another last bit, and a code that is rounded otherwise
            # there is a step of the whole chunk.
            levels = onnxruntime.GraphOptimizationLevel
            options.graph_optimization_level = levels.ORT_ENABLE_BASIC
        skipped = list(SKIPPED_REWRITES.get(self._precision, ()))
        if self._precision != 'float32':
            skipped.append('ConstantFolding')
        return Session(
            path,
            self._placement,
            options,
            comparable(path, widen_bfloat16=self._widened, show_codes=show_codes),
            disabled_optimizers=skipped,
        )

    def _of(self, rows: int) -> list[tuple[Case, dict[str, np.ndarray]]]:
        pairs = zip(self.cases, self._own, strict=True)
        return [(case, own) for case, own in pairs if case.rows == rows]

    def _note_codes(self, file: str, codes: GivenCodes) -> None:
        """Note codes that PyTorch rounds otherwise; any makes the receipt fail."""
        self._errors.setdefault((file, 'codes'), []).append((float(codes.faults),) * 2)

    def _compare(self, file: str, tensor: str, found: np.ndarray, expected: np.ndarray) -> None:
        self._errors.setdefault((file, tensor), []).append(error_of(found, expected))

    def _add_chunk(
        self, file: str, graphs: str, case: Case, x: np.ndarray, growth: list[float]
    ) -> None:
        number = next(i for i, other in enumerate(self.cases) if other is case)
        expected = case.reference['trace'][-1]
        error = error_of(x, expected)
        self._add_units(x[0], expected[0])
        gain = float(case.reference['gain'])
        self._chunks.append(
            ChunkComparison.of(file, graphs, number, gain, error, growth, self._judged)
        )

    def _add_units(self, found: np.ndarray, meant: np.ndarray) -> None:
        """Add the difference of two normalised chunks (H, A) in the robot's units."""
        sent, width = self._spec.action_rows, len(self._spec.actions)
        to_robot = joint_space(self._spec.joint_space, self._spec.joint_frame).actions_to_robot
        of_robot = [to_robot(self._actions.denormalise(c[sent, :width])) for c in (found, meant)]
        self._in_units.append(np.abs(of_robot[0] - of_robot[1]))


def _all_times(family: Family, dims: PolicyDims) -> np.ndarray:
    """Times of every number of steps that the settings allow, each time once."""
    if family.has_scheduler:
        return scheduler_of(dims).all_times()
    counts = range(1, MOST_FLOW_STEPS + 1)
    seen = [stage_times(dims, flow_times(n), -1.0 / n).reshape(-1) for n in counts]
    return np.unique(np.concatenate(seen))


def step_inputs(
    spec: BundleSpec,
    case: Case,
    past: Mapping[str, np.ndarray],
    table: np.ndarray,
    k: int,
    x: np.ndarray,
) -> dict[str, np.ndarray]:
    """Inputs of the expert's graph for denoise step k from x (1, H, A), over this past."""
    schedule = usual_schedule(find_family(spec.family), spec.dims, spec.denoise_steps)
    values = {
        **past,
        'x': x,
        'time_conditioning': table[k : k + 1],
        **moves_of(case, schedule, k),
        'row_weight': case.row_weight,
        'plan': case.plan,
        'plan_weight': case.plan_weight[k],
        **case.head_inputs,
    }
    return {name: np.asarray(value) for name, value in values.items()}


def _all_pixels(case: Case) -> dict[str, np.ndarray]:
    """Inputs of the monolithic graph for a case's images (`GraphShapes.images`)."""
    if len({image.shape for image in case.pixels}) == 1:
        return {'pixels': np.stack(case.pixels)}
    return {f'pixels_{camera}': image[None] for camera, image in enumerate(case.pixels)}
