"""What tests run against: an API server in memory and a real one, kubelets, and proxies that inject faults."""
