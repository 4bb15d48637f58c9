#!/usr/bin/env bash
# Compiles every kernel source of the repository to PTX beside it, with clang from
# Debian main and no NVIDIA software. It is compressed, but for that of examples. The PTX is committed; CI runs this and fails
# on a difference. It is for compute capability 8.0 and newer. In the sparse kernels products are rounded before they are added:
# nothing is contracted.
set -euo pipefail
cd "$(dirname "$0")/../../.."
clang=${CLANG:-clang-16}
for source in runtime/cuda/kernels/*.cu comm/p2p/kernels/*.cu delta/kernels/*.cu examples/*/*.cu; do
  contract=fast
  if [[ $source == runtime/* || $source == delta/* ]]; then contract=off; fi
  "$clang" -x cuda -std=c++17 -nocudainc -nocudalib --cuda-device-only -ffp-contract=$contract -Iruntime/cuda/kernels \
    --cuda-gpu-arch=sm_80 --cuda-feature=+ptx75 -Xclang -target-feature -Xclang +ptx75 \
    -O3 -S "$source" -o "${source%.cu}.ptx"
  if [[ $source != examples/* ]]; then gzip -nf9 "${source%.cu}.ptx"; fi
done
