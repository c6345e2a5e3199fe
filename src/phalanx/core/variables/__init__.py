"""Variables: what they are made from and hold, their kinds, and how steps change them.

* ``variable_spec``, ``bundles``   what a variable is made from, and what it holds
* ``variable``                     `Variable` itself
* ``distributed_variables``, ``sliced_variables``   the kinds that strategies with several replicas make
* ``traced_variables``             variables in programs that are traced
* ``recorded_updates``             variables whose values are in other processes
* ``transactions``                 all variables of a step change at once, or none does
* ``variable_parts``               what checkpoints write of them
"""
