#!/usr/bin/env bash
# Compiles every kernel source here to PTX, with clang from Debian main and no
# NVIDIA software. The PTX is committed; CI runs this and fails on a difference.
# Products are rounded before they are added: nothing is contracted.
set -euo pipefail
cd "$(dirname "$0")"
clang=${CLANG:-clang-16}
for source in *.cu; do
  "$clang" -x cuda -nocudainc -nocudalib --cuda-device-only -std=c++17 -ffp-contract=off \
    --cuda-gpu-arch=sm_80 --cuda-feature=+ptx75 -Xclang -target-feature -Xclang +ptx75 \
    -O3 -S "$source" -o "${source%.cu}.ptx"
done
