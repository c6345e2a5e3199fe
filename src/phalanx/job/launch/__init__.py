"""Starts the processes of a job and ends them together.

- `phalanx.job.launch.task_environment`: the tasks of a job, and the environment of each.
- `phalanx.job.launch.ports`: ports for them on this machine.
- `phalanx.job.launch.worker_process`, `phalanx.job.launch.guard`: one process and its end.
- `phalanx.job.launch.output`: lines, and the traceback that explains a failure.
- `phalanx.job.launch.exit_policy`: when a job is over and how it is ended, as a state machine.
- `phalanx.job.launch.process_group`: the loop that runs the processes.
- `phalanx.job.launch.launcher`: a whole job, with its hub and its restarts.
- `phalanx.job.registry`: how other processes find the jobs that run.
- `phalanx.job.launch.remote`, `phalanx.job.launch.agent`: processes on other hosts.
- `phalanx.job.launch.from_resolver`: become a task of a cluster that others have started.
"""
