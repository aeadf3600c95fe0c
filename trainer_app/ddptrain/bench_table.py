"""How the figures of ``bench`` look, which alone calls it: Markdown tables, as docs/benchmarks.md holds them."""

from __future__ import annotations

from typing import Any


def tables(results: dict[str, Any]) -> str:
    """The parts that were measured, and the machine."""
    lines = []
    if "accuracy" in results:
        lines += [
            "| ranks | seeds | accuracy: mean (worst) | warm: median (slowest) | CPU time | cold (one run) "
            "| samples/s per rank | scaling |",
            "|---:|---:|---:|---:|---:|---:|---:|---:|",
        ]
        for r in results["accuracy"]:
            warm = r["warmSeconds"]
            lines.append(
                f"| {r['worldSize']} | {r['seeds']} | {r['mean']:.2%} ({r['worst']:.2%}) "
                f"| {warm['median']:.1f} s ({warm['slowest']:.1f} s) "
                f"| {r['cpuSeconds']['median']:.1f} s | {r['coldSeconds']:.1f} s "
                f"| {r['samplesPerSecondPerRank']:,.0f} | {r['scaling']:.2f} |"
            )
        lines.append("")
    if "throughput" in results:
        lines += [
            "| model | augmentation | samples/s | DataLoader loop | times |",
            "|---|---|---:|---:|---:|",
        ]
        lines += [
            f"| {r['model']} | {'±' + str(r['shift']) + ' pixel' if r['shift'] else 'none'} "
            f"| {r['samplesPerSecond']:,.0f} | {r['dataLoaderLoop']:,.0f} | **{r['times']:.1f}** |"
            for r in results["throughput"]
        ]
        lines.append("")
    if "tutorial" in results:
        r = results["tutorial"]
        reached = f"{r['theirs']['seconds']:.1f} s, {r['theirs']['epochs']} epochs"
        lines += [
            f"| to {r['target']:.0%} | ours | tutorial-style | times |",
            "|---|---:|---:|---:|",
            f"| seconds | {r['ours']['seconds']:.1f} s, 1 epoch ({r['ours']['accuracy']:.2%}) "
            f"| {reached if r['theirs']['reached'] else 'not within ' + reached} | {r['times']:.1f} |",
            "",
        ]
    machine = results["machine"]
    load = f"load {machine['loadBefore']:.1f} before, {machine['loadAfter']:.1f} after"
    return "\n".join([*lines, f"{machine['cpus']:g} CPUs ({machine['processor']}), {load}."])
