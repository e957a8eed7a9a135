"""Takes the pictures of docs/howto/view.md: the live page and that of a recording, wide and narrow.

    ./run exec pip install playwright
    ./run exec python docs/make_view_pictures.py

It runs the demo with its page, and then the page of the demo's bag, and opens both in a Chromium
that is installed (Debian: apt install chromium). Without a GPU a picture takes a minute.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

from vla_runtime.processes.domains import claim_domain

FOLDER = Path(__file__).resolve().parent / 'howto'
WIDTHS = {1280: 900, 390: 844}
# A browser that draws without a GPU on a busy machine.
PATIENCE_S = 240.0
SETTLED_S = 30.0
FLAGS = [
    '--no-sandbox',
    '--disable-quic',
    '--no-first-run',
    '--disable-background-networking',
    '--disable-component-update',
    '--disable-sync',
    '--use-gl=angle',
    '--use-angle=swiftshader',
    '--enable-unsafe-swiftshader',
]
MOVING = "now && now.state === 'moving' && cameras.every((one) => one.image.naturalWidth)"
SHOWN = 'now && cameras.every((one) => one.image.naturalWidth)'
SCENE = "document.querySelector('.scene iframe')?.contentDocument?.querySelector('canvas')"


@contextmanager
def running(*arguments: str) -> Iterator[str]:
    """Run a verb of `vla_runtime` until the block ends; yields the address of its page."""
    process = subprocess.Popen(
        [sys.executable, '-m', 'vla_runtime', *arguments], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if found := re.search(r'(?:page|ready): (http://\S+)', line):
                yield found[1]
                return
        raise RuntimeError(f'{arguments[0]} ended without a page')
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate()


def opened(browser: Browser, address: str, width: int) -> Page:
    """Open a page at a width, as soon as somebody serves it."""
    page = browser.new_page(viewport={'width': width, 'height': WIDTHS[width]})
    page.set_default_timeout(PATIENCE_S * 1e3)
    end_s = time.monotonic() + PATIENCE_S
    while True:
        try:
            page.goto(address)
            return page
        except Exception:
            if time.monotonic() > end_s:
                raise
            time.sleep(1.0)


def take(page: Page, wanted: str, name: str) -> None:
    """Wait until the page shows what is wanted, and write its picture."""
    page.wait_for_function(f'{SCENE} && {wanted}')
    time.sleep(SETTLED_S)
    page.wait_for_function(wanted)
    data = page.screenshot(full_page=True)
    picture = Image.open(io.BytesIO(data)).convert('RGB')
    path = FOLDER / name
    picture.save(path, optimize=True)
    print(f'{path.name}: {path.stat().st_size / 1000:.0f} kB, {picture.width}x{picture.height}')
    page.close()


def main() -> None:
    os.environ['ROS_DOMAIN_ID'] = str(claim_domain())
    chromium = shutil.which('chromium') or shutil.which('chromium-browser')
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        out = Path(folder) / 'demo'
        with running('demo', '--seconds', '900', '--out', str(out), '--view', '8095') as address:
            for width in WIDTHS:
                take(opened(browser, address, width), MOVING, f'view_live_{width}.png')
        with running('view', str(out / 'bag'), '--port', '8096') as address:
            for width in WIDTHS:
                page = opened(browser, address, width)
                page.wait_for_function('hello && now && socket.readyState === 1')
                # In the middle, and there at a moment of motion.
                page.evaluate("socket.send(JSON.stringify({do: 'seek', at: hello.length_s / 2}))")
                page.evaluate("socket.send(JSON.stringify({do: 'play'}))")
                page.wait_for_function("now.state === 'moving'")
                page.evaluate("socket.send(JSON.stringify({do: 'pause'}))")
                take(page, SHOWN, f'view_bag_{width}.png')
        browser.close()


if __name__ == '__main__':
    main()
