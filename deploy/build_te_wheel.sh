#!/bin/sh
# Builds the wheel of TransformerEngine's extension for torch, of which PyPI has the source alone.
#
#   deploy/build_te_wheel.sh gpu dist
#
# It holds no device code, which is in the wheel of transformer-engine-cu13: a C++ compiler and Python's headers are
# enough, without nvcc's compiler, a CUDA toolkit or a GPU. MAX_JOBS compilers run side by side; each takes up to 2 GB.
# A wheel that the folder already holds for this Python and this torch is kept.
set -eu

stack=$1
mkdir -p "$2"
wheels=$(cd "$2" && pwd)
pins=$(python3 "$(dirname "$0")/make_lock.py" "$stack")
pin() { echo "$pins" | grep "^$1=="; }
# The wheel fits one torch alone, so the number of its build is torch's: 213 for 2.13.
number=$(pin torch | sed 's/torch==\([0-9]*\)\.\([0-9]*\).*/\1\2/')
version=$(pin transformer-engine-torch | sed 's/.*==//')
python=$(python3 -c 'import sys; print("cp%d%d" % sys.version_info[:2])')
set -- "$wheels/transformer_engine_torch-$version-$number-$python-"*.whl
if [ -e "$1" ]; then
    exit
fi

venv=$(mktemp -d)
trap 'rm -rf "$venv"' EXIT
python3 -m venv "$venv"
pip="$venv/bin/pip --disable-pip-version-check --quiet"
# torch brings its own libraries of CUDA, with headers. Of nvcc the build wants the version and headers.
$pip install ninja packaging pybind11==3.1.0 pydantic setuptools wheel==0.48.0 "$(pin torch)" "$(pin numpy)" \
    "$(pin nvidia-cuda-cccl)" "$(pin nvidia-cuda-crt)" "$(pin nvidia-cuda-nvcc)" "$(pin nvidia-nvvm)"
site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("platlib"))')
export CUDA_HOME="$site/nvidia/cu13" NVTE_CUDA_INCLUDE_PATH="$site/nvidia/cu13/include"
export CPATH="$site/nvidia/cudnn/include:$site/nvidia/nccl/include:$site/nvidia/cu13/include/cccl"
export NVTE_FRAMEWORK=pytorch NVTE_PYTORCH_FORCE_BUILD=TRUE MAX_JOBS="${MAX_JOBS:-$(nproc)}"
$pip wheel --no-deps --no-build-isolation --wheel-dir "$venv" "$(pin transformer-engine-torch)"
"$venv/bin/python" -m wheel tags --build "$number" --remove "$venv"/transformer_engine_torch-*.whl
mv "$venv"/transformer_engine_torch-*.whl "$wheels"
