#!/usr/bin/env bash
# All that a machine with a GPU is asked in one go: the tests, then errors and times; everything lands in DIR.
#   PYTHONPATH=.:.peers bash bench/gpu_session.sh DIR [tests|accuracy|times|configs|cpu ...]
set -uo pipefail
cd "$(dirname "$0")/.."
out=$1; shift
parts=${*:-tests accuracy times cpu}
export PYTHONUNBUFFERED=1
mkdir -p "$out"

part() {  # name, seconds at most, command
    local name=$1 most=$2 begin=$SECONDS; shift 2
    [[ " $parts " == *" ${name%%-*} "* ]] || return 0
    timeout "$most" "$@" > "$out/$name.log" 2>&1
    echo "== $name: exit $?, $((SECONDS - begin)) s"
    tail -n 12 "$out/$name.log"
}

part tests-kernels 300 python3 -m pytest tests -q -n 16 --ignore tests/triton_cpu
part tests-cpu 150 python3 -m pytest tests/triton_cpu -q -n 14
part tests-amx 90 env CUDA_VISIBLE_DEVICES= KDA_CPU_ISA=amx OMP_NUM_THREADS=1 \
    python3 -m pytest tests/test_chunk.py tests/test_norm.py tests/test_layer.py -q -n 16
part accuracy 90 python3 bench/gpu.py --out "$out" --part accuracy --peers flashkda
part times-prefill 120 python3 bench/gpu.py --out "$out" --part prefill --peers flashkda
part times-layer 60 python3 bench/gpu.py --out "$out" --part layer
part times-decode 60 python3 bench/gpu.py --out "$out" --part decode --peers vllm
part times-ops 90 python3 bench/gpu.py --out "$out" --part ops --peers vllm
part configs 570 python3 -m kda tune --minutes 9 --jobs 14 --out "$out/tune"
part cpu-isa 120 python3 bench/cpu.py --out "$out" --threads 16 --part isa --isa amx,avx512bf16,avx512 --seconds 1 --no-compile
