"""From positional array code to terms: tensors, their axes, and the functions of the namespace `xp`.

| module | one reason to change |
|---|---|
| `axes.py` | which axes are one, split, or must stay apart |
| `dtypes.py` | promotion |
| `tracing.py` | what a traced function has made: axes, terms, and the names under which these may be read |
| `tensor.py` | what a traced tensor is |
| `arguments.py` | what functions may be given |
| `primitives.py` | align, elementwise, reduce, reshape, read, take |
| `subscripts.py` | what may stand in x[…] |
| `creation.py` … `extras.py` | the functions of `xp`, each in terms of the primitives |
| `views.py` | slices of computed tensors, moved inwards where that is free |
"""
