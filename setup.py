"""Installs the package the same way for pip and for colcon.

Requirements are ranges here; the exact versions that the tests run with are in requirements/.
"""

import re
from pathlib import Path
from xml.etree import ElementTree

from setuptools import find_packages, setup

PACKAGE = 'vla_runtime'
# What a robot runs; bundles made from checkpoints; tools; a simulated robot with its training.
PACKAGES = (PACKAGE, 'vla_convert', 'vla_tools', 'vla_tabletop')
# `colcon build --symlink-install` runs a link to this file in its build folder.
ROOT = Path(__file__).resolve().parent
# What ships in engines/; ./run reads this line.
BUNDLES = ('demo', 'demo_act', 'demo_diffusion', 'demo_pi0_fast', 'demo_smolvla')
NODES = ('policy_node', 'executor_node', 'recorder_node', 'task_node', 'tabletop_node')


# Maintainer and addresses stand in package.xml alone.
MANIFEST = ElementTree.parse(ROOT / 'package.xml').getroot()
URL_NAMES = {'repository': 'Source', 'bugtracker': 'Tracker', 'website': 'Homepage'}
# TensorRT's backend reaches the driver through it, see engines/cuda_driver.py. cuda-python would
# bring the same and more beside it, such as a newer NumPy than JetPack's.
CUDA_BINDINGS = 'cuda-bindings>=12.9.1,<14'
# The page of a robot or a recording: `vla_runtime view`.
VIEW = [
    'markdown-it-py>=2.2',
    'rich>=13',
    'rosbags>=0.10',
    'starlette>=0.40',
    'uvicorn>=0.54',
    'viser>=1.0',
    'websockets>=15',
    'yourdfpy>=0.0.56',
]
# uvicorn that pauses a client while its requests wait, and asks after it with pings. It runs on
# uvloop where that is installed, which takes 0.8 ms less for a message with three images.
SERVE = [
    'msgpack>=1.0',
    'prometheus-client>=0.17',
    'pyzmq>=25',
    'starlette>=0.40',
    'uvicorn>=0.54',
    'uvloop>=0.19',
    'websockets>=13',
]


def version():
    text = (ROOT / PACKAGE / '__init__.py').read_text(encoding='utf-8')
    return re.search(r"__version__ = '([^']+)'", text).group(1)


def share(folder):
    """Data files of a folder and its subfolders, for share/vla_runtime."""
    found = {}
    for path in sorted((ROOT / folder).rglob('*')):
        if path.is_file() and '__pycache__' not in path.parts:
            file = path.relative_to(ROOT)
            found.setdefault(f'share/{PACKAGE}/{file.parent}', []).append(str(file))
    return list(found.items())


