#!/usr/bin/env bash
# Measures the data of the chapter "When does it pay" in lab/results/sparse on emulated clusters, and prints its
# tables:
#
#	lab/when-it-pays.sh [DIRECTORY]
#
# It writes pictures and measurements, one JSON object per line, to the directory (default
# lab/results/when-it-pays). It needs root or the right to make namespaces, Open MPI, Go and jq, and takes about 40
# minutes on an otherwise idle machine. Variables:
#
#	GPUS=2		also measure steps on this number of GPUs, over NCCL
#	LANES=8		measurements in parallel, each on four separate processors
#	TUTTI=path	the command; without it, one is built
#	ONLY=measure	no tables, so jq is not needed; ONLY=tables: no measurements
#	CELLS='^step 1'	only the measurements whose names match this (grep -E), see measurements
#	REPEATS=2	repeats of each measurement, instead of 1 to 5
set -euo pipefail
self=$(realpath "$0")
cd "$(dirname "$self")/.."
rates=(100mbit 1gbit 10gbit)

# run RATE HOSTS FIELDS COMMAND… runs a command of tutti on a cluster, or directly for the rates "local" and "gpus",
# a few times, and puts fields before those of each output line. One run is enough where the link takes most of a
# step.
run() {
	local rate=$1 hosts=$2 fields=$3 times=3 on=()
	shift 3
	case $rate in 100mbit) times=1 ;; local) times=5 ;; esac
	times=${REPEATS:-$times}
	[[ $rate != *bit ]] || on=(cluster --mpi openmpi --rate "$rate" --hosts "$hosts")
	for ((i = 0; i < times; i++)); do
		"$TUTTI" "${on[@]}" "$@" --json
	done | sed "s/^{/{\"rate\":\"$rate\",$fields/"
}

# patterns RATE SIZE prints the flags for all patterns and auto, which are measured alternately because they are
# close, and the number of rounds, which is lower for long steps.
patterns() {
	local rounds=21
	case $1-$2 in 100mbit-16M) rounds=5 ;; 100mbit-4M | 1gbit-16M) rounds=9 ;; esac
	echo --pattern all,auto --interleave --warmup 3 --rounds $rounds --min "$2" --max "$2"
}

# Each measurement has a name, and arguments that begin with the rate. Its lines go to a file with that name.

# Time to accuracy.
train() {
	run "$1" 4 '' train --pattern all,auto --hidden 2048 --epochs 20 --target 97 --out "$out/train-$1"
	mv "$out/train-$1/accuracy-vs-time.png" "$out/accuracy-$1.png"
	rm -r "$out/train-$1"
}

# step RATE RANKS DENSITY SIZE measures one step of each pattern. In one process and on GPUs it uses no
# transactions, whose copy would take a large part of a dense step.
step() {
	local how=()
	case $1 in
	local) how=(--ranks "$2" --no-undo) ;;
	gpus) how=(--backend nccl --ranks "$2" --no-undo) ;;
	esac
	run "$1" "$2" "\"asked\":$3," bench sparse "${how[@]}" $(patterns "$1" "$4") --density "$3"
}

# Two hosts of two ranks, with and without a hierarchical allreduce.
levels() {
	for hosts in 0 2; do
		run "$1" 2 "\"levels\":$hosts," --per-host 2 bench sparse $(patterns "$1" 4M) --hosts "$hosts"
	done
}

# Eight buckets of 4 MiB after a backward pass.
buckets() { run "$1" 4 '' bench buckets --pattern all,auto --rounds "$([[ $1 = 100mbit ]] && echo 3 || echo 7)"; }

# The longest first.
all_measurements() {
	for rate in "${rates[@]}"; do
		printf '%s\n' "train $rate" "buckets $rate" "step $rate 4 0.01 16M" "levels $rate" "step $rate 8 0.01 4M" "step $rate 2 0.01 4M" \
			"step $rate 4 0.001 4M" "step $rate 4 0.1 4M" "step $rate 4 0.01 4M" "step $rate 4 0.01 512K" "step $rate 4 0.01 64K"
	done
	for size in ${GPUS:+4M 20M 100M}; do echo "step gpus $GPUS 0.01 $size"; done
	for ranks in 2 4; do
		for size in 4K 64K 512K 4M 16M; do echo "step local $ranks 0.01 $size"; done
	done
}

