"""Time from three camera images to pixels, on one core.

The target is 5 ms for three images of 480x640 (the design's budget for a 30 Hz robot).

    python benchmark/images.py [--size 224] [--repeats 200]
"""

from __future__ import annotations

import argparse
import os
from time import perf_counter

# One core, said before the libraries that count cores are loaded.
if hasattr(os, 'sched_setaffinity'):
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})

import numpy as np
from measurement import percentiles, write_result

from vla_runtime.processing.images import to_pixels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--size', type=int, default=224, help='pixels a side (default: 224)')
    parser.add_argument('--repeats', type=int, default=200, help='measured rounds (default: 200)')
    arguments = parser.parse_args()

    random = np.random.default_rng(0)
    images = [random.integers(0, 256, (480, 640, 3), dtype=np.uint8) for _ in range(3)]
    out = np.empty((3, 3, arguments.size, arguments.size), dtype=np.float32)
    figures = {}
    for resample in ('bilinear', 'antialias'):
        samples = []
        for round_ in range(arguments.repeats + 10):
            start = perf_counter()
            for image, pixels in zip(images, out, strict=True):
                to_pixels(image, arguments.size, padding='centre', resample=resample, out=pixels)
            if round_ >= 10:
                samples.append((perf_counter() - start) * 1e3)
        figures[f'{resample}_ms'] = percentiles(samples)
        shown = figures[f'{resample}_ms']
        print(f'{resample:10s} median {shown["median"]:6.2f} ms   p95 {shown["p95"]:6.2f} ms')
    print('wrote', write_result('images', figures, ['numpy', 'opencv-python-headless']))


if __name__ == '__main__':
    main()
