"""Rank 0's page in the browser, also as one file.

rates.py     Calls, queues and weights, from the gauges and counters in ranks' reports
render.py    The page as HTML: rank 0 serves it during a run; of a run that is over it is one file
state.py     The state that the page shows, as JSON
"""
