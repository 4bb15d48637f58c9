#!/bin/sh
# Runs on each of four machines. The third has its network cable pulled when all four train, and put back:
#
#	tutti cluster --hosts 4 --mpi none --rate 100mbit docs/pulled.sh tutti train --elastic --pattern dense
#
# The cable is pulled after AFTER seconds, for DOWN seconds.
first=10.77.0.1:29401
case $TUTTI_RANK in
0) exec "$1" launch --min 2 --listen $first "$@" ;;
2)
	log=$(mktemp)
	(
		until grep -q 'elastic: epoch.*,.*,.*,' "$log"; do sleep 0.1; done
		sleep "${AFTER:-3}"
		ip link set eth0 down
		sleep "${DOWN:-6}"
		ip link set eth0 up
	) &
	{ "$1" launch --join $first "$@" 2>&1 >&3 | tee "$log" >&2; } 3>&1
	rm "$log"
	;;
*) exec "$1" launch --join $first "$@" ;;
esac
