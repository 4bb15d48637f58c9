#!/usr/bin/env bash
# Measures from which size and density on sparse steps are faster than dense ones on this machine's GPUs, and prints
# the tables of lab/results/sparse:
#
#	lab/break-even.sh measure >break-even.json   # tutti in the path, or TUTTI=…; about a minute and a half
#	lab/break-even.sh tables <break-even.json    # jq
set -euo pipefail

# 4M, 20M, 100M and 400M are 1,048,576 to 104,857,600 float32.
measure() {
	local form how=(--backend nccl --min 4M --max 400M --step 5 --density 0.001,0.01,0.05 --rounds 3 --verify=false --json)
	local tutti=${TUTTI:-tutti}
	"$tutti" bench sparse "${how[@]}" --pattern dense,topkA,topkAopt,oktopk
	"$tutti" bench sparse "${how[@]}" --pattern dense,topkA,topkAopt --graph --no-undo
}

# One row for each number of elements, one column for each density: the microseconds of the fastest pattern, and its
# speedup over dense.
tables() {
	jq -rs '
		def form: if .graph then "in a graph, no undo" else "eager, as transactions" end;
		def round3: if . < 10 then . * 10 | round / 10 else round end;
		. as $all
		| ["eager, as transactions", "in a graph, no undo"][] as $form
		| ([$all[] | select(.pattern != "dense") | .density] | unique) as $densities
		| "\n\($form):\n",
		  ("| elements | dense |" + ([$densities[] | " \(. * 100) % |"] | add)),
		  ("| ---: | ---: |" + ([$densities[] | " ---: |"] | add)),
		  (([$all[].count] | unique)[] as $n
		  | ([$all[] | select(.pattern == "dense" and .count == $n and .graph == ($form != "eager, as transactions"))][0].time_us) as $dense
		  | "| \($n) | \($dense | round3) |" + ([$densities[] as $d
			| ([$all[] | select(.count == $n and .density == $d and .pattern != "dense" and form == $form)] | min_by(.time_us)) as $best
			| if $best == null then " |" else " \($best.pattern) \($best.time_us | round3), \($dense / $best.time_us * 100 | round / 100)× |" end] | add))'
}

case ${1-} in
measure | tables) "$1" ;;
*)
	sed -n '2,6s/^# \?//p' "$0"
	exit 2
	;;
esac
