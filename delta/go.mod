module github.com/tutti-go/tutti/delta

go 1.25.0

require (
	github.com/klauspost/compress v1.19.1
	github.com/stretchr/testify v1.12.1
	github.com/tutti-go/tutti v0.3.0
	github.com/zeebo/blake3 v0.2.4
	github.com/zeebo/xxh3 v1.1.0
	golang.org/x/sys v0.47.0
)

require (
	github.com/ebitengine/purego v0.11.3 // indirect
	github.com/klauspost/cpuid/v2 v2.4.2 // indirect
	github.com/x448/float16 v0.8.4 // indirect
	go.yaml.in/yaml/v3 v3.0.6 // indirect
)
