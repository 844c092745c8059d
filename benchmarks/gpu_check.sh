#!/usr/bin/env bash
# What only a GPU can show, the most useful first, in about a quarter of an hour:
#
#     benchmarks/gpu_check.sh [BUDGET]
#
# Agreement with the CPU, the speed of the loss and of training, then the short study for BUDGET (9m), whose runs go on
# where an earlier call left them. It needs CIFAR-100 (see data/DATASHEET.md). PYTHON names another interpreter, RESULTS
# another folder for the results.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
budget=${1:-9m}
python=${PYTHON:-python3}
results=${RESULTS:-data/results}
study=studies/cifar100-gpu-short.toml
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

"$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' \
  || { echo "$python finds no torch that can use a GPU: install one, or name another interpreter in PYTHON"; exit 2; }

failed=()
check() {
  echo "== ${SECONDS} s: $1"
  "${@:2}" || failed+=("$1")
}
study() {
  "$python" -m mr2_core run "$study" --device cuda --budget "$budget" --results "$results"
  [ $? -eq 0 -o $? -eq 3 ] # 3: some runs are still missing
}
check "agreement with the CPU" "$python" -m pytest -q -p no:cacheprovider tests/test_gpu.py
check "speed of the loss" "$python" benchmarks/loss_speed.py
check "speed of training" "$python" benchmarks/train_speed.py
check "short study" study
check "its table" "$python" -m mr2_core report "$study" --results "$results"
echo "== ${SECONDS} s"
[ ${#failed[@]} -eq 0 ] || { printf 'failed: %s\n' "${failed[@]}"; exit 1; }
