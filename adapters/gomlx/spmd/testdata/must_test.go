package graph_test

func must1[T any](value T, err error) T {
	if err != nil {
		panic(err)
	}
	return value
}
