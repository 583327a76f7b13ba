"""`rolecall run JOB --on slurm`, or `kubernetes`: describes the job, and follows its run on the cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from rolecall.declare import describe, flags
from rolecall.declare.flags import RunOptions
from rolecall.launch import needs
from rolecall.launch.followed import Cluster, Followed
from rolecall.launch.local import is_live, settings_of
from rolecall.record import rundir


def run(target: str, words: Sequence[str], options: RunOptions) -> int:
    """Runs the job `target`, with the flags in `words`, on the cluster that `options` name. Returns the exit code.
    Raises UsageError, and SystemExit as `describe.ask` does."""
    job = describe.ask(target, words)
    settings = settings_of(job)
    given = "checkpoint_dir" in settings.model_fields_set
    directory = (settings.checkpoint_dir if given else rundir.of_run(job.name)).absolute()
    cluster: Cluster
    if options.engine == flags.SLURM:
        from rolecall.launch.slurm import Slurm

        cluster = Slurm(job, settings, options, directory)
    else:
        from rolecall.launch.kubernetes import Kubernetes

        cluster = Kubernetes(needs.given(job, options.roles), settings, options, directory)
    if options.dry_run:
        print(cluster.manifest(), end="")
        return 0

    async def main() -> int:
        return await Followed(job, settings, cluster, directory, keeps=options.keep, live=is_live(job)).run()

    return asyncio.run(main())
