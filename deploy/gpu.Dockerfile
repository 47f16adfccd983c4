# Trainer and rollout server for NVIDIA GPUs. Never built as a whole so far: docs/guides/deployment.md says what was
# tested.
#
#   docker build --file deploy/gpu.Dockerfile --tag slipstream:gpu .

# Debian with Python 3.12 as `python`; CUDA and cuDNN come as wheels. A host without Docker Hub names an image of its own.
ARG PYTHON_IMAGE=python:3.12-slim-bookworm
FROM ${PYTHON_IMAGE} AS build
# A stack of docs/support.md: gpu-measured or gpu.
ARG STACK=gpu-measured
ARG MAX_JOBS=8
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN apt-get update && apt-get install --yes --no-install-recommends g++
COPY requirements/common.txt requirements/gpu.txt requirements/gpu-measured.txt /build/requirements/
# With the wheel of TransformerEngine's extension from dist/ where it is there, nothing is compiled.
COPY deploy/build_te_wheel.sh deploy/make_lock.py dist/transformer_engine_torch-*.whl /build/deploy/
RUN /build/deploy/build_te_wheel.sh ${STACK} /build/deploy
RUN python -m venv /opt/slipstream
ENV PATH=/opt/slipstream/bin:$PATH
RUN python /build/deploy/make_lock.py ${STACK} > /build/pins.txt \
    && pip install --no-deps --find-links /build/deploy --requirement /build/pins.txt \
    && python -c "import transformer_engine.pytorch, megatron.core, vllm.v1.engine.core"
COPY pyproject.toml README.md LICENSE /build/
COPY protos /build/protos
COPY core /build/core
COPY client /build/client
COPY environments /build/environments
COPY rollout_server /build/rollout_server
COPY learner /build/learner
COPY extensions /build/extensions
RUN pip install --no-deps /build

FROM ${PYTHON_IMAGE}
# vLLM and Triton compile at run time.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ libibverbs1 libnuma1 librdmacm1 \
    && apt-get clean && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/slipstream /opt/slipstream
RUN useradd --uid 1000 --create-home slipstream \
    && install --directory --mode 1777 /cache \
    && install --directory /environments /models /runs
# NVIDIA_DRIVER_CAPABILITIES: which of the driver's libraries NVIDIA's Container Toolkit brings in.
# VLLM_USE_FLASHINFER_SAMPLER: its kernels would be compiled at the first request.
ENV PATH=/opt/slipstream/bin:$PATH \
    HOME=/tmp \
    XDG_CACHE_HOME=/cache \
    VLLM_CACHE_ROOT=/cache/vllm \
    TORCHINDUCTOR_CACHE_DIR=/cache/inductor \
    TRITON_CACHE_DIR=/cache/triton \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    CUDNN_HOME=/opt/slipstream/lib/python3.12/site-packages/nvidia/cudnn \
    LD_LIBRARY_PATH=/opt/slipstream/lib/python3.12/site-packages/nvidia/cudnn/lib \
    VLLM_USE_FLASHINFER_SAMPLER=0
USER slipstream
WORKDIR /environments
CMD ["slipstream", "--help"]
