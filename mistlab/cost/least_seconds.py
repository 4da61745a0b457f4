"""The least times of stages that differ in how many of their blocks recompute.

Axes: C candidates.
"""

import numpy as np

from mistlab.values.stages import StageSeconds


def least_seconds(one: StageSeconds, other: StageSeconds) -> StageSeconds:
    """Times that neither of two candidates undercuts, nor any candidate between them that has
    slots of the same kinds.

    The number of each kind of slot is linear in the number of recomputed blocks. So each part below
    rises or falls all the way between the two candidates, and is least at one of them. Sums of
    parts are put together again from the least parts.
    """
    both = one, other
    least = np.minimum
    through_forward_s, through_backward_s, within_forward_s, within_backward_s = (
        least(*(getattr(seconds, name) for seconds in both))
        for name in (
            *("through_forward_s", "through_backward_s"),
            *("within_forward_s", "within_backward_s"),
        )
    )
    beyond_forward_s = least(*(s.forward_s - s.through_forward_s for s in both))
    beyond_backward_s = least(*(s.backward_s - s.through_backward_s for s in both))
    first_s = least(*(s.forward_s + s.delta_forward_s for s in both))
    forward_s = through_forward_s + beyond_forward_s
    return StageSeconds(
        forward_s=forward_s,
        backward_s=through_backward_s + beyond_backward_s,
        through_forward_s=through_forward_s,
        through_backward_s=through_backward_s,
        delta_forward_s=first_s - forward_s,
        delta_backward_s=least(one.delta_backward_s, other.delta_backward_s),
        within_forward_s=within_forward_s,
        within_backward_s=within_backward_s,
        after_first_s=least(one.after_first_s, other.after_first_s),
        point_to_point_s=least(one.point_to_point_s, other.point_to_point_s),
        step_s=least(one.step_s, other.step_s),
        exposed_communication_s=least(one.exposed_communication_s, other.exposed_communication_s),
    )