setup(
    version=version(),
    description='Vision-language-action policies on ROS 2 robots',
    keywords=['robotics', 'ROS 2', 'vision-language-action', 'VLA', 'pi0', 'pi0.5', 'manipulation'],
    classifiers=[
        'Development Status :: 3 - Alpha',
        'Intended Audience :: Developers',
        'Intended Audience :: Science/Research',
        'Operating System :: POSIX :: Linux',
        'Programming Language :: Python :: 3',
        'Programming Language :: Python :: 3.10',
        'Programming Language :: Python :: 3.11',
        'Programming Language :: Python :: 3.12',
        'Programming Language :: Python :: 3.13',
        'Topic :: Scientific/Engineering :: Artificial Intelligence',
    ],
    long_description=(ROOT / 'README.md').read_text(encoding='utf-8'),
    long_description_content_type='text/markdown',
    author=MANIFEST.findtext('maintainer'),
    author_email=MANIFEST.find('maintainer').get('email'),
    project_urls={URL_NAMES[url.get('type')]: url.text for url in MANIFEST.findall('url')},
    python_requires='>=3.10,<3.14',
    packages=find_packages(include=[*PACKAGES, *(f'{package}.*' for package in PACKAGES)]),
    package_data={
        f'{PACKAGE}.pages': ['*.css', '*.j2'],
        'vla_tools.performance': ['*.j2'],
        'vla_tools.replay': ['*.js', '*.j2'],
        'vla_tools.selftest': ['*.tar.xz'],
        'vla_tools.serve': ['*.j2'],
        'vla_tools.view': ['*.j2', '*.js'],
        'vla_tabletop.demo': ['*.j2'],
        'vla_tabletop.sim': ['*.xml'],
        'vla_tabletop.study': ['*.j2'],
    },
    data_files=[
        ('share/ament_index/resource_index/packages', [f'resource/{PACKAGE}']),
        (f'share/{PACKAGE}', ['package.xml']),
        (f'lib/{PACKAGE}', [f'scripts/{node}' for node in NODES]),
        *share('launch'),
        *share('config'),
        *share('interfaces'),
        # The chapters that the page of `view` leads to.
        *share('docs/howto'),
        *share('docs/reference'),
        *(files for bundle in BUNDLES for files in share(f'engines/{bundle}')),
    ],
    entry_points={
        'console_scripts': [
            f'{PACKAGE} = {PACKAGE}.cli.main:main',
            *(f'{node} = {PACKAGE}.nodes.node_main:{node}' for node in NODES),
        ],
    },
    # ROS 2 itself (rclpy and messages) is not named: it comes with the sourced installation, or
    # from requirements/wheels.txt.
    install_requires=[
        'jinja2>=3.0',
        'numpy>=1.26',
        'opencv-python-headless>=4.8',
        'pillow>=9',
        'pyyaml>=5.4',
        'safetensors>=0.4',
        'sentencepiece>=0.1.99',
        'tokenizers>=0.15',
        'tqdm>=4.60',
        'transforms3d>=0.4.1',
    ],
    extras_require={
        # All verbs but `ray`, `replay --rerun` and the tests, with PyTorch and the simulator.
        'all': [
            'argcomplete>=3.1',
            'av>=12',
            *SERVE,
            *VIEW,
            'huggingface_hub>=0.34',
            'matplotlib>=3.5',
            'mujoco>=3.1',
            'onnx>=1.15',
            'onnxruntime>=1.17',
            'pyarrow>=14',
            'pyopengl>=3.1.6',
            'rosbags>=0.10',
            'torch>=2.4',
        ],
        # Tab completion in a shell.
        'completion': ['argcomplete>=3.1'],
        'torch': ['torch>=2.4'],
        # PyTorch's CUDA build brings its own.
        'triton': ['triton>=3.0; sys_platform == "linux"'],
        'onnx': ['onnx>=1.15', 'onnxruntime>=1.17'],
        # A Jetson has TensorRT with JetPack, for its system Python.
        'tensorrt': ['tensorrt>=8.6; platform_machine == "x86_64"', CUDA_BINDINGS],
        # For RTX cards: NVIDIA's wheels, under its own licence.
        'tensorrt-rtx': [
            'tensorrt-rtx-cu13-bindings>=1.7,<2',
            'tensorrt-rtx-cu13-libs>=1.7,<2',
            CUDA_BINDINGS,
        ],
        'cuda': [CUDA_BINDINGS],
        'sim': ['mujoco>=3.1', 'pyopengl>=3.1.6'],
        # The recorder node, and replays.
        'record': ['rosbags>=0.10'],
        # Poses through the robot's joints; ROS 2's package pinocchio is the same.
        'kinematics': ['pin>=2.7'],
        # The command `hf download` of the README.
        'hub': ['huggingface_hub>=0.34'],
        # The pages as a site: ./run docs.
        'docs': ['myst-parser>=4', 'sphinx>=8.1', 'sphinx-rtd-theme>=3'],
        # Policies that run on another machine (backend `remote`).
        'remote': ['msgpack>=1.0', 'websockets>=15'],
        # Data sets of recordings.
        'dataset': ['pyarrow>=14', 'rosbags>=0.10'],
        # Camera frames of LeRobot's data sets, which are videos by default.
        'video': ['av>=12'],
        # replay and study --ray; 'client' is for ray:// addresses.
        'ray': ['ray[client]>=2.40'],
        # `replay --rerun`: recordings in the Rerun viewer.
        'rerun': ['rerun-sdk>=0.23', 'rosbags>=0.10'],
        'report': ['matplotlib>=3.5', 'rosbags>=0.10'],
        # Policies over the network: `vla_runtime serve`.
        'serve': SERVE,
        # Several replicas of one: `vla_runtime serve --ray`.
        'fleet': [*SERVE, 'ray[client,serve]>=2.49'],
        'view': VIEW,
        'test': [
            'hypothesis>=6.80',
            'mypy>=1.8',
            'psutil>=5.9',
            'pytest>=7.4',
            'pytest-xdist>=3.5',
            'ruff>=0.6',
        ],
    },
    zip_safe=False,
)
