"""Live page of a running job in a browser: a server on its host, which reads what the ranks tell any observer.

`watching` looks at the ranks, `frames` turns what they say into messages, `serving` sends these to browsers, and
``static`` has the page, which needs no other server. Nothing here is imported in a rank, and nothing changes a job.
"""
