"""PromQL that holds however the ranks are scraped: under compose.yaml, by a PodMonitor, by annotations.

Samples of a rank carry no label that says which rank; `rolecall_rank_info` of the same `instance` does. Its `job` is
renamed to exported_job by Prometheus, whose targets have a `job` of their own, unless honor_labels is set: `RANKS` has
it as `job` either way.
"""

from __future__ import annotations

from collections.abc import Iterable

_IN = 'namespace=~"$namespace"'
RANKS = (
    "max by (namespace, instance, job, role, ordinal) ("
    f'label_replace(rolecall_rank_info{{exported_job=~"$job",{_IN}}}, "job", "$1", "exported_job", "(.+)")'
    f' or rolecall_rank_info{{exported_job="",job=~"$job",{_IN}}})'
)
JOB = "{{namespace}} {{job}}"
RANK = "{{namespace}} {{job}} {{role}}_{{ordinal}}"


def ranked(expr: str, *labels: str) -> str:
    """`expr` of the chosen jobs, with the labels job, role and ordinal, or with job and `labels`. A binary operation
    needs its brackets.
    """
    return f"{expr} * on (instance) group_left ({', '.join(('job', *(labels or ('role', 'ordinal'))))}) {RANKS}"


def total(expr: str, *by: str, how: str = "sum") -> str:
    """`expr` summed (or what `how` says) over the ranks of each job, or over all that agree in `by` as well."""
    return f"{how} by ({', '.join(('namespace', 'job', *by))}) ({ranked(expr)})"


def gang(metric: str, *by: str) -> str:
    """A metric of rank 0 that has a role of its own, which is not rank 0's."""
    return f"sum by ({', '.join(('namespace', 'job', *by))}) ({ranked(metric, 'ordinal')})"


def rate(metric: str, selector: str = "") -> str:
    return f"rate(rolecall_{metric}{selector}[$__rate_interval])"


def per_second(metric: str, *by: str) -> str:
    """The rate of a counter, over all ranks of a job."""
    return total(rate(metric), *by)


def mean(histogram: str, *by: str) -> str:
    """The mean of what a histogram observed."""
    return f"{per_second(histogram + '_sum', *by)} / {per_second(histogram + '_count', *by)}"


def quantile(share: float, histogram: str, *by: str) -> str:
    return f"histogram_quantile({share:g}, {per_second(histogram + '_bucket', *by, 'le')})"


def state(metric: str, states: Iterable[str]) -> str:
    """A metric with a `state` label as the position of the one state that is 1, for `states`' value mappings."""
    places = [f'{place} * rolecall_{metric}{{state="{name}"}}' for place, name in enumerate(states)]
    return ranked(f"({' + ignoring (state) '.join(places)})")


def against_median(expr: str) -> str:
    """`expr` of each rank over the median of its job's ranks."""
    median = f"quantile by (namespace, job) (0.5, {ranked(expr)})"
    return f"{ranked(expr)} / on (namespace, job) group_left () {median}"
