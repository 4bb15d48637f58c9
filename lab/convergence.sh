#!/usr/bin/env bash
# Measures the data of the chapter "Convergence" in lab/results/sparse and prints its tables:
#
#	lab/convergence.sh [SEEDS [EPOCHS]]
#
# It needs Go and jq, and takes about half an hour on two cores.
set -euo pipefail
cd "$(dirname "$0")/.."
seeds=${1:-3} epochs=${2:-20}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
# The mean accuracy of some runs, and the lowest.
readonly cell='def cell: "\((map(.accuracy) | add / length * 10 | round) / 10) (\((map(.accuracy) | min * 10 | round) / 10))";'
go build -o "$scratch/tutti" ./cmd/tutti

for task in digits turned; do
	flags=()
	if [[ $task == turned ]]; then flags=(--turned); fi
	for density in 0.01 0.001; do
		for ranks in 4 8; do
			for seed in $(seq "$seeds"); do
				"$scratch/tutti" train --pattern all --ranks "$ranks" --density "$density" --seed "$seed" --epochs "$epochs" \
					"${flags[@]}" --json --out "$scratch/out" 2>/dev/null |
					jq -c --arg task "$task" --arg asked "$density" '{task: $task, asked: $asked, pattern, ranks, accuracy}'
			done
		done
	done
done >"$scratch/all.json"

for task in digits turned; do
	printf '\n%s: mean accuracy in percent over %s seeds, and the lowest\n\n' "$task" "$seeds"
	jq -rs --arg task "$task" "$cell"'
		map(select(.task == $task)) as $all
		| "| pattern | 1 %, P = 4 | 1 %, P = 8 | 0.1 %, P = 4 | 0.1 %, P = 8 |", "| --- | --- | --- | --- | --- |",
		  ([$all[].pattern] | reduce .[] as $p ([]; if index($p) then . else . + [$p] end) | .[] as $pattern
		   | "| \($pattern) | " + ([("0.01", "0.001") as $d | (4, 8) as $r
		       | [$all[] | select(.pattern == $pattern and .asked == $d and .ranks == $r)] | cell] | join(" | ")) + " |")' "$scratch/all.json"
done

# Around the k from which oktopk has a separate exchange.
for hidden in 1000 2000; do
	for ranks in 4 8; do
		for seed in $(seq "$seeds"); do
			"$scratch/tutti" train --pattern gtopk,oktopk --ranks "$ranks" --density 0.001 --hidden "$hidden" --seed "$seed" \
				--epochs 10 --turned --json --out "$scratch/out" 2>/dev/null | jq -c --arg hidden "$hidden" '{hidden: $hidden, pattern, ranks, accuracy}'
		done
	done
done >"$scratch/switch.json"
printf '\nturned, 0.1 %%, 1000 and 2000 hidden units, 10 epochs\n\n'
jq -rs "$cell"'
	. as $all
	| "| pattern | k = 75, P = 4 | k = 75, P = 8 | k = 150, P = 4 | k = 150, P = 8 |", "| --- | --- | --- | --- | --- |",
	  (("gtopk", "oktopk") as $pattern
	   | "| \($pattern) | " + ([("1000", "2000") as $h | (4, 8) as $r
	       | [$all[] | select(.pattern == $pattern and .ranks == $r and .hidden == $h)] | cell] | join(" | ")) + " |")' "$scratch/switch.json"
