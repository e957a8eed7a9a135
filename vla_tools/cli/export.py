"""Make a policy bundle of a checkpoint, or ONNX files for a bundle.

A checkpoint is a folder as the training code of a policy family leaves it
(docs/howto/checkpoints.md has the list).

Run it with the checkpoint alone first: one message lists everything that the folder does not say,
with the option that supplies it. Nothing is written until everything is known and checked.

The bundle gets ONNX files too (vision, prefix and expert; for a flow and a head of one pass, above
8 bits, also all in one), in the precision that --onnx-precision says, each compared with PyTorch on
seeded inputs: where one differs beyond the bounds, no bundle is written.
'vla_runtime verify BUNDLE' repeats the comparison anywhere.

examples:
  # a LeRobot policy; names and rate come from the data set it was trained on
  vla_runtime export outputs/train/pick/checkpoints/last/pretrained_model --out engines/pick \\
      --tokenizer tokenizers/tokenizer.model --dataset datasets/pick --units deg,gripper.pos=percent

  # an openpi policy for ALOHA, trained with adapt_to_pi=True, its default: joints relative to the
  # state, grippers absolute; TEMPLATE is a layout of --prompt-template
  vla_runtime export checkpoints/aloha_pytorch --out engines/aloha \\
      --tokenizer tokenizers/tokenizer.model --prompt-template TEMPLATE --rate-hz 50 \\
      --state-names l1,l2,l3,l4,l5,l6,lg,r1,r2,r3,r4,r5,r6,rg \\
      --action-names l1,l2,l3,l4,l5,l6,lg,r1,r2,r3,r4,r5,r6,rg \\
      --delta l1,l2,l3,l4,l5,l6,r1,r2,r3,r4,r5,r6 --units rad,lg=1,rg=1 --adapt-to-pi yes

  # ONNX files in another precision, from a bundle that is there already
  vla_runtime export engines/pick --out engines/pick_float16 --onnx-precision float16

  # ONNX files in int8, for a CPU: ranges come from a recording of the policy at its task
  vla_runtime demo --record demo_runs/calibration --seconds 60
  vla_runtime export engines/demo --out engines/demo_int8 --onnx-precision int8 \\
      --calibration demo_runs/calibration

  # the same for TensorRT, where float32 products would cost more than int8 saves
  vla_runtime export engines/demo --out engines/demo_int8 --onnx-precision int8 \\
      --beside-int8 bfloat16 --calibration demo_runs/calibration

  # look only
  vla_runtime export CHECKPOINT --out BUNDLE --dry-run ...

What no option covers (end-effector poses, say) is written into the bundle's policy.yaml by hand;
'vla_runtime info BUNDLE' then checks it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from vla_runtime.bundle.onnx_files import QUANTISED, Attention, Precision
from vla_tools.cli._comparison import show_receipt
from vla_tools.cli._export_options import add_export_options, export_options

if TYPE_CHECKING:
    from vla_runtime.bundle.folder import Bundle
    from vla_runtime.bundle.schema import BundleSpec
    from vla_runtime.types import Observation


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument(
        'checkpoint', type=Path, metavar='CHECKPOINT', help='the folder to read, or a policy bundle'
    )
    parser.add_argument(
        '--out', type=Path, required=True, metavar='BUNDLE', help='the folder to make'
    )
    parser.add_argument('--force', action='store_true', help='replace a bundle that lies there')
    parser.add_argument('--dry-run', action='store_true', help='check and show, write nothing')
    parser.add_argument('--name', help="of the policy, for people (default: BUNDLE's name)")
    parser.add_argument(
        '--onnx-precision',
        choices=(*get_args(Precision), 'none'),
        default='float32',
        help="of the ONNX files' matrix products; norms, softmax, time and updates stay float32, "
        'indices integers (default: float32; none leaves the files out)',
    )
    parser.add_argument(
        '--calibration',
        type=Path,
        metavar='BAG',
        help='for int8, fp8 and nvfp4: recording of the policy at its task, with its images '
        "(record:=true, or 'vla_runtime demo --record'); its observations say which ranges 8 bits "
        'must cover, and some of them judge the result',
    )
    parser.add_argument(
        '--beside-int8',
        choices=[name for name in get_args(Precision) if name not in QUANTISED],
        default='float32',
        help='for int8, fp8 and nvfp4: precision of the matrix products that these leave out '
        "(an MLP's last, attention's values); float32 for a CPU, bfloat16 for TensorRT "
        '(default: %(default)s)',
    )
    parser.add_argument(
        '--attention',
        choices=get_args(Attention),
        default='exact',
        help="fused: ONNX's own operator in half, one kernel of TensorRT (from 10.14 on, and for "
        'RTX); judge such a policy at its task (default: exact, with scores in float32)',
    )
    add_export_options(parser)


def main(arguments: argparse.Namespace) -> int:
    """Export; 2 where the checkpoint cannot become a bundle."""
    from vla_runtime.bundle.schema import SPEC_FILE
    from vla_runtime.bundle.writer import check_target

    target: Path = arguments.out
    try:
        check_target(target, arguments.force)
        if (arguments.checkpoint / SPEC_FILE).is_file():
            written = _export_bundle(arguments)
        else:
            written = _export_checkpoint(arguments)
    except (ValueError, OSError) as error:
        print(f'error: {error}', file=sys.stderr)
        return 2
    if not written:
        done = 'replaced' if target.exists() else 'made'
        print(f'\ndry run: nothing was written; {target} would be {done}')
        return 0
    print(f'\nwrote {target}\nnext: vla_runtime info {target}')
    if arguments.onnx_precision != 'none':
        print(f'and where it shall run: vla_runtime verify {target}')
    return 0


def _export_checkpoint(arguments: argparse.Namespace) -> bool:
    """Export a checkpoint folder; False for a dry run."""
    from vla_convert.checkpoints.folder_facts import ExportError
    from vla_convert.export.conversion import plan_export, write_export
    from vla_convert.export.onnx.bundle import add_onnx, check_attention, check_packages
    from vla_runtime.bundle.summary import describe, line
    from vla_runtime.bundle.writer import bundle_notes

    with_onnx = arguments.onnx_precision != 'none'
    if with_onnx:
        check_packages()
    elif arguments.attention != 'exact':
        raise ExportError('--attention is of ONNX files, and --onnx-precision none leaves them out')
    if arguments.onnx_precision in QUANTISED or arguments.calibration is not None:
        raise ExportError(
            f'{arguments.checkpoint}: 8 and 4 bits are calibrated on a recording of the policy: '
            'export this checkpoint without --calibration and in float32 first, record that bundle '
            'at its task and export the bundle in int8, fp8 or nvfp4'
        )
    target: Path = arguments.out
    plan = plan_export(
        arguments.checkpoint, export_options(arguments), default_name=target.resolve().name
    )
    if with_onnx:
        check_attention(arguments.attention, arguments.onnx_precision, plan.spec)
    print(describe(plan.spec))
    print(line('weights', f'{len(plan.tensors)} tensors, {plan.weight_bytes / 1e6:,.1f} MB'))
    for index, (name, place) in enumerate(plan.origins):
        print(line('' if index else 'from', f'{name}: {place}'))
    for note in (*plan.notes, *bundle_notes(plan.spec, plan.statistics)):
        print(line('note', note))
    if arguments.dry_run:
        return False

    def finish(folder: Path, spec: BundleSpec) -> None:
        if with_onnx:
            add_onnx(
                folder,
                spec,
                arguments.onnx_precision,
                _bar,
                show_receipt,
                attention=arguments.attention,
            )

    further_bytes = 0
    if with_onnx:
        from vla_convert.export.onnx.export import onnx_bytes

        further_bytes = onnx_bytes(plan.spec, arguments.onnx_precision)
    with _bar('weights', plan.weight_bytes) as advance:
        write_export(
            plan,
            target,
            force=arguments.force,
            further_bytes=further_bytes,
            advance=advance,
            finish=finish,
        )
    return True


def _export_bundle(arguments: argparse.Namespace) -> bool:
    """Export a bundle's ONNX files; False for a dry run."""
    from vla_convert.checkpoints.folder_facts import ExportError
    from vla_convert.checkpoints.options import ExportOptions
    from vla_convert.export.onnx.bundle import export_bundle
    from vla_runtime.bundle.folder import read_bundle
    from vla_runtime.bundle.summary import describe

    source = arguments.checkpoint
    if export_options(arguments) != ExportOptions():
        raise ExportError(
            f'{source}: is a policy bundle, which says everything itself: only --out, --force, '
            '--dry-run, --onnx-precision, --beside-int8, --attention and --calibration apply'
        )
    if arguments.onnx_precision == 'none':
        raise ExportError(
            f'{source}: is a policy bundle; --onnx-precision none leaves nothing to do'
        )
    if (arguments.onnx_precision in QUANTISED) != (arguments.calibration is not None):
        raise ExportError(
            '--onnx-precision int8, fp8 or nvfp4 and --calibration BAG go together: ranges come '
            'from a recording of the policy at its task (record:=true on a robot, or vla_runtime '
            'demo --record BAG)'
        )
    if arguments.onnx_precision not in QUANTISED and arguments.beside_int8 != 'float32':
        raise ExportError(
            f'--beside-int8 {arguments.beside_int8} is for --onnx-precision int8, fp8 and nvfp4'
        )
    bundle = read_bundle(source)
    print(describe(bundle.spec))
    observations = []
    if arguments.calibration is not None:
        observations = _calibration(arguments.calibration, bundle)
    if arguments.dry_run:
        return False
    export_bundle(
        bundle,
        arguments.out,
        arguments.onnx_precision,
        force=arguments.force,
        bars=_bar,
        report=show_receipt,
        observations=observations,
        beside=arguments.beside_int8,
        attention=arguments.attention,
    )
    return True


def _calibration(recording: Path, bundle: Bundle) -> list[Observation]:
    from vla_convert.export.onnx.calibration import MOST_OBSERVATIONS
    from vla_runtime.bundle.summary import line
    from vla_runtime.engines.devices import check_int8
    from vla_tools.replay.rerun import recorded_observations

    check_int8()
    observations = recorded_observations(recording, bundle, MOST_OBSERVATIONS)
    print(line('calibration', f'{len(observations)} observations of {recording}'))
    return observations


@contextmanager
def _bar(task: str, total: int) -> Iterator[Callable[[int], object]]:
    from tqdm import tqdm

    files = task in ('quantise', 'verify')
    unit = {'unit': 'file'} if files else {'unit': 'B', 'unit_scale': True}
    with tqdm(total=total, desc=task, disable=None, **unit) as bar:
        yield bar.update
