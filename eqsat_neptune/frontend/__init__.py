"""From positional array code to terms: tensors, their axes, and the functions of the namespace `xp`.

| module | one reason to change |
|---|---|
| `axes.py` | which axes are one, split, or must stay apart |
| `dtypes.py` | promotion |
| `tensor.py` | what a traced tensor is; the primitives: align, reduce, reshape, read, take |
| `creation.py` … `extras.py` | the functions of `xp`, each in terms of the primitives |
| `views.py` | slices of computed tensors, moved inwards where that is free |
"""
