#!/usr/bin/env bash
# The kernels on a GPU: correctness of each against the f64 reference first, then times, beside PyTorch's where it is.
# Needs the binary, Python 3 (its standard library) and NVRTC; nothing else of the repository.
#
#   benches/gpu.sh [KVSIEVE [FOLDER]]     default: target/release/kvsieve, results/gpu
#
# Writes FOLDER/check.jsonl and FOLDER/times.jsonl, one object for each pass, and prints a table. Stops with exit status
# 1 at the first kernel that is wrong.
set -euo pipefail
kvsieve=${1:-target/release/kvsieve}
out=${2:-results/gpu}
mkdir -p "$out"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$kvsieve" doctor | tee "$out/doctor.txt"

# Random tensors as a safetensors file: NAME B Hq Hkv Lq Lk D
make_input() {
    python3 - "$work/$1.safetensors" "${@:2}" <<'PY'
import array, json, random, struct, sys
path, (b, hq, hkv, lq, lk, d) = sys.argv[1], map(int, sys.argv[2:8])
random.seed(0)
# The upper half of an f32 is a bf16. Values are drawn from a table: the file may be large.
table = [struct.unpack("<I", struct.pack("<f", random.gauss(0, 1)))[0] >> 16 for _ in range(4096)]
header, data, at = {}, [], 0
for name, dims in (("q", [b, hq, lq, d]), ("k", [b, hkv, lk, d]), ("v", [b, hkv, lk, d])):
    count = dims[0] * dims[1] * dims[2] * dims[3]
    header[name] = {"dtype": "BF16", "shape": dims, "data_offsets": [at, at + 2 * count]}
    data.append(array.array("H", random.choices(table, k=count)))
    at += 2 * count
text = json.dumps(header).encode()
text += b" " * (-len(text) % 8)
with open(path, "wb") as file:
    file.write(struct.pack("<Q", len(text)) + text)
    for part in data:
        part.tofile(file)
PY
}

# attend FILE MOST_DRIFT INPUT OPTIONS...: one pass, its object appended to FILE
attend() {
    local file=$1 most=$2 input=$3
    shift 3
    "$kvsieve" attend --device cuda --input "$work/$input.safetensors" --output "$work/o.safetensors" --json "$work/one.json" "$@"
    python3 - "$work/one.json" "$file" "$most" <<'PY'
import json, sys
one = json.load(open(sys.argv[1]))
drift, most = one["drift"]["rel_l2"], float(sys.argv[3])
with open(sys.argv[2], "a") as file:
    file.write(json.dumps(one) + "\n")
shape = "B={batch} Hq={q_heads} Hkv={kv_heads} Lq={q_len} Lk={kv_len} D={head_dim} {dtype}".format(**one)
print(f"{one['kernel']:7} {shape:52} drift {drift:.1e}  {one['median_ns'] / 1e6:9.4f} ms  {one['flops_per_s'] / 1e12:7.1f} TFLOP/s")
if not drift <= most:
    sys.exit(f"WRONG: drift {drift:.1e} is above {most:.0e}")
PY
}

rm -f "$out/check.jsonl" "$out/times.jsonl"
echo "== correctness"
make_input a 2 4 2 130 190 64
make_input b 1 4 1 65 300 128
make_input c 1 3 3 37 83 96
make_input d 2 16 2 1 3000 128
for input in a b c d; do
    for mask in "" "--causal" "--causal --window 50" "--softcap 5"; do
        # shellcheck disable=SC2086 # the options are words
        for kernel in naive tiled decode; do
            attend "$out/check.jsonl" 8e-3 "$input" --kernel "$kernel" $mask
            attend "$out/check.jsonl" 1e-3 "$input" --kernel "$kernel" --dtype f16 $mask
        done
        # shellcheck disable=SC2086
        attend "$out/check.jsonl" 3e-6 "$input" --kernel naive --dtype f32 $mask
    done
done
if command -v compute-sanitizer > /dev/null; then
    for kernel in naive tiled decode; do
        compute-sanitizer --error-exitcode 1 "$kvsieve" attend --device cuda --input "$work/b.safetensors" \
            --output "$work/o.safetensors" --kernel "$kernel" --causal > "$out/sanitizer-$kernel.txt"
    done
fi

echo "== times (bf16, D 128; the GPU's own, median)"
for length in 2048 4096 8192 16384; do
    make_input t$((16384 / length)) $((16384 / length)) 16 16 "$length" "$length" 128
    attend "$out/times.jsonl" 8e-3 t$((16384 / length)) --kernel tiled --repeat 20
    attend "$out/times.jsonl" 8e-3 t$((16384 / length)) --kernel tiled --repeat 20 --causal
done
attend "$out/times.jsonl" 8e-3 t8 --kernel naive --repeat 5
make_input long 1 32 8 1 262144 128
attend "$out/times.jsonl" 8e-3 long --kernel decode --repeat 50

python3 - "$out/times.jsonl" <<'PY'
# The same forward passes by PyTorch, on the same GPU in the same minute.
import json, sys
try:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
except ImportError:
    sys.exit("PyTorch is not installed: no comparison")
for line in open(sys.argv[1]):
    one = json.loads(line)
    if one["kernel"] != "tiled":
        continue
    dims = [one["batch"], one["q_heads"], one["q_len"], one["head_dim"]]
    q, k, v = (torch.randn(dims, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        try:
            with sdpa_kernel(backend):
                samples = []
                for _ in range(25):
                    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                    start.record()
                    torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=one["causal"])
                    end.record()
                    torch.cuda.synchronize()
                    samples.append(start.elapsed_time(end))
        except RuntimeError as error:
            print(f"{backend.name}: {error}")
            continue
        median = sorted(samples[5:])[10]
        print(f"L={one['q_len']} causal={one['causal']}: {backend.name} {median:.4f} ms, tiled {median * 1e6 / one['median_ns']:.2f}x as fast")
PY
