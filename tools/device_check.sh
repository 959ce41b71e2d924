#!/usr/bin/env bash
# Measures this machine's claims in one go: are the kernels right here, and how fast are they and the engine?
#
#     git clone ... potok && cd potok && tools/device_check.sh
#
# About ten minutes on two cores, and less on more; each part may take so long and no longer. Stop everything else
# first. Figures are added to benchmarks/results; everything that was printed is in build/device-check.txt.
set -uo pipefail
cd "$(dirname "$0")/.."
mkdir -p build
exec > >(tee build/device-check.txt) 2>&1

failed=()

part() { # seconds, title, command...
    local seconds=$1 title=$2 started=$SECONDS
    shift 2
    printf '\n=== %s\n$ %s\n' "$title" "$*"
    if timeout --kill-after=10 "$seconds" "$@"; then
        printf -- '--- %s: done in %d s\n' "$title" $((SECONDS - started))
    else
        printf -- '--- %s: FAILED with %d after %d s\n' "$title" $? $((SECONDS - started))
        failed+=("$title")
    fi
}

python=.venv/bin/python
results=benchmarks/results

printf '=== machine\n'
grep -m1 'model name' /proc/cpuinfo
grep -m1 -E '^(flags|Features)' /proc/cpuinfo | tr ' ' '\n' | grep -E '^(avx2|avx_vnni|avx512f|avx512_vnni|amx_)' | tr '\n' ' '
printf '\n%s, load %s, huge pages %s\n' "$(nproc) cores" "$(cut -d' ' -f1 /proc/loadavg)" \
    "$(cat /sys/kernel/mm/transparent_hugepage/enabled 2>/dev/null)"

part 900 "build, outside the ten minutes" make .venv/dev
tables=$($python -c 'from potok._native import supported_isas; print(*supported_isas())') || exit 1
printf 'tables of kernels, best first: %s\n' "$tables"

part 240 "every table gives the scalar table's bits" $python -m pytest -q tests/kernels
part 180 "single kernels" $python benchmarks/kernels.py --rounds 3 --save
for table in $tables; do
    [ "$table" = scalar ] || part 90 "engine, default model, $table" env POTOK_ISA="$table" .venv/bin/potok bench engine \
        --requests 1,8,32,100 --output-tokens 32 --json $results/engine.jsonl
done
for shape in qwen2.5-0.5b llama-3.2-1b; do
    part 120 "make the shape $shape" make "build/models/$shape.gguf"
    part 180 "engine, $shape" .venv/bin/potok bench engine "build/models/$shape.gguf" \
        --requests 1,8,32,100 --output-tokens 32 --json $results/engine.jsonl
done
part 120 "engine, 8,000 tokens deep" .venv/bin/potok bench engine \
    --requests 1 --prompt-tokens 8000 --output-tokens 64 --long-prompt-tokens 8000 --json $results/engine.jsonl
part 120 "HTTP against in process" .venv/bin/potok bench http --rounds 2 --json $results/http.jsonl

printf '\n=== %s\n' "$([ ${#failed[@]} = 0 ] && echo "all parts done" || printf 'FAILED: %s; ' "${failed[@]}")"
exit $((${#failed[@]} > 0))
