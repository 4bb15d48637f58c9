#!/usr/bin/env bash
# Prints the counts in a checkout for results/house/size.csv: lines of Go by part, without tests, testdata and
# generated files, the measures of .ci/house, and the sizes of two programs. Its argument is the checkout's folder
# (default this one).
#
#	lab/size.sh [FOLDER]
set -euo pipefail
here=$(cd "$(dirname "$0")/.." && pwd)
tree=${1:-$here}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
(cd "$here" && go build -o "$scratch/house" ./.ci/house)
cd "$tree"

# part prints which part of the tree a file belongs to.
part() {
	case /$1 in
	*test/* | */standin/* | */simulation/* | */reference/*) echo "kits for tests" ;;
	/cmd/*) echo "command" ;;
	/.ci/* | */gen/*) echo "generators and CI" ;;
	/lab/*) echo "lab" ;;
	/delta/* | /distributed/delta/*) echo "delta" ;;
	/adapters/* | /examples/*) echo "adapters and examples" ;;
	/comm/*) echo "comm" ;;
	/runtime/* | /dtype/*) echo "runtime and dtype" ;;
	/distributed/*) echo "distributed" ;;
	*) echo "root and internal" ;;
	esac
}

git ls-files '*.go' | grep -v -e '_test\.go$' -e '\(^\|/\)testdata/' | while read -r file; do
	if ! head -5 "$file" | grep -q "Code generated"; then
		printf '%d %s\n' "$(wc -l <"$file")" "$(part "$file")"
	fi
done | awk '
	{ lines = $1; $1 = ""; parts[$0] += lines; all += lines }
	END { for (p in parts) print "lines:" p "," parts[p]; print "lines: all," all }' | sort

# Above a bound, house also lists places and fails. Rows have separate columns.
("$scratch/house" || true) | sed -nE 's/^(\S.*[^ ]) +([0-9]+\.[0-9]+)  bound .*/\1,\2/p'

go build -o "$scratch/tutti" ./cmd/tutti
go build -o "$scratch/allreduce" ./examples/allreduce
printf 'bytes: tutti,%d\nbytes: examples/allreduce,%d\n' "$(stat -c %s "$scratch/tutti")" "$(stat -c %s "$scratch/allreduce")"