measurements() { all_measurements | grep -E "${CELLS-}"; }

if [[ ${1-} = --one ]]; then # as this script calls itself
	read -ra args <<<"$2"
	lines=$("${args[@]}")
	flock "$out" cat >>"$out/${args[0]}.json" <<<"$lines"
	exit
fi

export out TUTTI
out=$(realpath -m "${1:-lab/results/when-it-pays}")
mkdir -p "$out"
if [[ ${ONLY-} != tables ]]; then
	scratch=$(mktemp -d)
	trap 'rm -rf "$scratch"' EXIT
	if [[ -z ${TUTTI-} ]]; then
		TUTTI=$scratch/tutti
		go build -o "$TUTTI" ./cmd/tutti
	fi
	rm -f "$out"/*.json
	if [[ ${LANES-} ]]; then
		first=$(taskset -pc $$ | sed 's/.*: //; s/[-,].*//')
		measurements | xargs -P "$LANES" --process-slot-var=LANE -I{} \
			bash -c "exec taskset -c \$(($first + 4 * LANE))-\$(($first + 4 * LANE + 3)) $self --one '{}'"
	else
		measurements | xargs -I{} "$self" --one '{}'
	fi
	# Every element of every result was compared with its reference.
	if grep -hsv '"wrong":0[,}]' "$out"/{step,levels}.json; then
		echo 'wrong elements: see above' >&2
		exit 1
	fi
fi
[[ ${ONLY-} != measure ]] || exit 0

