"""Numbers of each operand, of the tensors that ran: how much rounding costs, and where it begins to hurt."""

from __future__ import annotations

import math
from typing import Any

from nvfp4_train.auditing.switches import Switches


def operand_statistics(switches: Switches) -> list[dict[str, Any]]:
    """One row for each layer and operand, means over its calls.

    ``sqnr_db``: signal over rounding noise. ``underflow``: nonzero elements that became zero. ``saturated``: elements
    above the largest code. ``scale_underflow``: blocks whose scale is the least there is. ``amax``, ``outlier``: the
    largest element, and how many root mean squares that is (after the Hadamard transform). ``bias``, for stochastic
    rounding: the mean error in steps of the grid over elements that do not saturate, and ``bias_sigmas``, that in
    standard deviations.
    """
    rows = []
    for (layer, operand), found in switches.statistics.items():
        count = len(found)
        noise = sum(each.noise for each in found) / count
        row: dict[str, Any] = {
            "layer": layer,
            "operand": operand,
            "sqnr_db": -10 * math.log10(noise) if noise > 0 else None,
            "underflow": sum(each.underflow for each in found) / count,
            "saturated": sum(each.saturated for each in found) / count,
            "scale_underflow": sum(each.scale_underflow for each in found) / count,
            "amax": max(each.amax for each in found),
            "outlier": max(each.outlier for each in found),
        }
        for (at, name, _), rounding in switches.rounding.items():
            if (at, name) == (layer, operand) and rounding.lean_variance > 0:
                elements = sum(each.elements for each in found)
                row["bias"] = rounding.lean / elements
                row["bias_sigmas"] = rounding.lean / math.sqrt(rounding.lean_variance)
        rows.append(row)
    return rows


def by_operand(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each operand over all layers: means, the largest outlier, and the layer with the least SQNR."""
    found = []
    for operand in dict.fromkeys(row["operand"] for row in rows):
        those = [row for row in rows if row["operand"] == operand]
        told = [row for row in those if row["sqnr_db"] is not None]
        noise = [10 ** (-row["sqnr_db"] / 10) for row in told]
        keys = ("underflow", "saturated", "scale_underflow")
        found.append(
            {
                "operand": operand,
                "sqnr_db": -10 * math.log10(sum(noise) / len(noise)) if noise else None,
                "worst_layer": min(told, key=lambda row: row["sqnr_db"])["layer"] if told else "",
                "outlier": max(row["outlier"] for row in those),
                **{key: sum(row[key] for row in those) / len(those) for key in keys},
            }
        )
    return found
