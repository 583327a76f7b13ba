"""The page in the browser.

state      the state that the page shows, as JSON
rates      calls per second and latency, from ranks' reports
leftover   the state of a run of which only files are left
render     the page as HTML
command    `rolecall page`
"""
