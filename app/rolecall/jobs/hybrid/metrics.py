"""The metrics of `hybrid`. Bytes and latency of each call are in the metrics of remote calls, by method."""

from __future__ import annotations

from rolecall import Metric

METRICS = (
    Metric("counter", "hybrid_lookups_total", "Rows looked up, including repetitions.", roles=("ps",)),
    Metric("counter", "hybrid_rows_total", "Rows updated, each counted once per step.", roles=("ps",)),
    Metric(
        "counter",
        "hybrid_stall_seconds_total",
        "Time in which a rank waits, by cause.",
        labels=("cause",),
        roles=("ps", "trainer"),
    ),
    Metric("gauge", "hybrid_table_rows", "Rows in a hashed table.", roles=("ps",)),
    Metric("gauge", "hybrid_filter_fill", "Fraction of a hashed table's filter in use, 0 to 1.", roles=("ps",)),
    Metric("counter", "hybrid_births_total", "Rows created in a hashed table for ids that repeat.", roles=("ps",)),
    Metric(
        "counter",
        "hybrid_evictions_total",
        "Rows evicted from a hashed table, by reason: ttl, max_rows.",
        labels=("reason",),
        roles=("ps",),
    ),
    Metric(
        "counter",
        "hybrid_disk_rows_total",
        "Rows read from disk into memory, and rows written back.",
        labels=("direction",),
        roles=("ps",),
    ),
    Metric("histogram", "hybrid_lookup_seconds", "Time to pool one trainer's bags.", roles=("ps",)),
    Metric("histogram", "hybrid_update_seconds", "Time of a step's update of the table.", roles=("ps",)),
    Metric(
        "histogram", "hybrid_skew_seconds", "Time between a step's first and last gradient of the table.", roles=("ps",)
    ),
    Metric(
        "counter",
        "hybrid_phase_seconds_total",
        "Time in a phase of a step: dense (forward pass), backward (with its all-reduce), optimizer.",
        labels=("phase",),
        roles=("trainer",),
    ),
    Metric(
        "gauge",
        "hybrid_allreduce_seconds",
        "Mean time of an all-reduce of dense gradients, sampled at intervals.",
        roles=("trainer",),
    ),
)
