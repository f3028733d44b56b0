"""A discrete-event simulation of a sweep: what another machine, another split of its GPUs or another method would take.

    model.py    what a machine costs and what there is to do: parameters, and where they come from
    events.py   one stage, event by event: engines with continuous batching, a learner that may take groups as they are complete
    sweep.py    a whole sweep of a method: trunks, stages, updates, pushes
    fit.py      the parameters of a machine, from a run's metrics
    report.py   tables, comparisons at equal tokens, the figure
"""
