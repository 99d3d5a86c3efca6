"""A plan in other frameworks: `hugging_face`, `accelerator`, `lightning`, each imported when it is first needed.

These modules are the only place that knows their argument names. Frameworks that take one batch size and a number of
accumulation steps need a plan whose micro-batches are equal: `SearchSpace(even_split=True)`.
"""
