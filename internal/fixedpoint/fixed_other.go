//go:build !amd64

package fixedpoint

func raiseBlocks([]byte, []float32) int { return 0 }

func storeBlocks([]int32, []byte, []float32, int, bool) int { return 0 }

func loadBlocks([]float32, []int32, []byte, float64, float64, int) int { return 0 }

func raiseHeight([]int32, []byte, *int) int { return 0 }

func squareBlocks([]int32, []byte, int, *[2]uint64) int { return 0 }

func exponentBlocks([]byte, []uintptr, int) int { return 0 }

func sumBlocks([]int32, []byte, []uintptr, int, int) int { return 0 }

func meanBlocks([]uintptr, []byte, []uintptr, int, int, float64, float64) int { return 0 }
