module github.com/tutti-go/tutti/adapters/gomlx

go 1.26.5

require (
	github.com/gomlx/compute v0.1.0
	github.com/gomlx/gomlx v0.28.1 // from v0.28 on: packages have other places before
	github.com/stretchr/testify v1.12.1
	github.com/tutti-go/tutti v0.3.0
)

require (
	github.com/ebitengine/purego v0.11.3 // indirect
	github.com/go-logr/logr v1.4.3 // indirect
	github.com/google/uuid v1.6.0 // indirect
	github.com/pkg/errors v0.9.1 // indirect
	github.com/x448/float16 v0.8.4 // indirect
	go.yaml.in/yaml/v3 v3.0.6 // indirect
	golang.org/x/exp v0.0.0-20260410095643-746e56fc9e2f // indirect
	golang.org/x/sys v0.47.0 // indirect
	k8s.io/klog/v2 v2.140.0 // indirect
)
