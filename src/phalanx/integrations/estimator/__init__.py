"""Estimators: a function that says what a model is, and loops that train, evaluate and predict.

* ``run_config``: when and where things happen; ``specs``: what users hand over
* ``named_state``: what `model_fn` asks for by name, and is made once
* ``replica_steps``: the compiled steps, which call `model_fn` on each replica
* ``hooks``: what happens between steps; ``summaries``; ``input_functions``
* ``estimator``: `Estimator`; ``driving``: `train_and_evaluate`

The public names are in `px.estimator`.
"""
