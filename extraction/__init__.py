"""The search for the cheapest legal plan: `extract.extract`.

Nothing is imported here: codegen reads `plan` and the search imports codegen; a saved kernel runs without the search.
"""