# table TITLE ROW CELL FILE [SELECTION] prints a table with a column for each rate in columns, if the file exists.
# ROW names the row of a line, and CELL makes a cell from its lines.
table() {
	[[ -e $out/$4 ]] || return 0
	printf '|'
	printf ' %s |' "$1" "${columns[@]}"
	printf '\n|'
	printf ' --- |%.0s' "$1" "${columns[@]}"
	printf '\n'
	jq -rn --argjson columns "$(printf '%s\n' "${columns[@]}" | jq -R . | jq -sc .)" "$definitions"'
		([inputs | select('"${5-true}"')] | sort_by([.ranks, .asked, .bytes])) as $all
		| reduce ($all[] | '"$2"') as $v ([]; if index([$v]) then . else . + [$v] end) | .[] as $v
		| [$v | tostring] + [$columns[] as $c | [$all[] | select('"$2"' == $v and .rate == $c)] | if . == [] then "" else '"$3"' end]
		| "| " + join(" | ") + " |"' "$out/$4"
	echo
}
definitions='
	def ms: . / 1000 | if . < 0.1 then . * 1000 | round / 1000 elif . < 10 then . * 10 | round / 10 else round end;
	def share: if . < 10 then . * 10 | round / 10 else round end;
	def median: sort | (.[(length - 1) / 2 | floor] + .[length / 2 | floor]) / 2;
	def middle(f): map(f) | if any(. == null) then null else median end;
	# Each pattern once, with the medians of its times.
	def patterns: . as $all | (reduce .[].pattern as $p ([]; if index([$p]) then . else . + [$p] end)) as $names | [$names[] as $p
		| [$all[] | select(.pattern == $p)] | .[0] + {time_us: middle(.time_us), target_s: middle(.target_s), after_us: middle(.after_us),
		overlapped_us: middle(.overlapped_us), hidden: middle(.hidden), chosen: (map(.chosen // empty | tostring) | unique | join(" or "))}];
	def dense: map(select(.pattern == "dense"))[0].time_us;
	def best: map(select(.pattern != "dense")) | min_by(.time_us);
	# The time of one set of lines in percent of another: the median over rounds, which were measured alternately.
	def percent(of): [map(.rounds_us), (of | map(.rounds_us))] | [transpose[] | transpose[] | .[0] / .[1]] | median * 100;
	# The time of auto in a cell, relative to the fastest fixed pattern, to dense, and to its choice, which is the
	# same pattern twice.
	def auto: group_by(.pattern) | map({(.[0].pattern): .}) | add | .auto as $auto | del(.auto) as $fixed | ($auto | map(.chosen) | unique) as $chosen
		| ($fixed | map_values(. as $p | $auto | percent($p)) | to_entries | max_by(.value)) as $fastest
		| {time: ($auto | map(.time_us) | median), chosen: ($chosen | join(" or ")), fastest: $fastest.key, of: $fastest.value,
			dense: ($auto | percent($fixed.dense)), itself: ($auto | percent([range(length) as $i | $fixed[.[$i].chosen][$i]])),
			choice: ([range($auto | length) as $i | $fixed[$auto[$i].chosen][$i]] | percent($fixed[$fastest.key]))};
	def cut(hosts): [.[] | select(.levels == hosts)] | patterns[0];
'
columns=("${rates[@]}")
bySize='.ranks == 4 and .asked == 0.01 and (.rate | endswith("bit"))'
byRanks='.bytes == 4194304 and .asked == 0.01 and (.rate | endswith("bit"))'
byDensity='.bytes == 4194304 and .ranks == 4 and (.rate | endswith("bit"))'

printf 'Seconds to 97 %%, four ranks, 153,610 parameters:\n\n'
table pattern .pattern 'patterns[0].target_s | if . then . * 10 | round / 10 | tostring else "not reached" end' train.json

cell='map(select(.pattern != "auto")) | patterns | dense as $d | best as $b | "\($d | ms) → \($b.time_us | ms) \($b.pattern), \($d / $b.time_us * 10 | round / 10)×"'
printf 'Milliseconds of a step, dense → the fastest sparse pattern. By size, 4 ranks, 1 %%:\n\n'
table bytes .bytes "$cell" step.json "$bySize"
printf 'By ranks, 4 MiB, 1 %%:\n\n'
table ranks .ranks "$cell" step.json "$byRanks"
printf 'By density, 4 ranks, 4 MiB:\n\n'
table density .asked "$cell" step.json "$byDensity"

printf 'What auto chose, milliseconds of a step, and how much that is of the fastest fixed pattern and of dense. Ranks, bytes, density:\n\n'
columns+=(local gpus)
table step '"\(.ranks), \(.bytes), \(.asked)"' 'auto | "\(.chosen) \(.time | ms): \(.of | round) % of \(.fastest), \(.dense | share) % of dense"' step.json
columns=("${rates[@]}")
[[ ! -e $out/step.json ]] || jq -rn "$definitions"'[inputs] | group_by([.rate, .ranks, .asked, .bytes]) | map(.[0] as $cell | auto + {cell: "\($cell.rate), \($cell.ranks) ranks, \($cell.bytes) bytes, \($cell.asked)"})
	| "auto takes \(map(.of) | median | round) % of the fastest fixed pattern (median of \(length) cells; most: \(map(.of) | max | round) %), at most \(map(.dense) | max | round) % of dense.",
	"The same pattern twice, as auto and by itself: \(map(.itself) | min | round) to \(map(.itself) | max | round) %.",
	(map(select(.of > 110 or .dense > 105)) | "Above 110 %, or 105 % of dense: \(length) cells.",
	(.[] | "- \(.cell): \(.of | round) % of \(.fastest), \(.dense | share) % of dense; \(.chosen) by itself takes \(.choice | round) % of \(.fastest), and auto \(.itself | round) % of that."))' "$out/step.json"
echo

printf 'Two hosts of two ranks, 4 MiB, 1 %%: bytes that a rank sends and milliseconds of a step, flat → with levels (bytes between hosts):\n\n'
table pattern .pattern 'cut(0) as $f | cut(2) as $l
	| "\($f.sent_bytes_per_rank | round) → \($l.sent_bytes_per_rank | round), \($f.time_us | ms) → \($l.time_us | ms)"' levels.json
printf 'Eight buckets of 4 MiB and a backward pass of 10 ms each, 4 ranks, 1 %%, milliseconds of a step: reduced after it → behind it, and what is hidden:\n\n'
table pattern .pattern 'patterns[0] | "\(.after_us | ms) → \(.overlapped_us | ms), \(.hidden * 100 | round) %"' buckets.json
