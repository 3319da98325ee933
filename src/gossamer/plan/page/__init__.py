"""A page that answers at once: the closed forms of `gossamer.plan.cost` with sliders.

Read `planner` first: what the page is told. The forms exist once, in Python; `javascript` puts them
into the language of the browser, so that page and command cannot disagree.
"""
