"""Rank 0's page in the browser, also as one file.

command.py   `rolecall page RUN_DIRECTORY`: how a run went, as one HTML file
leftover.py  The page's state for a run of which only files are left: summary and history
rates.py     Calls per second and their latency, from the counters in ranks' reports
render.py    The page as HTML: rank 0 serves it during a run; of a run that is over it is one file
state.py     The state that the page shows, as JSON: of a run under way from its gang, of one
"""
