# JetPack 6.1 and 6.2 (Orin): CUDA 12.6, TensorRT 10.3, Ubuntu 22.04, ROS 2 Humble. No PyTorch.
# Build on the Jetson, from the project's root:
#
#     docker build -f docker/jetpack-6.2.Dockerfile -t vla_runtime:jetpack-6.2 .
#     docker run --rm --runtime nvidia --network host --ipc host vla_runtime:jetpack-6.2
#
# It ends with the self-test, which says what is missing. Not yet built on a Jetson.
ARG BASE=nvcr.io/nvidia/l4t-jetpack:r36.4.0
FROM ${BASE}

SHELL ["/bin/bash", "-eo", "pipefail", "-c"]
ENV DEBIAN_FRONTEND=noninteractive LANG=C.UTF-8 PYTHONUNBUFFERED=1

RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates curl python3-pip \
    && curl -fsSL https://raw.githubusercontent.com/ros/rosdistro/master/ros.key \
        -o /usr/share/keyrings/ros-archive-keyring.gpg \
    && echo "deb [signed-by=/usr/share/keyrings/ros-archive-keyring.gpg] http://packages.ros.org/ros2/ubuntu jammy main" \
        > /etc/apt/sources.list.d/ros2.list \
    && apt-get update \
    && apt-get install -y --no-install-recommends ros-humble-ros-base ros-humble-cv-bridge \
        ros-humble-trajectory-msgs ros-humble-diagnostic-msgs \
        ros-humble-rosidl-default-generators python3-colcon-common-extensions \
        python3-numpy python3-yaml \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /workspace
COPY . src/vla_runtime

# cuda-bindings of the driver's major version; TensorRT is the image's.
RUN python3 -m pip install --no-cache-dir \
        -c src/vla_runtime/requirements/versions.txt \
        -c src/vla_runtime/requirements/sourced-ros.txt \
        'cuda-bindings==12.9.*' opencv-python-headless safetensors sentencepiece tokenizers rosbags \
        pillow tqdm transforms3d jinja2 \
    && python3 -c 'import cv2, numpy; print(numpy.__version__)' \
    && python3 -c 'import importlib.util, sys; sys.exit(not importlib.util.find_spec("tensorrt") and "the image has no Python package tensorrt: apt-get install python3-libnvinfer")'

RUN source /opt/ros/humble/setup.bash \
    && colcon build --base-paths src src/vla_runtime/interfaces \
        --packages-select vla_interfaces vla_runtime

ENV RMW_IMPLEMENTATION=rmw_fastrtps_cpp
CMD ["/bin/bash", "-c", "source /workspace/install/setup.bash && vla_runtime selftest --device tensorrt"]
