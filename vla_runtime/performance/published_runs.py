"""Times that authors of other runtimes measured and published, phase by phase.

They stand beside our least times to judge where a device spends an inference. Views, precision and
kernels are theirs: the shares compare, the milliseconds only bound what can be expected.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_REPORT = 'github.com/VinRobotics/vla.cpp, eval/reports/report-{}.md (LIBERO-Object, May 2026)'
_README = 'github.com/VinRobotics/vla.cpp, README.md (vla-bench, August 2026)'


@dataclass(frozen=True)
class PublishedRun:
    """An inference with new images, one prompt row.

    Attributes:
        runtime: that ran it.
        total_ms: of the server, without its transport.
        vision_ms: of the vision towers, all views; the rest is prefix, denoise loop and small work.
        source: where it is published.
    """

    runtime: str
    total_ms: float
    vision_ms: float
    source: str


# (total, vision) in milliseconds by model, for each device.
_VLA_CPP: dict[str, tuple[str, dict[str, tuple[float, float]]]] = {
    'agx-orin': (
        _REPORT.format('agx-orin'),
        {
            'evo1': (996.05, 696.21),
            'groot_n15': (409.57, 129.22),
            'groot_n17': (367.43, 145.29),
            'pi0': (580.22, 177.96),
            'smolvla': (205.95, 109.44),
        },
    ),
    'orin-nano': (
        _REPORT.format('orin-nano'),
        {
            'evo1': (3551.56, 2667.63),
            'groot_n15': (1182.67, 299.38),
            'pi0': (1484.75, 300.92),
            'smolvla': (509.60, 284.03),
        },
    ),
    'rtx-3060': (
        _REPORT.format('rtx-3060'),
        {
            'evo1': (486.74, 348.75),
            'groot_n15': (203.73, 51.09),
            'groot_n17': (139.89, 44.63),
            'pi0': (261.58, 49.94),
            'smolvla': (99.31, 42.94),
        },
    ),
    'rtx-5090': (
        _README,
        {
            'evo1': (55.2, 17.8),
            'groot_n15': (29.4, 5.9),
            'groot_n17': (33.4, 6.2),
            'pi0': (52.1, 11.6),
            'pi05': (56.1, 11.4),
            'smolvla': (49.6, 16.1),
        },
    ),
}


def published_runs(model: str, device: str) -> Sequence[PublishedRun]:
    """Return what others measured of a published size on a device of the table; may be empty.

    Args:
        model: name of a published size.
        device: a key of `DEVICES`.
    """
    source, times = _VLA_CPP.get(device, ('', {}))
    if model not in times:
        return ()
    total, vision = times[model]
    return (PublishedRun('vla.cpp', total, vision, source),)
