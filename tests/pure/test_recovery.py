"""What one re-form cost, put together from what driver and ranks tell, in whatever order."""

from __future__ import annotations

from elastic.cluster.recovery import Recovery


def test_steps_of_the_generation_that_begins_anew_are_not_lost() -> None:
    """A rank may tell of its first new step before rank 0 tells of its own."""
    recovery = Recovery()
    recovery.begin_start()
    recovery.reached(7)
    recovery.planned("leaving a node", world_size=3)
    recovery.reached(8)
    recovery.begin_start()
    recovery.reached(9)
    assert recovery.lost_steps(resumed_step=8) == 0
    assert recovery.finish(first_step_s=0.1) is not None

    recovery.reached(12)
    recovery.failed("a death", world_size=2)
    recovery.begin_start()
    recovery.reached(11)
    assert recovery.lost_steps(resumed_step=10) == 2
