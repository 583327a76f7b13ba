"""`rolecall run JOB --on slurm`: describes the job, and follows its run on the cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from rolecall.declare import describe
from rolecall.declare.flags import RunOptions
from rolecall.launch.followed import Followed
from rolecall.launch.local import is_live, settings_of
from rolecall.launch.slurm import Slurm
from rolecall.record import rundir


def run(target: str, words: Sequence[str], options: RunOptions) -> int:
    """Runs the job `target`, with the flags in `words`, on the cluster, as `options` say. Returns the exit code.
    Raises UsageError, and SystemExit as `describe.ask` does."""
    job = describe.ask(target, words)
    settings = settings_of(job)
    given = "checkpoint_dir" in settings.model_fields_set
    directory = (settings.checkpoint_dir if given else rundir.of_run(job.name)).absolute()
    cluster = Slurm(job, settings, options, directory)
    if options.dry_run:
        print(cluster.manifest(), end="")
        return 0

    async def main() -> int:
        return await Followed(job, settings, cluster, directory, keeps=options.keep, live=is_live(job)).run()

    return asyncio.run(main())
