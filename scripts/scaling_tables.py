"""Tables and plot of scripts/bench_scaling.py. Not for direct use."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from odin_nerfstudio.simulation.cluster import MODES

if TYPE_CHECKING:
    from bench_scaling import Options

Row = dict[str, Any]


def of(rows: Sequence[Row], scene: str, fabric: str, ranks: int, kind: str, case: str = "") -> Row | None:
    """The row of one simulation."""
    key = {"scene": scene, "fabric": fabric, "ranks": ranks, "kind": kind, "case": case}
    return next((r for r in rows if all(r[k] == v for k, v in key.items())), None)


def gain(row: Row | None, base: Row | None) -> str:
    """Speed of one over that of the other."""
    return "" if row is None or base is None else f"{row['rate'] / base['rate']:.2f}"


def hidden(row: Row, base: Row) -> str:
    """Share of the baseline's wait that is gone."""
    return f"{1 - row['wait'] / base['wait']:.0%}" if base["wait"] > 0 else ""


def tables(rows: Sequence[Row], facts: dict[str, dict[str, float]], options: Options) -> str:
    """Markdown."""
    names = " ".join(facts)
    out = [
        f"`python scripts/bench_scaling.py {names} --speed {options.speed:g} --overhead-speed "
        f"{options.overhead_speed:g} --detail {options.detail:g} --skew {options.skew:g} --steps {options.steps}`",
        "",
    ]
    for scene, fact in facts.items():
        many = fact["primitives"] * options.detail
        out += [
            f"**{scene}**: {fact['views']:,} views, {fact['primitives']:,} primitives recorded, each of which stands "
            f"for {options.detail:g} ({many / 1e6:.1f} million); {fact['ms']:.1f} ms a view as recorded, "
            f"{fact['pixels']:.0%} of it in the second stage.",
            "",
        ]
        for fabric in dict.fromkeys(r["fabric"] for r in rows if r["scene"] == scene):
            out += [*_main(rows, scene, fabric), ""]
    out += _local(rows)
    out += _variants(rows)
    out += _replicated(rows)
    out += _cases(rows)
    return "\n".join(out).rstrip()


def _main(rows: Sequence[Row], scene: str, fabric: str) -> list[str]:
    out = [
        f"| {fabric}: devices | barrier [views/s] | it waits | quality | throughput | throughput hides | throughput to"
        " barrier, random | efficiency: barrier | quality | throughput | owned elsewhere | owners a view | MB a step"
        " | replicated | GB a device | replicated |",
        "| --- " * 16 + "|",
    ]
    for ranks in sorted({r["ranks"] for r in rows if r["scene"] == scene and not r["case"]}):
        base, quality, late = (of(rows, scene, fabric, ranks, mode) for mode in MODES)
        if base is None or quality is None or late is None:
            continue
        random = of(rows, scene, fabric, ranks, "barrier, random")
        out.append(
            f"| {ranks} | {base['rate']:.1f} | {base['waits']:.0%} | {gain(quality, base)} | {gain(late, base)} "
            f"| {hidden(late, base)} | {gain(late, random)} | {base['efficiency']:.0%} | {quality['efficiency']:.0%} "
            f"| {late['efficiency']:.0%} | {base['far']:.0%} "
            f"| {base['owners']:.1f} | {base['bytes'] / 1e6:,.0f} | {base['replicated bytes'] / 1e6:,.0f} "
            f"| {late['memory'] / 1e9:.2f} | {base['whole memory'] / 1e9:.1f} |"
        )
    return out


def _local(rows: Sequence[Row]) -> list[str]:
    found = [r for r in rows if r["kind"] == "throughput, local"]
    if not found:
        return []
    out = [
        "Ranks that keep to their own parts of the scene (local order, the default with sharded primitives), against "
        "Grendel's way, a barrier in random order:",
        "",
        "| scene | cluster | devices | change | barrier, random [views/s] | throughput, RLG | barrier, local "
        "| quality, local | throughput, local | throughput to barrier, both local | efficiency: barrier, random "
        "| throughput, local | owned elsewhere: RLG | local | MB a step: RLG | local |",
        "| --- " * 16 + "|",
    ]
    for row in sorted(found, key=lambda r: (r["scene"], r["fabric"], r["ranks"])):
        key = (row["scene"], row["fabric"], row["ranks"])
        names = ("barrier, random", "barrier, local", "quality, local", "throughput", "barrier")
        random, base, quality, late, planned = (of(rows, *key, name, row["case"]) for name in names)
        if random is None or base is None or planned is None:
            continue
        cells = [gain(one, random) for one in (late, base, quality, row)]
        out.append(
            f"| {' | '.join(map(str, key))} | {row['case'] or 'none'} | {random['rate']:.1f} | {' | '.join(cells)} "
            f"| {gain(row, base)} | {random['efficiency']:.0%} | {row['efficiency']:.0%} "
            f"| {planned['far']:.0%} | {row['far']:.0%} | {planned['bytes'] / 1e6:,.0f} | {row['bytes'] / 1e6:,.0f} |"
        )
    return [*out, ""]


