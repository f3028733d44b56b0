"""The tabular laboratory: games so small that every value is known exactly, played and trained by the shipped objects.

    tree      a finite game, its exact values, its rollouts as records
    tabular   a policy with one logit a (state, prefix, token), for the real learner
    lab       exact and sampled stages through the real credit, pipeline and learner
    facts_credit, facts_update, facts_sweep   one function a fact: lines of (what, expected, measured)
    report    all facts as a table: `rtpo theory`
"""
