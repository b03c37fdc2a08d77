#!/usr/bin/env bash
# All that a machine with a GPU is asked in one go: the tests, then errors and times; everything lands in DIR.
#   PYTHONPATH=.:.peers bash bench/gpu_session.sh DIR [tests|bench|configs|cpu ...]
set -uo pipefail
cd "$(dirname "$0")/.."
out=$1; shift
parts=${*:-tests bench cpu}
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
part bench 540 python3 -m kda bench --out "$out/bench" --minutes 8
part configs 570 python3 -m kda tune --minutes 9 --jobs 14 --out "$out/tune"
part cpu 420 python3 -m kda bench --device cpu --threads 16 --minutes 6 --out "$out/bench-cpu"
