"""The trainer under kills, hangs, signals, power cuts and peers that do not come: a layer of its own."""
