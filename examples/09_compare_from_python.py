"""The ranking of `gossamer compare` in a program or a notebook, in a few lines.

The answer prints as a table. In a notebook it is shown with its picture; `pandas.DataFrame` takes
`ranking.table()`, and `ranking.report("ranking.html")` writes the page.
"""

import gossamer

ranking = gossamer.compare(
    "digits-mlp",  # or a Task of your own: 02_own_task.py
    ["all_reduce", "ad_psgd", "local_sgd:period=8"],
    "one-slow-of-8",
    learning_rates=[0.1, 0.3],
    epochs=4,
    jobs=1,
)
for row in ranking.table():
    print(f"{row['method']:18}  lr {row['learning_rate']:g}  {row['seconds_to_target']:.2f} s")
print(ranking.verdict.partition(";")[0])

# Prints:
# ad_psgd             lr 0.3  0.28 s
# all_reduce          lr 0.3  1.20 s
# local_sgd:period=8  lr 0.3  1.28 s
# ad_psgd reaches 92 % first, after 0.280 s (0.243-0.324 s)
