#!/usr/bin/env bash
# Everything that benches/gpu.sh needs on a machine with a GPU and no network, in one folder: `gpu.sh OUT --bundle DIR`.
#
#   cargo build --release && benches/gpu/bundle.sh DIR [ARCH]        ARCH: sm_90a
#
# Needs strip and xz; for compiled kernels an NVRTC (KVSIEVE_NVRTC) of the version that is there; for FlashAttention-3 pip.
# Without one of the last two it says so and goes on: kernels are then compiled there, and that peer is absent.
set -euo pipefail
[ $# -ge 1 ] || { echo "usage: bundle.sh DIR [ARCH]" >&2; exit 2; }
dir=$1 arch=${2:-sm_90a}
binary=$(dirname "$0")/../../target/release/kvsieve
test -x "$binary" || { echo "bundle.sh: $binary is not there: cargo build --release" >&2; exit 2; }
mkdir -p "$dir"
rm -rf "$dir"/{kvsieve,kvsieve.xz,kernels}
"$binary" kernels build --arch "$arch" --cache "$dir/kernels" || echo "no compiled kernels for $arch" >&2
strip -s -o "$dir/kvsieve" "$binary"
xz -9 "$dir/kvsieve"
python3 -m pip download --quiet --no-deps --only-binary=:all: --implementation cp --python-version 3.12 \
    --platform manylinux_2_24_x86_64 --dest "$dir" fa3-fwd==0.0.3 || echo "no FlashAttention-3" >&2
du -sh "$dir"/*
