"""The data set: files, downloads, the order of samples, and batches on the device."""
