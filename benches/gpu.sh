#!/usr/bin/env bash
# Everything there is to do on a machine with a GPU, in 8 minutes: are the kernels right, how fast are they, where does the
# memory end. Needs the binary, NVRTC, and Python 3 with its standard library; uses PyTorch, Triton's tutorial kernel
# (KVSIEVE_TRITON=06-fused-attention.py), cuBLAS and compute-sanitizer where they are.
#
#   benches/gpu.sh [KVSIEVE [FOLDER]]     default: target/release/kvsieve, results/gpu
#
# Writes FOLDER/*.jsonl, FOLDER/summary.md, and the folders of the runs with their figures. Exit status 1 when a kernel is
# wrong. KVSIEVE_GPU_SIZES=tiny goes through all of it with sizes for the emulated device, whose times mean nothing.
set -euo pipefail
exec python3 "$(dirname "$0")/gpu/run.py" "${1:-target/release/kvsieve}" "${2:-results/gpu}"
