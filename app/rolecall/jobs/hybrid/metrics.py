"""The metrics of `hybrid`. Bytes and latency of each call are in the metrics of remote calls, by method."""

from __future__ import annotations

from rolecall import Metric

METRICS = (
    Metric("counter", "hybrid_lookups_total", "Rows looked up, including repetitions.", roles=("ps",)),
    Metric("counter", "hybrid_rows_total", "Rows updated, each once a step.", roles=("ps",)),
    Metric(
        "counter",
        "hybrid_stall_seconds_total",
        "Time that a rank waited, by cause.",
        labels=("cause",),
        roles=("ps", "trainer"),
    ),
    Metric("gauge", "hybrid_table_rows", "Rows of a hashed table.", roles=("ps",)),
    Metric(
        "gauge",
        "hybrid_filter_fill",
        "Share of the cells of a hashed table's filter that are used, 0 to 1.",
        roles=("ps",),
    ),
    Metric("counter", "hybrid_births_total", "Rows that a hashed table gave to new ids.", roles=("ps",)),
    Metric(
        "counter",
        "hybrid_evictions_total",
        "Rows that a hashed table evicted, by reason: ttl, max_rows.",
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
        "histogram", "hybrid_skew_seconds", "Time from a step's first gradient of the table to its last.", roles=("ps",)
    ),
    Metric(
        "counter",
        "hybrid_phase_seconds_total",
        "Time spent in a phase of steps: dense (forward pass), backward (with its all-reduce), optimizer.",
        labels=("phase",),
        roles=("trainer",),
    ),
    Metric(
        "gauge",
        "hybrid_allreduce_seconds",
        "Mean time of an all-reduce of dense gradients, which is measured at intervals.",
        roles=("trainer",),
    ),
)
