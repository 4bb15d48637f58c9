#!/usr/bin/env bash
# Measures what the chapter "When does it pay" of docs/sparse.md shows, on
# emulated clusters, and prints its tables:
#
#	docs/when-it-pays.sh [DIRECTORY]
#
# The directory, docs/when-it-pays without one, gets the pictures and what was
# measured, a JSON object a line. It needs root or the right to make namespaces,
# Open MPI, Go and jq, and takes about forty minutes.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-docs/when-it-pays}
mkdir -p "$out"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
go build -o "$scratch/tutti" ./cmd/tutti
rates=(100mbit 1gbit 10gbit)

# on RATE HOSTS COMMAND… runs a command of tutti on a cluster.
on() {
	local rate=$1 hosts=$2
	shift 2
	"$scratch/tutti" cluster --mpi openmpi --rate "$rate" --hosts "$hosts" "$@"
}

# Time to accuracy.
for rate in "${rates[@]}"; do
	on "$rate" 4 train --pattern all,auto --hidden 2048 --epochs 20 --target 97 --json --out "$scratch/out" |
		jq -c --arg rate "$rate" '{rate: $rate} + .'
	mv "$scratch/out/accuracy-vs-time.png" "$out/accuracy-$rate.png"
done >"$out/train.json"

# One step: the size, the number of ranks and the density each on their own.
# sparse HOSTS DENSITY SIZE measures all patterns.
steps=(--warmup 1 --iters 2 --rounds 5 --json)
sparse() {
	for rate in "${rates[@]}"; do
		on "$rate" "$1" bench sparse --pattern all,auto --density "$2" --min "$3" --max "$3" "${steps[@]}" |
			jq -c --arg rate "$rate" --arg density "$2" '{rate: $rate, asked: $density} + .'
	done
}
for size in 64K 512K 4M 16M; do sparse 4 0.01 "$size"; done >"$out/size.json"
for hosts in 2 4 8; do sparse "$hosts" 0.01 4M; done >"$out/ranks.json"
for density in 0.001 0.01 0.1; do sparse 4 "$density" 4M; done >"$out/density.json"

# The same within one process, where nothing is sent.
for size in 4K 64K 512K 4M 16M; do
	for ranks in 2 4; do
		"$scratch/tutti" bench sparse --ranks "$ranks" --pattern all,auto --min "$size" --max "$size" --json |
			jq -c --arg rate "$ranks ranks" '{rate: $rate, asked: "0.01"} + .'
	done
done >"$out/local.json"

# Two hosts of two ranks, without and with levels.
for rate in "${rates[@]}"; do
	for hosts in 0 2; do
		on "$rate" 2 --per-host 2 bench sparse --pattern all --hosts "$hosts" --min 4M --max 4M "${steps[@]}" |
			jq -c --arg rate "$rate" --arg levels "$hosts" '{rate: $rate, levels: $levels} + .'
	done
done >"$out/levels.json"

# Eight buckets of 4 MiB behind a backward pass.
for rate in "${rates[@]}"; do
	on "$rate" 4 bench buckets --pattern all,auto --json | jq -c --arg rate "$rate" '{rate: $rate} + .'
done >"$out/buckets.json"

# Every element of every result was compared with its reference.
! grep -hv '"wrong":0[,}]' "$out"/{size,ranks,density,local,levels}.json

# table TITLE FIELD CELLS FILE prints rows by a field and columns by rate; CELLS
# makes a cell of the lines of both.
table() {
	printf '|'
	printf ' %s |' "$1" "${rates[@]}"
	printf '\n|'
	printf ' --- |%.0s' "$1" "${rates[@]}"
	printf '\n'
	jq -rn --argjson rates "$(printf '%s\n' "${rates[@]}" | jq -R . | jq -sc .)" '
		def ms: . / 1000 | if . < 0.1 then . * 1000 | round / 1000 elif . < 10 then . * 10 | round / 10 else round end;
		[inputs] as $all | reduce $all[].'"$2"' as $v ([]; if index([$v]) then . else . + [$v] end) | .[] as $v
		| [$v | tostring] + [$rates[] as $rate | [$all[] | select(.'"$2"' == $v and .rate == $rate)] | '"$3"']
		| "| " + join(" | ") + " |"' "$4"
	echo
}

printf 'Seconds to 97 %%, four ranks, 153,610 parameters:\n\n'
table pattern pattern '.[0].target_s | if . then . * 10 | round / 10 | tostring else "not reached" end' "$out/train.json"
dense_and_best='(map(select(.pattern == "dense"))[0].time_us) as $d | (map(select(.pattern != "dense" and .pattern != "auto")) | min_by(.time_us)) as $b
	| "\($d | ms) → \($b.time_us | ms) \($b.pattern), \($d / $b.time_us * 10 | round / 10)×"'
printf 'Milliseconds of a step, dense → the fastest sparse pattern. By size, 4 ranks, 1 %%:\n\n'
table bytes bytes "$dense_and_best" "$out/size.json"
printf 'By ranks, 4 MiB, 1 %%:\n\n'
table ranks ranks "$dense_and_best" "$out/ranks.json"
printf 'By density, 4 ranks, 4 MiB:\n\n'
table density asked "$dense_and_best" "$out/density.json"

auto='(map(select(.pattern == "auto"))[0]) as $a | (map(select(.pattern == "dense"))[0].time_us) as $d
	| (map(select(.pattern != "auto")) | min_by(.time_us)) as $b
	| "\($a.chosen) \($a.time_us | ms), \($a.time_us / $b.time_us * 100 | round) % of \($b.pattern), \($a.time_us / $d * 100 | round) % of dense"'
printf 'What auto chose, milliseconds of a step, and how much that is of the fastest fixed pattern and of dense. By size, 4 ranks, 1 %%:\n\n'
table bytes bytes "$auto" "$out/size.json"
printf 'By ranks, 4 MiB, 1 %%:\n\n'
table ranks ranks "$auto" "$out/ranks.json"
printf 'By density, 4 ranks, 4 MiB:\n\n'
table density asked "$auto" "$out/density.json"
links=("${rates[@]}")
rates=("2 ranks" "4 ranks")
printf 'In one process, 1 %%:\n\n'
table bytes bytes "$auto" "$out/local.json"
rates=("${links[@]}")
printf 'Two hosts of two ranks, 4 MiB, 1 %%: elements that a rank sends and milliseconds of a step, flat → with levels (elements between hosts):\n\n'
table pattern pattern '(map(select(.levels == "0"))[0]) as $f | (map(select(.levels == "2"))[0]) as $l
	| "\($f.sent_elements_per_rank | round) → \($l.sent_elements_per_rank | round), \($f.time_us | ms) → \($l.time_us | ms)"' "$out/levels.json"
printf 'Eight buckets of 4 MiB and a backward pass of 10 ms each, 4 ranks, 1 %%, milliseconds of a step: reduced after it → behind it, and what is hidden:\n\n'
table pattern pattern '.[0] | "\(.after_us | ms) → \(.behind_us | ms), \(.hidden * 100 | round) %"' "$out/buckets.json"
