"""Closed-loop success of a bundle's ONNX files beside float32, in its receipt.

Small errors of single tensors say little about what a robot does. So `auto` takes files in int8
only where their policy was seen to do its task as often as in float32: same scenes, episode by
episode.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from vla_runtime.bundle.folder import Bundle, BundleError
from vla_runtime.bundle.identity import spec_identity
from vla_runtime.bundle.schema import VERIFICATION_FILE
from vla_runtime.bundle.writer import seal
from vla_runtime.files.json_file import JsonMapping, read_json
from vla_runtime.files.whole_files import write_text

# Success that may be lost at most, by the lower end of the interval.
MOST_LOST = 0.05
_KEY = 'closed_loop'


@dataclass(frozen=True)
class JudgedCondition:
    """Episodes of one condition, each run in both precisions.

    Attributes:
        condition: in words.
        episodes: run in each.
        succeeded: in the files' precision.
        won: that succeed in the files' precision and fail in float32.
        lost: the other way round.
    """

    condition: str
    episodes: int
    succeeded: int
    won: int
    lost: int

    @property
    def least_difference(self) -> float:
        """Lower end of the 95% interval of the difference of success (Agresti and Min, 2005)."""
        total = self.episodes + 2
        difference = self.won - self.lost
        error = math.sqrt(self.won + self.lost + 1 - difference**2 / total) / total
        return difference / total - 1.959964 * error


def write_success(
    bundle: Bundle, conditions: Sequence[JudgedCondition], provenance: Mapping[str, Any]
) -> None:
    """Put judged success into a bundle's receipt, in place of what stood there; seal it again.

    Args:
        bundle: with ONNX files and their receipt.
        conditions: at least one.
        provenance: command, seeds and version of the code.

    Raises:
        BundleError: the bundle has no receipt, or a file of it has changed.
    """
    path = bundle.folder / VERIFICATION_FILE
    document = dict(read_json(path).values)
    if 'onnx' not in document:
        raise BundleError(f'{path}: has no receipt of ONNX files; export the bundle again')
    document['onnx'] = document['onnx'] | {
        _KEY: {
            'bundle_sha256': spec_identity(bundle.spec),
            **provenance,
            'conditions': [asdict(one) for one in conditions],
        }
    }
    kept = {k: digest for k, digest in bundle.spec.files.items() if k != VERIFICATION_FILE}
    before = path.read_text(encoding='utf-8')
    write_text(path, json.dumps(document, indent=1) + '\n')
    try:
        seal(bundle.folder, replace(bundle.spec, files=kept))
    except BaseException:
        # policy.yaml still lists the receipt of before.
        write_text(path, before)
        raise


def success_fault(receipt: JsonMapping, bundle: Bundle) -> str:
    """Return why the judged success does not vouch for the ONNX files; empty if it does.

    Args:
        receipt: `onnx` of verification.json.
        bundle: that the receipt is of.

    Raises:
        JsonError: the record is damaged.
    """
    if _KEY not in receipt:
        return 'no closed-loop success was judged'
    record = receipt.mapping(_KEY)
    if record.get('bundle_sha256', str) != spec_identity(bundle.spec):
        return 'the closed-loop success that was judged is that of other files'
    judged = [_condition(one) for one in record.mappings('conditions')]
    for one in judged:
        if not one.least_difference >= -MOST_LOST:
            return (
                f'{one.condition}: {one.succeeded} of {one.episodes} episodes succeed, {one.lost} '
                f'lost to float32 and {one.won} won, so that up to '
                f'{-100 * one.least_difference:.0f}% of success may be lost (accepted: '
                f'{100 * MOST_LOST:.0f}%)'
            )
    return '' if judged else 'no closed-loop success was judged'


def _condition(stated: JsonMapping) -> JudgedCondition:
    names = ('episodes', 'succeeded', 'won', 'lost')
    counts = {name: stated.get(name, int) for name in names}
    if min(counts.values()) < 0 or counts['won'] + counts['lost'] > counts['episodes']:
        raise stated.error('episodes', f'{counts} cannot be counts of one condition')
    return JudgedCondition(stated.get('condition', str), **counts)
