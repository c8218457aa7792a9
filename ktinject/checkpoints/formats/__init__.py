"""Source formats: how a checkpoint stores one weight, and how to get its values back.

One file a format, which draws its tensors; base.py has the contract, table.py the registry: a format is added there,
and nowhere else. `<key>` is the name of the weight's tensor, usually ending in `.weight`, and `<stem>` is the key
without that ending.
"""
