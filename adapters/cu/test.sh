#!/usr/bin/env bash
# Vets and tests this module without a GPU, on the stand-in for the driver. It uses the CUDA header of a Debian
# package, unless CUDA_HEADERS names a folder with cuda.h. Without a header it says so and does nothing.
set -euo pipefail
cd "$(dirname "$0")"

# A fixed place, so that Go's cache keeps what is built with it.
scratch=${TMPDIR:-/tmp}/tutti-cu-$UID
mkdir -p "$scratch"

# header_of_debian unpacks cuda.h from the beginning of a package that is a hundred times larger than the part that
# it reads.
header_of_debian() {
	local apt url
	echo 'deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian bookworm non-free' >"$scratch/list"
	mkdir -p "$scratch/lists/partial"
	apt=(-o "Dir::Etc::SourceList=$scratch/list" -o Dir::Etc::SourceParts=/dev/null -o "Dir::State::Lists=$scratch/lists")
	apt-get -qq "${apt[@]}" update 2>/dev/null
	url=$(apt-get -qq "${apt[@]}" download --print-uris nvidia-cuda-dev | cut -d"'" -f2)
	[[ -n $url ]] || return 1
	# tar stops at the file, and so do the other programs.
	set +o pipefail
	curl -sfL "$url" | dpkg-deb --fsys-tarfile - 2>/dev/null | tar -xC "$scratch" --occurrence=1 ./usr/include/cuda.h
}

if [[ -z ${CUDA_HEADERS:-} ]]; then
	CUDA_HEADERS=$scratch/usr/include
	[[ -s $CUDA_HEADERS/cuda.h ]] || header_of_debian || true
	if [[ ! -s $CUDA_HEADERS/cuda.h ]]; then
		echo "no cuda.h to be had: left out"
		exit
	fi
fi
cc -O2 -shared -fPIC -Wl,-soname,libcuda.so.1 -o "$scratch/libcuda.so.1" testdata/driver.c -lpthread
ln -sf libcuda.so.1 "$scratch/libcuda.so"
# The stand-in lacks most functions that gorgonia.org/cu refers to; tests do not call them.
export CGO_ENABLED=1 CGO_CFLAGS="-I$CUDA_HEADERS" CGO_LDFLAGS="-L$scratch -Wl,--unresolved-symbols=ignore-all -Wl,-z,lazy"
export LD_LIBRARY_PATH=$scratch TUTTI_CUDA_LIB=$scratch/libcuda.so.1
go vet ./...
go test -timeout 3m ./...
