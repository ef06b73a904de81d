#!/usr/bin/env bash
# The first half hour on a card: is the output right, what does a step take, what does speculation gain.
#
#     bash bench/gpu.sh [OUT]              on the card, or on the processor where there is none
#     MODEL=folder NEW=8 bash bench/gpu.sh a short run of the script itself
#
# It runs in a clone whose environment `make check` has made (PYTHON names another). Every part has its own log and its
# own time limit, 29 minutes together, and a part that fails does not end the run. The last lines say which failed.
set -uo pipefail
cd "$(dirname "$0")/.."
only=
if [ "${1:-}" = --only ]; then  # the script calls itself for each part, because `timeout` runs no shell functions
  only=$2
  shift 2
else
  export OUT=${1:-build/gpu}
fi
out=${OUT:-build/gpu}
python=${PYTHON:-.venv/bin/python}
model=${MODEL:-demo}
new=${NEW:-64}
export DEVICE=${DEVICE:-$("$python" -c 'import torch; print("cuda" if torch.cuda.is_available() else "cpu")')}
device=$DEVICE
mkdir -p "$out"

part() {  # part MINUTES FUNCTION [ARGUMENT]
  local minutes=$1 name=$2${3:+-$3}
  shift
  echo "== $name (at most $minutes min)"
  if timeout "$((minutes * 60))" bash bench/gpu.sh --only "$@" >"$out/$name.log" 2>&1; then
    tail -n 4 "$out/$name.log"
  else
    echo "failed with $?: $out/$name.log"
    tail -n 4 "$out/$name.log"
    failed+=("$name")
  fi
}

run() {  # run ARGUMENT…: ssd-run
  "$python" -c 'from ssd_runtime.commands.run import main; main()' "$@"
}

cat >"$out/prompts.jsonl" <<'PROMPTS'
{"id": "story", "prompt": "Tell a short story about a lighthouse keeper and his dog."}
{"id": "copy", "prompt": "Repeat this list three times: apples, pears, plums, cherries, quinces."}
{"id": "code", "prompt": "Write a Python function that returns the n-th Fibonacci number, and explain it."}
{"id": "sum", "prompt": "Ada has nine apples, gives three away and buys five more. How many has she? Reason step by step."}
PROMPTS
compare=(--prompts "$out/prompts.jsonl" --model "$model" --device "$device" --max-new-tokens "$new" --compare --json)

machine() {
  "$python" -c 'import platform, torch, transformers
print(platform.platform(), "torch", torch.__version__, "transformers", transformers.__version__)
print(torch.cuda.get_device_name() if torch.cuda.is_available() else "no card: the processor runs instead")'
  git log -1 --oneline
  command -v nvidia-smi >/dev/null && nvidia-smi
  return 0
}

equality() {  # equality DTYPE: ends with an error where an output is not plain decoding's
  local strategy code=0
  for strategy in plain lookup clasp swift exit; do
    echo "$strategy in $1"
    run "${compare[@]}" --dtype "$1" --strategy "$strategy" | tail -n 1 || code=1
  done
  return "$code"
}

steps() {
  "$python" -m bench.roofline "$model" --weights dense --dtype "$1" --device "$device" --rounds 5
}

planted() {  # layers that are known to be skippable: what a search finds, and what it gains
  "$python" -m bench.fixtures.planted --model "$model" --epsilon 0.05 --out "$out/planted" &&
    "$python" -c 'from ssd_compiler.cli import main; main()' --model "$out/planted" --domains cnn --evaluations 8 \
      --budget 5m --device "$device" --out "$out/bundle" &&
    run --artifact "$out/bundle" --prompts "$out/prompts.jsonl" --device "$device" --max-new-tokens "$new" --compare --json
}

together() {
  run "${compare[@]}" --strategy auto --concurrency 4
}

tests() {
  "$python" -m pytest tests/runtime/model/test_card.py tests/runtime/model/test_parity.py -x
}

if [ -n "$only" ]; then
  "$only" "$@"
  exit
fi
failed=()
part 1 machine
part 5 tests
for dtype in fp32 bf16 $([ "$device" = cpu ] || echo fp16); do
  part 3 equality "$dtype"
  part 1 steps "$dtype"
done
part 2 together
part 9 planted
echo "failed: ${failed[*]:-nothing}"
[ "${#failed[@]}" -eq 0 ]
