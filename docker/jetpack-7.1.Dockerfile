# JetPack 7.0 and 7.1 (Thor): CUDA 13.0, TensorRT 10.13, Ubuntu 24.04, ROS 2 Jazzy, PyTorch.
# Build on the Jetson, from the project's root:
#
#     docker build -f docker/jetpack-7.1.Dockerfile -t vla_runtime:jetpack-7.1 .
#     docker run --rm --runtime nvidia --network host --ipc host vla_runtime:jetpack-7.1
#
# It ends with the self-test, which says what is missing. Not yet built on a Jetson.
ARG BASE=nvcr.io/nvidia/pytorch:25.08-py3
FROM ${BASE}

SHELL ["/bin/bash", "-eo", "pipefail", "-c"]
ENV DEBIAN_FRONTEND=noninteractive LANG=C.UTF-8 PYTHONUNBUFFERED=1

RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates curl python3-pip \
    && curl -fsSL https://raw.githubusercontent.com/ros/rosdistro/master/ros.key \
        -o /usr/share/keyrings/ros-archive-keyring.gpg \
    && echo "deb [signed-by=/usr/share/keyrings/ros-archive-keyring.gpg] http://packages.ros.org/ros2/ubuntu noble main" \
        > /etc/apt/sources.list.d/ros2.list \
    && apt-get update \
    && apt-get install -y --no-install-recommends ros-jazzy-ros-base ros-jazzy-cv-bridge \
        ros-jazzy-trajectory-msgs ros-jazzy-diagnostic-msgs \
        ros-jazzy-rosidl-default-generators python3-colcon-common-extensions \
        python3-numpy python3-yaml \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /workspace
COPY . src/vla_runtime

# cuda-bindings of the driver's major version; TensorRT is the image's.
# The image's /etc/pip/constraint.txt pins its own packages, which may contradict versions.txt.
# Some that apt brought are replaced by newer ones, and pip cannot uninstall those of apt. What pip
# brought goes first: files of two releases of NumPy or OpenCV in one folder cannot be imported.
RUN for package in numpy opencv-python opencv-python-headless opencv; do \
        python3 -m pip uninstall -y --break-system-packages $package || true; \
    done \
    && PIP_CONSTRAINT= python3 -m pip install --break-system-packages --ignore-installed \
        --no-cache-dir \
        -c src/vla_runtime/requirements/versions.txt \
        -c src/vla_runtime/requirements/sourced-ros.txt \
        'cuda-bindings==13.*' opencv-python-headless safetensors sentencepiece tokenizers rosbags \
        pillow tqdm transforms3d jinja2 \
    && python3 -c 'import cv2, numpy, torch; torch.ones(2).numpy(); print(numpy.__version__)' \
    && python3 -c 'import importlib.util, sys; sys.exit(not importlib.util.find_spec("tensorrt") and "the image has no Python package tensorrt: give another BASE")'

RUN source /opt/ros/jazzy/setup.bash \
    && colcon build --base-paths src src/vla_runtime/interfaces \
        --packages-select vla_interfaces vla_runtime

ENV RMW_IMPLEMENTATION=rmw_fastrtps_cpp
CMD ["/bin/bash", "-c", "source /workspace/install/setup.bash && vla_runtime selftest --device tensorrt"]