def _variants(rows: Sequence[Row]) -> list[str]:
    found = [r for r in rows if r["kind"] == "barrier, strips"]
    if not found:
        return []
    out = [
        "Pixels of a step spread evenly over all devices (strips), and views at the devices that own most of what they "
        "see (nearby). Speed relative to the same mode without:",
        "",
        "| scene | cluster | devices | barrier, strips | throughput, strips | barrier, nearby | throughput, nearby "
        "| throughput to barrier, both nearby | owned elsewhere: planned | nearby |",
        "| --- " * 10 + "|",
    ]
    for row in sorted(found, key=lambda r: (r["scene"], r["fabric"], r["ranks"])):
        key = (row["scene"], row["fabric"], row["ranks"])
        pairs = [(f"{mode}, {what}", mode) for what in ("strips", "nearby") for mode in ("barrier", "throughput")]
        cells = [gain(of(rows, *key, kind), of(rows, *key, mode)) for kind, mode in pairs]
        near = of(rows, *key, "barrier, nearby")
        both = gain(of(rows, *key, "throughput, nearby"), near)
        far = "" if near is None else f"{near['far']:.0%}"
        out.append(f"| {' | '.join(map(str, (*key, *cells, both)))} | {row['far']:.0%} | {far} |")
    return [*out, ""]


def _replicated(rows: Sequence[Row]) -> list[str]:
    found = [r for r in rows if r["kind"] == "barrier, replicated"]
    if not found:
        return []
    out = [
        "Speed of sharded relative to replicated in the same mode:",
        "",
        "| scene | cluster | devices | barrier | quality | throughput |",
        "| --- " * 6 + "|",
    ]
    for row in found:
        key = (row["scene"], row["fabric"], row["ranks"])
        cells = [gain(of(rows, *key, mode), of(rows, *key, f"{mode}, replicated")) for mode in MODES]
        out.append(f"| {key[0]} | {key[1]} | {key[2]} | {' | '.join(cells)} |")
    return [*out, ""]


def _cases(rows: Sequence[Row]) -> list[str]:
    found = [r for r in rows if r["case"] and r["kind"] == "barrier"]
    if not found:
        return []
    ranks = found[0]["ranks"]
    out = [
        f"What decides, {found[0]['scene']}, {ranks} devices, one assumption changed at a time:",
        "",
        "| cluster | change | barrier [views/s] | it waits | throughput | it hides | efficiency: barrier "
        "| throughput |",
        "| --- " * 8 + "|",
    ]
    for fabric in dict.fromkeys(r["fabric"] for r in found):
        for case in ["", *dict.fromkeys(r["case"] for r in found)]:
            base, late = (of(rows, found[0]["scene"], fabric, ranks, mode, case) for mode in ("barrier", "throughput"))
            if base is None or late is None:
                continue
            out.append(
                f"| {fabric} | {case or 'none'} | {base['rate']:.1f} | {base['waits']:.0%} | {gain(late, base)} "
                f"| {hidden(late, base)} | {base['efficiency']:.0%} | {late['efficiency']:.0%} |"
            )
    return [*out, ""]


def plot(rows: Sequence[Row], path: Path) -> None:
    """Throughput and gain over ranks, one column per scene and cluster."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = list(dict.fromkeys((r["scene"], r["fabric"]) for r in rows if not r["case"]))
    figure, axes = pyplot.subplots(
        2, len(columns), figsize=(1 + 3.6 * len(columns), 6.5), layout="constrained", squeeze=False
    )
    colours = {"barrier": "tab:gray", "quality": "tab:blue", "throughput": "tab:orange"}
    lines = [
        (f"{mode}{more}", colours[mode], dash) for more, dash in (("", "o-"), (", local", "o--")) for mode in MODES
    ]
    for k, (scene, fabric) in enumerate(columns):
        ranks = sorted({r["ranks"] for r in rows if r["scene"] == scene and not r["case"]})
        base = {n: of(rows, scene, fabric, n, "barrier, random") for n in ranks}
        for mode, colour, dash in lines:
            mine = [(n, of(rows, scene, fabric, n, mode), base[n]) for n in ranks]
            points = [(n, r, b) for n, r, b in mine if r is not None and b is not None]
            at = [n for n, _, _ in points]
            axes[0][k].plot(at, [n * r["efficiency"] for n, r, _ in points], dash, color=colour, label=mode)
            axes[1][k].plot(at, [r["rate"] / b["rate"] for _, r, b in points], dash, color=colour, label=mode)
        axes[0][k].plot(ranks, ranks, ":", color="black", label="linear")
        axes[0][k].set_title(f"{scene}\n{fabric}", fontsize=9)
        for row in (0, 1):
            axes[row][k].set_xscale("log", base=2)
            axes[row][k].set_xticks(ranks, [str(n) for n in ranks])
            axes[row][k].grid(alpha=0.3)
        axes[0][k].set_yscale("log", base=2)
        axes[1][k].set_xlabel("devices")
    axes[0][0].set_ylabel("speed relative to one device")
    axes[1][0].set_ylabel("speed relative to Grendel's way")
    axes[0][0].legend(fontsize=7, handlelength=4)
    figure.suptitle("Simulated, sharded; RLG order where nothing is said")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
