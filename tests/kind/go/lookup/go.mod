// One small program of our own that asks a name server; nothing but Go's standard library.
module ddpjob.dev/tests/kind/lookup

go 1.24.0
