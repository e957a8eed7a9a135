"""Try a machine without a bundle: driver, packages, and a tiny policy of every family, compared.

Every step is named as it begins, and as it passes. What fails says why and what mends it. Where the
process ends without a last line, the step named last is where a library crashed. The output is what
a report of a problem needs: versions, device, JetPack, steps.

Devices:
  cpu         PyTorch and ONNX Runtime, whichever are installed
  cuda        PyTorch on the GPU: driver, kernels for it, captured graphs
  tensorrt    TensorRT: bindings, driver, engines built for this GPU, captured graphs. Neither
              PyTorch nor onnx is needed

The policies are tiny and random, in float32: times show the cost of a launch and not of a real
policy. One family has a second one in bfloat16, tried with PyTorch on a GPU from compute capability
8.0 on and with TensorRT from 10.3 on.

examples:
  vla_runtime selftest --device tensorrt
  vla_runtime selftest --device tensorrt --family NAME --json selftest.json
  vla_runtime selftest --device cuda:1
  vla_runtime selftest --device cpu

exit codes: 0 every step passed; 1 one did not; 2 not possible as asked; 130 stopped with Ctrl-C.
"""

from __future__ import annotations

import argparse
import json
import sys
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from vla_runtime.cli._files import output_file
from vla_runtime.family.listing import family_names
from vla_runtime.files.atomic_write import write_text

if TYPE_CHECKING:
    from vla_tools.selftest.steps import Step

_MARKS = {'passed': 'ok', 'failed': 'FAILED', 'skipped': 'skipped'}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument(
        '--device',
        required=True,
        help='cpu, cuda, cuda:N (PyTorch), tensorrt or tensorrt:N',
    )
    parser.add_argument(
        '--family',
        action='append',
        metavar='NAME',
        help=f'{", ".join(family_names())}; may be repeated (default: all)',
    )
    parser.add_argument(
        '--json',
        type=output_file,
        metavar='FILE',
        help='write versions and steps there too (-: standard output)',
    )


def main(arguments: argparse.Namespace) -> int:
    """Try the device; 1 where a step failed, 2 where it cannot be tried."""
    from vla_runtime.engines.devices import parse_device
    from vla_tools.selftest.checks import describe_machine, results, run_selftest
    from vla_tools.selftest.policies import tried_families
    from vla_tools.selftest.steps import Steps

    try:
        parse_device(arguments.device, 'onnxruntime')
        tried = tried_families()
        families = arguments.family or tried
        if unknown := [name for name in families if name not in tried]:
            known = ', '.join(tried)
            raise ValueError(
                f"family '{unknown[0]}' is unknown, or make_policies.py of test/tools/selftest has "
                f'not made its policy; known are {known}'
            )
    except (OSError, ValueError) as error:
        print(f'error: {error}', file=sys.stderr)
        return 2
    # A pipe shows each step as it begins, too: a library may end the process.
    steps = Steps(
        begin=lambda name: print(f'  {name} ...', end='', flush=True),
        end=lambda step: print(_line(step), flush=True),
    )
    described = describe_machine()
    print(_header(arguments.device, described), flush=True)
    times = run_selftest(arguments.device, families, steps)
    passed = bool(any(times.values())) and not steps.failed
    if arguments.json:
        document = {
            'device': arguments.device,
            'date': datetime.now(timezone.utc).strftime('%Y-%m-%d'),
            **described,
            # Modules imported since name their builds.
            'versions': describe_machine()['versions'],
            'passed': passed,
            'steps': results(steps),
            'milliseconds': times,
        }
        try:
            write_text(arguments.json, json.dumps(document, indent=1) + '\n')
        except OSError as error:
            print(f'error: {error}', file=sys.stderr)
            return 2
        print(f'wrote {arguments.json}')
    print(_verdict(steps.done, steps.failed, passed))
    return 0 if passed else 1


def _header(device: str, described: dict[str, Any]) -> str:
    where = described['machine']
    lines = [
        f'selftest of {device}',
        f'  machine: {where["cpu"]}, {where["cores"]} cores, {where["memory_gib"]} GiB, '
        f'{where["system"]}',
    ]
    if jetson := described['jetson']:
        lines.append('  Jetson: ' + ', '.join(f'{name} {text}' for name, text in jetson.items()))
    found = described['versions']
    lines.append('  versions: ' + ', '.join(f'{name} {text}' for name, text in found.items()))
    return '\n'.join(lines)


def _line(step: Step) -> str:
    lines = f' {_MARKS[step.state]}, {step.detail} ({step.seconds:.1f} s)'
    return lines + (f'\n    {step.mend}' if step.mend else '')


def _verdict(done: list[Step], failed: list[Step], passed: bool) -> str:
    seconds = sum(step.seconds for step in done)
    if passed:
        return f'PASSED: {len(done)} steps in {seconds:.0f} s'
    if not failed:
        return 'FAILED: no backend of this device is installed: pip install onnxruntime, or torch'
    names = '; '.join(step.name for step in failed)
    return f'FAILED: {names}. A report needs this output as a whole, from its first line'
