"""Starts the processes of a job and ends them together.

- `phalanx.cluster.launch.plan`: the tasks of a job, and the environment of each.
- `phalanx.cluster.launch.ports`: ports for them on this machine.
- `phalanx.cluster.launch.process`, `phalanx.cluster.launch.guard`: one process and its end.
- `phalanx.cluster.launch.output`: lines, and the traceback that explains a failure.
- `phalanx.cluster.launch.policy`: when a job is over and how it is ended, as a state machine.
- `phalanx.cluster.launch.gang`: the loop that runs the processes.
- `phalanx.cluster.launch.job`: a whole job, with its hub and its restarts.
- `phalanx.cluster.launch.jobs`: how other processes find the jobs that run.
- `phalanx.cluster.launch.remote`, `phalanx.cluster.launch.agent`: processes on other hosts.
- `phalanx.cluster.launch.resolve`: become a task of a cluster that others have started.
"""
