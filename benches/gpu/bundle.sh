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
rm -f "$dir"/{kvsieve,kernels.tar,site.tar}.xz
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
# Machine code and a wheel's library are packed again: a tenth and a third of their size.
pack() { tar cf - -C "$scratch" "$1" | xz -T0 > "$dir/$1.tar.xz"; }
"$binary" kernels build --arch "$arch" --cache "$scratch/kernels" && pack kernels || echo "no compiled kernels for $arch" >&2
strip -s -o "$scratch/kvsieve" "$binary"
xz -T0 < "$scratch/kvsieve" > "$dir/kvsieve.xz"
python3 -m pip download --quiet --no-deps --only-binary=:all: --implementation cp --python-version 3.12 \
    --platform manylinux_2_24_x86_64 --dest "$scratch" fa3-fwd==0.0.3 &&
    python3 -m zipfile -e "$scratch"/*.whl "$scratch/site" && pack site || echo "no FlashAttention-3" >&2
du -sh "$dir"/*
