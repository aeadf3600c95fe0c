// Two small programs of our own for the test cluster's nodes; nothing but Go's standard library.
module ddpjob.dev/tests/kind/node

go 1.24.0
