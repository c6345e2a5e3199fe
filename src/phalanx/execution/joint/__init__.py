"""One SPMD program out of several that do the same with different shapes.

Replicas with different numbers of rows run the same Python step, but not the same program: every shape
gives another one. Such programs have the same collectives in the same order, mostly with the same
shapes. Everything else may differ. The joint program computes what lies between collectives in a
`lax.switch` with one branch per program, of which each replica takes its own. Outside of switches are

* collectives, so that all replicas reach them;
* equations that are the same in all programs, if they are computed from common values alone: the update
  of the variables after the gradients have been summed, say.

A value that differs in shape between programs is kept in an array of the largest shape between two
switches. A branch cuts its own part out of it, so what the step sees has its true shape, and whatever
else is in that array is never looked at.

`rooms` says how values lie in larger arrays, `sameness` and `reading` which values of different
programs are the same, `scheduling` what is computed where; `writing` and `control_flow` write the joint
program.
"""

from phalanx.core.padding import CannotJoin
from phalanx.execution.joint.control_flow import join
from phalanx.execution.joint.rooms import Slot

__all__ = ["CannotJoin", "Slot", "join"]
