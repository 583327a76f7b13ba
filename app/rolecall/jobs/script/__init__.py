"""An unmodified torch.distributed.rpc program: every rank runs the same file, or calls the same function of it.

docs/script.md describes the environment of the program.
"""

from __future__ import annotations

from pydantic import Field

from rolecall import Job, PerRank, Role, Settings


class ScriptSettings(Settings):
    """The settings of `script`."""

    script: PerRank[str] = Field(
        "", description="the program: FILE.py (run as __main__), FILE.py:FUNCTION or package.module:FUNCTION"
    )
    ranks: int = Field(2, ge=1, le=1024, description="number of ranks, the program's world size")
    script_args: str = Field(
        "",
        description="the arguments of the program, or of its function, quoted as for a shell; {rank} and {world_size} "
        "are replaced",
    )


JOB = Job(
    summary="your own torch RPC program, unmodified: one file, run in every rank",
    settings=ScriptSettings,
    roles=(Role("rank", "rolecall.jobs.script.rank:run", count="RANKS", preload=("torch._dynamo",)),),
    check="rolecall.jobs.script.rank:check",
    rpc=False,
)
