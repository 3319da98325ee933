"""What becomes of several trained models: a soup, a student, or a look at what lies between them.

Read `models` first: it gathers the models of runs, and measures any point of their space.
"""
