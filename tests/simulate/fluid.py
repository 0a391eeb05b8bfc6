"""An oracle for ports: exact max-min fair rates, computed anew whenever a flow ends."""

from collections.abc import Sequence

Way = Sequence[int]


def end_times(rates: Sequence[float], ways: Sequence[Way], nbytes: Sequence[float]) -> list[float]:
    """End of each flow that begins at 0: flow ``f`` brings ``nbytes[f]`` through the ports ``ways[f]``."""
    left = dict(enumerate(map(float, nbytes)))
    ends_s = [0.0] * len(ways)
    now_s = 0.0
    while left:
        speeds = _max_min(rates, {flow: ways[flow] for flow in left})
        step_s = min(left[flow] / speeds[flow] for flow in left)
        now_s += step_s
        for flow in list(left):
            left[flow] -= speeds[flow] * step_s
            if left[flow] < 1e-9 * nbytes[flow]:
                del left[flow]
                ends_s[flow] = now_s
    return ends_s


def _max_min(rates: Sequence[float], ways: dict[int, Way]) -> dict[int, float]:
    """Progressive filling: the narrowest port fixes its flows' rates, again and again."""
    left = list(rates)
    speeds: dict[int, float] = {}
    while len(speeds) < len(ways):
        open_flows = [flow for flow in ways if flow not in speeds]
        used = {port for flow in open_flows for port in ways[flow]}
        shares = {port: left[port] / sum(port in ways[flow] for flow in open_flows) for port in used}
        narrowest = min(shares, key=lambda port: shares[port])
        for flow in open_flows:
            if narrowest in ways[flow]:
                speeds[flow] = shares[narrowest]
                for port in ways[flow]:
                    left[port] -= shares[narrowest]
    return speeds
