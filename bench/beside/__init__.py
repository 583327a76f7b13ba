"""Six programs on Rolecall, Ray and Monarch, each with checkpoints and alive after kills, for docs/beside.md."""
