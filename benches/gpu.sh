#!/usr/bin/env bash
# Everything there is to do on a machine with a GPU that is reached for a short time; benches/gpu/README.md tells how.
#
#   benches/gpu.sh OUT [--part PART]... [--minutes 9] [--binary PATH | --bundle DIR] [--tiny]
#   benches/gpu.sh table OUT
#
# Each call goes on where the last one with the same OUT ended. Exit status: 0 all right, 1 something is wrong, and the last
# line names it, 2 wrong usage.
set -euo pipefail
exec python3 "$(dirname "$0")/gpu/main.py" "$@"
